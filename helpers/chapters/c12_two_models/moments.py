"""What lies on the card when: the large tensors of a step that makes all logits, and the parts of peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from virtual_gpu.cards import GPUSpec, card
from virtual_gpu.language import tr
from virtual_gpu.program import words
from virtual_gpu.program.device import ProgramGPU
from virtual_gpu.program.report import make_report
from virtual_gpu.program.watch import BACKWARD, EVALUATION, LOADING, Block
from virtual_gpu.units import MiB, human_bytes

from ...rows import LeftRows
from ...watched import telling
from ..c11_outside.tried import Outcome, attempt

KINDS = ("rest", "logits", "log_softmax", "reference logits", "reference log_softmax", "copy", "gradients")
_LARGE = 0.25  # of the largest tensor that the step makes
_SOFTMAX = "_log_softmax"


def kind_words(kind: str) -> str:
    """A kind of tensor, for the reader."""
    return {
        "rest": tr(ko="가중치와 나머지", en="weights and the rest"),
        "logits": tr(ko="로짓", en="logits"),
        "log_softmax": "log_softmax",
        "reference logits": tr(ko="기준 로짓", en="reference logits"),
        "reference log_softmax": tr(ko="기준 log_softmax", en="reference log_softmax"),
        "copy": tr(ko="자른 로짓의 사본", en="copy of the cut logits"),
        "gradients": tr(ko="로짓의 그레이디언트", en="gradients of logits"),
    }[kind]


@dataclass(frozen=True)
class Moment:
    """The highest moment while one kind of tensor was made. held: (kind, bytes), the rest first, then as they came."""

    made: str
    held: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """The moment, for the reader."""
        return tr(ko="역전파", en="backward") if self.made == "gradients" else kind_words(self.made)

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(nbytes for _, nbytes in self.held)


@dataclass(frozen=True)
class Moments:
    """The moments of a step in their order, and how it ended; room: bytes of the card."""

    rows: tuple[Moment, ...]
    outcome: Outcome
    room: int


def moments_of(program: Callable[[], Any], gpu: str | GPUSpec = "T4") -> Moments:
    """Run a program on a virtual card and keep the moments at which it makes its largest tensors."""
    found: list[Moment] = []
    outcome = attempt(program, gpu, look=lambda one: found.extend(_moments(one)))
    return Moments(tuple(found), outcome, card(gpu).capacity_bytes)


def moments_of_each(programs: Mapping[str, Callable[[], Any]], gpu: str | GPUSpec = "T4") -> dict[str, Moments]:
    """`moments_of` for each, one after the other."""
    found = {}
    with telling() as told:
        for number, (name, program) in enumerate(programs.items(), 1):
            told(f"{number}/{len(programs)}: {name}")
            found[name] = moments_of(program, gpu)
    return found


@dataclass(frozen=True)
class Parts:
    """What a program's highest peak is made of: category → bytes, the largest first; room: bytes of the card."""

    held: dict[str, int]
    outcome: Outcome
    room: int

    @property
    def total(self) -> int:
        """All bytes: the peak, also where the program resets the statistics that the outcome reads."""
        return sum(self.held.values())


def parts_of_each(programs: Mapping[str, Callable[[], Any]], gpu: str | GPUSpec = "T4") -> dict[str, Parts]:
    """Run programs on a virtual card, one after the other: the parts of each one's highest peak."""
    found = {}
    with telling() as told:
        for number, (name, program) in enumerate(programs.items(), 1):
            told(f"{number}/{len(programs)}: {name}")
            parts: Counter[str] = Counter()
            outcome = attempt(program, gpu, look=lambda one, parts=parts: parts.update(_parts(one)))
            found[name] = Parts(dict(parts.most_common()), outcome, card(gpu).capacity_bytes)
    return found


def parts_beside(found: Mapping[str, Parts]) -> LeftRows:
    """A row for each part of 1 MiB and more, a column for each program, and their peaks."""
    names = list(dict.fromkeys(name for one in found.values() for name in one.held))
    rows = [
        [words.category(name), *(human_bytes(one.held.get(name, 0)) for one in found.values())]
        for name in names
        if any(one.held.get(name, 0) >= MiB for one in found.values())
    ]
    rows.append([tr(ko="모두", en="all"), *(human_bytes(one.total) for one in found.values())])
    return LeftRows(["", *found], rows)


def _parts(gpu: ProgramGPU) -> dict[str, int]:
    return make_report(gpu, gpu.watch, program="", status="", seconds=0).at_peak


def _moments(gpu: ProgramGPU) -> list[Moment]:
    watch = gpu.watch
    made = {number: one for number, one in watch.blocks.items() if watch.spans[one.span][0] != LOADING}
    least = _LARGE * max((one.held for one in made.values()), default=0)
    large = {number for number, one in made.items() if one.held >= least}
    moments: list[Moment] = []
    live: dict[int, tuple[str, int]] = {}
    rest, highest, doing = 0, 0, None
    for event in watch.events:
        block = watch.blocks[abs(event)]
        size = block.held if event > 0 else -block.held
        if abs(event) not in large:
            rest += size
        elif event > 0:
            kind = _kind(block, watch.spans[block.span][0])
            live[event] = kind, block.held
            if kind not in ("copy", doing):
                doing, highest = kind, 0
                moments.append(Moment(kind, ()))
        else:
            del live[-event]
        total = rest + sum(nbytes for _, nbytes in live.values())
        if doing is not None and total > highest:
            highest = total
            moments[-1] = Moment(doing, (("rest", rest), *live.values()))
    return moments


def _kind(block: Block, phase: str) -> str:
    if phase == BACKWARD:
        return "gradients"
    if block.operation == _SOFTMAX and block.freed == block.born + 1:
        return "copy"
    kind = "log_softmax" if block.operation == _SOFTMAX else "logits"
    return f"reference {kind}" if phase == EVALUATION else kind
