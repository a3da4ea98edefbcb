"""The phases of a step of GRPO: what the GPU held at most in each, by `torch.cuda` alone, on either kind of GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtual_gpu.cards import GPUSpec, card
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...rows import LeftRows
from ...watched import telling
from ..c11_outside.tried import Outcome, attempt

ROLLOUT, REFERENCE, LOSS, BACKWARD, STEP = NAMES = ("rollout", "reference", "loss", "backward", "step")


def words(name: str) -> str:
    """A phase's name for the reader."""
    return {
        ROLLOUT: tr(ko="롤아웃", en="rollout"),
        REFERENCE: tr(ko="기준 모델", en="reference"),
        LOSS: tr(ko="손실까지", en="loss"),
        BACKWARD: tr(ko="역전파", en="backward"),
        STEP: tr(ko="갱신", en="step"),
    }[name]


@dataclass(frozen=True)
class Phase:
    """One phase; bytes: held at its beginning, at most, and at its end; reserved: by the allocator at its end."""

    name: str
    start: int
    peak: int
    end: int
    reserved: int


@dataclass(frozen=True)
class Steps:
    """The phases of some steps, one after another, the last one unfinished where `outcome.died`; room: bytes."""

    phases: list[Phase]
    outcome: Outcome
    room: int

    def peaks(self) -> dict[str, int]:
        """phase → the most bytes held in it, in all steps."""
        return {name: max(one.peak for one in self.phases if one.name == name) for name in self.names()}

    def names(self) -> list[str]:
        """The phases that there were, in the order of a step."""
        return [name for name in NAMES if any(one.name == name for one in self.phases)]

    @property
    def result(self) -> str:
        """How it ended: in words, with the phase and the step where it died."""
        if self.outcome.died is None or not self.phases:
            return self.outcome.result
        name = self.phases[-1].name
        return tr(
            ko=f"스텝 {self.last}의 {words(name)}에서 {self.outcome.result}",
            en=f"step {self.last}, {words(name)}: {self.outcome.result}",
        )

    @property
    def last(self) -> int:
        """The step in which it ended, the first is 1."""
        return 1 + sum(one.name == STEP for one in self.phases[:-1])


@contextmanager
def phases_of(trainer: Any, found: list[Phase]) -> Iterator[None]:
    """Fill the list with the phases of a GRPOTrainer while the block runs: one after another, in their order.

    Its own methods are called unchanged: `_generate` (rollout), `_get_per_token_logps_and_entropies` without gradients
    (reference), `_compute_loss`, `accelerator.backward`, and the optimizer's step.
    """
    begun: list[int] = []

    def begin(*_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        begun.append(torch.cuda.memory_allocated())

    def end(name: str) -> None:
        held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        found.append(Phase(name, begun.pop(), most, held, torch.cuda.memory_reserved()))

    def watched(owner: Any, method: str, name: str, always: bool = True) -> Callable[[], None]:
        call = getattr(owner, method)

        def watch(*args: Any, **kwargs: Any) -> Any:
            if not always and torch.is_grad_enabled():
                return call(*args, **kwargs)
            begin()
            try:
                return call(*args, **kwargs)
            finally:
                end(name)

        setattr(owner, method, watch)
        return lambda: delattr(owner, method)

    undo = [
        watched(trainer, "_generate", ROLLOUT),
        watched(trainer, "_get_per_token_logps_and_entropies", REFERENCE, always=False),
        watched(trainer, "_compute_loss", LOSS),
        watched(trainer.accelerator, "backward", BACKWARD),
        register_optimizer_step_pre_hook(begin).remove,
        register_optimizer_step_post_hook(lambda *_: end(STEP)).remove,
    ]
    try:
        yield
    finally:
        if begun:  # the optimizer died between its two hooks
            end(STEP)
        for one in undo:
            one()


def steps_of(program: Callable[[list[Phase]], Any], gpu: str | GPUSpec = "T4") -> Steps:
    """Run a program on a virtual card; it gets a list for its phases, and hands it to `phases_of`."""
    phases: list[Phase] = []
    outcome = attempt(lambda: program(phases), gpu)
    return Steps(phases, outcome, card(gpu).capacity_bytes)


def compare_steps(programs: Mapping[str, Callable[[list[Phase]], Any] | Steps], gpu: str | GPUSpec = "T4") -> LeftRows:
    """One row a program, or what `steps_of` found of it: the peaks of the phases in all of its steps, how it ended."""
    found = {}
    with telling() as told:
        for number, (name, one) in enumerate(programs.items(), 1):
            told(f"{number}/{len(programs)}: {name}")
            found[name] = one if isinstance(one, Steps) else steps_of(one, gpu)
    names = [name for name in NAMES if any(name in one.names() for one in found.values())]
    rows = []
    for name, one in found.items():
        peaks = one.peaks()
        rows.append([name, *(_whole(peaks[phase]) if phase in peaks else "–" for phase in names), one.result])
    return LeftRows(["", *map(words, names), tr(ko="결과", en="result")], rows)


def _whole(nbytes: int) -> str:
    """A size that no table breaks before its unit."""
    return human_bytes(nbytes).replace(" ", "\N{NO-BREAK SPACE}")
