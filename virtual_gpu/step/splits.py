"""Every way to make a batch of equal micro-batches: its memory predicted, its FLOPs counted."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from ..real import GPU
from ..report import MemoryReport
from ..units import positive_int
from .flops import training_flops
from .predict import predict_memory
from .setting import Setting, check_size


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
    check_size(batch, 1)
    small = [steps for steps in range(1, math.isqrt(batch) + 1) if batch % steps == 0]
    steps = small + [batch // one for one in reversed(small) if one * one != batch]
    return [(batch // one, one) for one in steps]


def split_setting(micro_batch: int, steps: int, **settings: Any) -> Setting:
    """The experiment that needs the memory of `steps` micro-batches; it runs at most two of them a step.

    From the second on each finds the same gradients there. GRPO's completions of all of them are generated at once.
    """
    steps = positive_int(steps, "steps")
    if settings.get("objective") == "grpo" and not settings.get("rollout"):
        settings["rollout"] = positive_int(micro_batch, "batch_size") * steps
    return Setting(micro_batch, min(steps, 2), **settings)


def splits(
    batch: int,
    *,
    gpu: GPU | str,
    kept: MutableMapping[Any, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> list[Combination]:
    """Every split of a batch into equal micro-batches, the largest first, its memory predicted, its FLOPs counted.

    kept: see `predict_memory`. progress: called with a line of text before each prediction.
    """
    ways, reports = equal_splits(batch), []
    for number, (micro_batch, steps) in enumerate(ways, 1):
        if progress is not None:
            progress(f"{number}/{len(ways)}: {micro_batch} × {steps}")
        reports.append(predict_memory(split_setting(micro_batch, steps, **settings), gpu=gpu, kept=kept))
    one = split_setting(1, 1, **settings)
    flops = batch * training_flops(one).total  # linear in the samples: however they are split
    return [
        Combination(*way, one.gradient_checkpointing, report.needed_bytes, report.fits, flops, report)
        for way, report in zip(ways, reports, strict=True)
    ]
