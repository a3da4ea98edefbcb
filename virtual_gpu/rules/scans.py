"""What running sums and products take on CUDA beside their output."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule

_aten = torch.ops.aten


def _scan(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """The output, then the input in the output's type (booleans and small integers are summed as int64)."""
    out = run()
    values = args[0]
    if values.dim() and values.dtype != out.dtype:
        mode.count(out)
        mode.gpu.temporaries(values.numel() * out.element_size())
    return out


CAST = Rule(
    name="scan_cast",
    what="a copy of what is summed or multiplied up in another type than its own, for its time",
    source="impl_func_cum_ops in aten/src/ATen/native/ReduceOps.cpp",
    operators={_aten.cumsum.default: _scan, _aten.cumprod.default: _scan},
)
