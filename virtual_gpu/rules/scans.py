"""What running sums and products take on CUDA beside their output."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from .cub import scan_bytes
from .registry import Rule

_aten = torch.ops.aten
_NUMBERS = (torch.int64, torch.float32)  # of CUB's scan; 16-bit ones are no numbers to it


def _scan(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """The output, the input in the output's type (booleans and small integers are summed as int64), CUB's storage."""
    out = run()
    values, dim = args[:2]
    if not values.dim():
        return out
    mode.count(out)
    with ExitStack() as kernel:
        if values.dtype != out.dtype:
            kernel.enter_context(mode.gpu.holding(values.numel() * out.element_size()))
        if values.numel() == values.shape[dim] > 0 and out.dtype in _NUMBERS:
            mode.gpu.temporaries(scan_bytes(values.numel(), out.element_size()))
    return out


TEMPORARIES = Rule(
    name="scan_temporaries",
    what="what is summed or multiplied up is copied in the output's type first; of a single row CUB takes storage",
    source="impl_func_cum_ops in aten/src/ATen/native/ReduceOps.cpp, scan_dim in native/cuda/ScanUtils.cuh",
    operators={_aten.cumsum.default: _scan, _aten.cumprod.default: _scan},
)
