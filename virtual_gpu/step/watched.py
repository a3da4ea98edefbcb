"""A run that is watched: what of the allocator the results are that checkpointed blocks could keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..counting.gpu import VirtualGPU
from ..trace.trace import Trace
from ..trace.twice import MARKS, Mark
from .flops import flops_of
from .predict import Run


class ResultsWatch:
    """Marks what the results that blocks could keep take of the allocator, and adds up what is computed again.

    keys: mark → its number, from which a category is made; the same for all depths of a model.
    """

    def __init__(self, gpu: VirtualGPU, keys: dict[Mark, int]):
        self.gpu, self.keys = gpu, keys
        self.recorder = None
        self.marked: dict[int, int] = {}  # an allocation of the meter → its mark's key
        self.flops: Counter[str] = Counter()

    def __call__(
        self, name: str, place: int, again: bool, operation: Any, operands: Sequence[Any], more: Mapping[str, Any]
    ) -> Any:
        meter, storages = self.gpu.meter, self.gpu.mode.storages
        self.recorder = meter.recorder
        before = meter.allocations
        out = operation(*operands, **more)
        self.gpu.mode.releases.settle()
        tensors = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        blocks = [storages[key][1] for one in tensors if (key := one.untyped_storage()._cdata) in storages]
        for number, block in enumerate(dict.fromkeys(blocks)):
            self._mark(block, Mark(name, place, number, again))
        live = meter.live_blocks()
        moments = [block for block in range(before + 1, meter.allocations + 1) if block not in live]
        for number, block in enumerate(moments):
            self._mark(block, Mark(name, place, -1 - number, again))
        if again:
            self.flops[name] += flops_of(operation, operands, more, out)
        return out

    def _mark(self, block: int, mark: Mark) -> None:
        self.marked[block] = self.keys.setdefault(mark, len(self.keys))

    def told(self, run: Run) -> Run:
        """The run with its trace marked, and the FLOPs that a micro-batch computes again."""
        turns = run.trace.names.count("backward")
        twice = {name: flops // turns for name, flops in self.flops.items()}
        return run._replace(trace=self.mark(run.trace), twice=twice)

    def mark(self, trace: Trace) -> Trace:
        """The trace that the last recorder wrote, with the results' blocks of a category of their own (`Twice.of`)."""
        category = trace.category.copy()
        allocations = np.flatnonzero(trace.allocates)
        for block, entry in zip(self.recorder.births() if self.recorder else (), allocations.tolist(), strict=False):
            if block in self.marked:
                category[entry] = MARKS + self.marked[block]
        return replace(trace, category=category[trace.born], held=None)
