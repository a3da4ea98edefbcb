"""Two records side by side: a verdict on each case, and how many there are of each kind by family."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from virtual_gpu.allocator import round_size

from .cases.run import MARK

KINDS = (
    "equal", "other blocks", "other order", "same peak", "both raised", "card raised", "virtual raised", "differs",
    "card only",
)  # fmt: skip
"""From the best to the worst. "other blocks": the same requests in the same order, and another peak, because a large
block was given whole that has up to 1 MiB too much; "other order": the same requests and peak; "same peak": others."""


_LEAST_PEAK = MARK + 512  # bytes: a card's run begins with an allocation of this size, which stands for no case


def read(path: str | Path) -> dict[str, dict[str, Any]]:
    """case → its row, of a record; one that was cut off is read as far as it goes. ValueError where there is no row."""
    rows: dict[str, dict[str, Any]] = {}
    with gzip.open(path, "rt") as file, contextlib.suppress(EOFError, zlib.error, json.JSONDecodeError):
        for line in file:
            row = json.loads(line)
            if "case" in row:
                rows[row["case"]] = row
    if not rows:
        raise ValueError(f"{path}: no record of operations")
    return rows


def blocks(requests: list[int]) -> list[int]:
    """In the allocator's blocks of 512 bytes; releases that follow each other by their size, which is no difference."""
    out: list[int] = []
    for releases, group in itertools.groupby(requests, lambda size: size < 0):
        sizes = [round_size(abs(size)) if size else 0 for size in group]
        out += sorted((-size for size in sizes), reverse=True) if releases else sizes
    return out


def judge(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, str]:
    """(kind, detail) of two rows of a case: the worst of its runs."""
    raised = _raised(ours, theirs)
    if raised:
        return raised
    found = [_judge_run(a, b) for a, b in itertools.zip_longest(_twice(ours, theirs), _twice(theirs, ours))]
    number, (kind, detail) = max(enumerate(found), key=lambda item: KINDS.index(item[1][0]))
    return kind, f"run {number}: {detail}" if detail else ""


def _raised(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, str] | None:
    if "error" in ours and "error" in theirs:
        return "both raised", theirs["error"]
    if "error" in theirs:
        return "card raised", theirs["error"]
    return ("virtual raised", ours["error"]) if "error" in ours else None


def _twice(row: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs; one that stands for two equal ones as often as the other side has them."""
    runs = row["runs"]
    return runs * len(other["runs"]) if len(runs) == 1 and "samples" not in row["case"] else runs


def _judge_run(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> tuple[str, str]:
    if ours is None or theirs is None:
        return "differs", "only one side has this run"
    raised = _raised(ours, theirs)
    if raised:
        return raised
    a, b = blocks(ours["requests"]), blocks(theirs["requests"])
    peaks = max(ours["peak"], _LEAST_PEAK), max(theirs["peak"], _LEAST_PEAK)
    if a == b:
        return (
            ("equal", "") if peaks[0] == peaks[1] else ("other blocks", f"peak {peaks[0]:,} here, {peaks[1]:,} there")
        )
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    detail = (
        f"at {at}: {_around(a, at)} here, {_around(b, at)} on the card; peak {peaks[0]:,} here, {peaks[1]:,} on "
        f"the card ({peaks[1] - peaks[0]:+,}); only here {_only(a, b)}; only on the card {_only(b, a)}"
    )
    if peaks[0] != peaks[1]:
        return "differs", detail
    return "other order" if sorted(a) == sorted(b) else "same peak", detail


def _around(requests: list[int], at: int) -> str:
    return f"{requests[at]:+,}" if at < len(requests) else "the end"


def _only(one: list[int], other: list[int]) -> str:
    """The commonest sizes that only the one asks for."""
    more = Counter(size for size in one if size > 0) - Counter(size for size in other if size > 0)
    return ", ".join(f"{count}×{size:,}" for size, count in more.most_common(5)) or "none"


def differences(virtual: str | Path, card: str | Path, only: str = "") -> dict[str, tuple[str, str]]:
    """case → (kind of `KINDS`, detail) of two records' files; only: of the cases with this in their name."""
    ours, theirs = read(virtual), read(card)
    return {
        case: judge(ours[case], row) if case in ours else ("card only", "")
        for case, row in theirs.items()
        if not case.endswith("[stacks]") and only in case
    }


def table(found: dict[str, tuple[str, str]]) -> str:
    """Markdown: a row a family, a column a kind of verdict."""
    counts: dict[str, Counter[str]] = {}
    for case, (kind, _) in found.items():
        counts.setdefault(case.partition(":")[0], Counter())[kind] += 1
    rows = [*sorted(counts.items()), ("**all**", sum(counts.values(), Counter()))]
    lines = [("family", "cases", *KINDS), ("---",) * (len(KINDS) + 2)]
    lines += [(name, f"{kinds.total():,}", *(f"{kinds[kind]:,}" for kind in KINDS)) for name, kinds in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
