"""The peak of each phase of a block of code, by `torch.cuda` alone: on a real card as on a virtual one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .patches import Patches
from .watch import BACKWARD, BETWEEN, EVALUATION, FORWARD, STEP


@contextmanager
def peaks_by_phase() -> Iterator[dict[str, int]]:
    """Fill the dict, while the block runs, with the highest bytes allocated in each phase, in their order."""
    peaks: dict[str, int] = {}
    phase, depth = BETWEEN, 0
    patches = Patches()
    call, backward = torch.nn.Module.__call__, torch.autograd.backward

    def enter(name: str) -> str:
        nonlocal phase
        before = phase
        if name != before:
            peaks[before] = max(peaks.get(before, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            phase = name
        return before

    def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth and phase not in (BACKWARD, STEP):  # in backward a checkpoint runs again
            enter(FORWARD if torch.is_grad_enabled() else EVALUATION)
        depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            depth -= 1

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        enter(BACKWARD)
        try:
            return backward(*args, **kwargs)
        finally:
            enter(BETWEEN)

    patches.set(torch.nn.Module, "__call__", __call__)
    patches.set(torch.autograd, "backward", run_backward)
    patches.later(register_optimizer_step_pre_hook(lambda *_: enter(STEP) and None).remove)
    patches.later(register_optimizer_step_post_hook(lambda *_: enter(BETWEEN) and None).remove)
    torch.cuda.reset_peak_memory_stats()
    try:
        yield peaks
    finally:
        patches.undo()
        enter("")
