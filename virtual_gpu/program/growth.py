"""What a program keeps of each step: memory that grows until the card is full, however much it has."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..language import tr
from ..units import MiB, human_bytes
from .watch import Watch, category_of

_LEAST = MiB  # bytes a step; less than that are losses in a list, which no card dies of
_STEPS = 3  # at most so many steps are looked at, each of which has to have left something
_STAYS = frozenset(("parameters", "gradients", "optimizer", "buffers", "workspaces", "engine"))


def growth_of(watch: Watch, room: int | None) -> dict[str, Any] | None:
    """Bytes that each step leaves behind, the line that made most of them, and after how many more it fills `room`.

    room: bytes of the card that were never reserved; None where the memory ran out.

    None where there were not three steps, or the last ones but one did not all leave something made at the same line:
    what a step made may stay until the next one has made its own.
    """
    ends = watch.step_ends
    steps = [*zip([0, *ends], ends, strict=False)][-1 - _STEPS : -1]
    if len(steps) < 2:
        return None

    left = [Counter() for _ in steps]
    alive = (one for one in watch.blocks.values() if one.freed is None or one.freed >= ends[-1])
    for block in alive:
        if category_of(block, watch) in _STAYS:
            continue
        for (start, end), lines in zip(steps, left, strict=True):
            if start <= block.born < end:
                lines[block.line] += block.held
    by_line = {line: min(lines[line] for lines in left) for line in left[-1]}
    total = sum(by_line.values())
    if total < _LEAST:
        return None
    file, line = max(by_line, key=by_line.__getitem__)
    return {"bytes": total, "file": file, "line": line, "more_steps": None if room is None else room // total}


def growth_label(growth: dict[str, Any], place: str) -> str:
    """What is said of it; place: the line, as a person reads it."""
    nbytes, more = human_bytes(growth["bytes"]), growth["more_steps"]
    ko, en = "", ""
    if more is not None:
        ko = f" 이대로면 스텝 {more:,}번쯤 뒤에 카드가 찬다."
        en = f" At this rate the card is full after about {more:,} more steps."
    return tr(
        ko=f"스텝마다 {nbytes}씩 는다. {place}에서 만든 텐서를 다음 스텝에도 붙들고 있다.{ko} 값만 모으려면 "
        ".item()이나 .detach().cpu()를 쓴다",
        en=f"grows by {nbytes} a step: tensors made at {place} are kept.{en} To gather values alone: .item() or "
        ".detach().cpu()",
    )
