"""Every way to make a batch of equal micro-batches: its memory predicted, its FLOPs counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .experiment import Setting, predict_memory
from .flops import training_flops
from .report import MemoryReport
from .units import positive_int


@dataclass(frozen=True)
class Combination:
    """One way to make a batch: its micro-batch, how many of them, checkpointing or not; memory, and FLOPs of all."""

    micro_batch: int
    steps: int
    checkpointing: bool
    needed_bytes: int
    fits: bool
    flops: int
    report: MemoryReport = field(repr=False, compare=False)


def equal_splits(batch: int) -> list[tuple[int, int]]:
    """Every (micro-batch, steps) with micro-batch × steps = batch, the largest micro-batch first."""
    batch = positive_int(batch, "batch")
    return [(batch // steps, steps) for steps in range(1, batch + 1) if batch % steps == 0]


def split_setting(micro_batch: int, steps: int, **settings: Any) -> Setting:
    """The experiment that needs the memory of `steps` micro-batches; it runs at most two of them a step.

    From the second on each finds the same gradients there.
    """
    return Setting(micro_batch, min(positive_int(steps, "steps"), 2), **settings)


def splits(batch: int, *, gpu: str | None = None, **settings: Any) -> list[Combination]:
    """Every split of a batch into equal micro-batches, the largest first, its memory predicted, its FLOPs counted."""
    found = []
    for micro_batch, steps in equal_splits(batch):
        setting = split_setting(micro_batch, steps, **settings)
        report, flops = predict_memory(setting, gpu=gpu), steps * training_flops(setting).total
        way = (micro_batch, steps, setting.gradient_checkpointing)
        found.append(Combination(*way, report.needed_bytes, report.fits, flops, report))
    return found
