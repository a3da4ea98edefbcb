"""Softmax in fp32 of an fp16 input: one kernel on CUDA, a copy and a kernel on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule, parts

_aten = torch.ops.aten
_KERNELS = {_aten.softmax.int: torch._softmax, _aten.log_softmax.int: torch._log_softmax}


def _half_to_float(
    rules: Any, op: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return _KERNELS[op](input, dim, True)
    return parts(op, input, dim, dtype)


FUSED = Rule(
    name="softmax_half",
    what="softmax and log_softmax of an fp16 tensor in fp32 make no fp32 copy of it",
    source="half_to_float in softmax and log_softmax of aten/src/ATen/native/SoftMax.cpp",
    kernels={("AutogradCPU", op): _half_to_float for op in _KERNELS},
)
