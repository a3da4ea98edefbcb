"""Layer norm's statistics on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule

_aten = torch.ops.aten


def _statistics(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    out = run()
    if out[0].dtype not in (torch.float16, torch.bfloat16):
        return out
    return out[0], *(mode.empty_like(statistic, torch.float32) for statistic in out[1:])


STATISTICS = Rule(
    name="layer_norm_statistics",
    what="mean and rstd in fp32 beside a 16-bit input",
    source="acc_type in layer_norm_cuda of aten/src/ATen/native/cuda/layer_norm_kernel.cu",
    operators={_aten.native_layer_norm.default: _statistics},
)
