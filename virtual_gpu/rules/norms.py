"""Norms on CUDA: statistics in fp32, RMS norm in one kernel, what group norm takes for itself."""

from __future__ import annotations

import math
from typing import Any

import torch

from .registry import Rule, parts, with_temporaries

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def _statistics(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    out = run()
    if out[0].dtype not in _HALF:
        return out
    return out[0], *(mode.empty_like(statistic, torch.float32) for statistic in out[1:])


class _RMSNorm(torch.autograd.Function):
    """One output and one statistic a row; of the gradient a copy where it does not lie densely."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, row: int) -> torch.Tensor:
        x = input.contiguous()
        y = torch.empty_like(x)
        rstd = x.new_empty(x.numel() // row, dtype=torch.float32 if x.dtype in _HALF else x.dtype)
        ctx.save_for_backward(input, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = torch.empty_like(input.contiguous()) if needs_x else None
        dweight = torch.empty_like(weight) if needs_weight and weight is not None else None
        return dx, dweight, None


def _rms_norm(
    rules: Any,
    op: Any,
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if input.is_complex() or (weight is not None and weight.dtype != input.dtype):  # "Cannot dispatch to fused"
        return parts(op, input, normalized_shape, weight, eps)
    if torch.compiler.is_compiling():  # its graph is made of operations, by whose inputs it knows what it needs
        return _aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
    return _RMSNorm.apply(input, weight, math.prod(normalized_shape))


def group_norm_forward(args: tuple) -> tuple[int, ...]:
    """Mean and rstd in fp32 of a 16-bit input; scale and shift of each channel, where there is more than one place.

    args: those of native_group_norm.
    """
    x, weight, bias, batch, channels, places, groups = args[:7]
    half = x.dtype in _HALF
    each = 4 if half else x.element_size()
    statistics = (batch * groups * each,) * 2 if half else ()
    affine = places > 1 and (weight is not None or bias is not None)
    return *statistics, *((batch * channels * each,) * 2 if affine else ())


def group_norm_backward(args: tuple) -> tuple[int, ...]:
    """ds, db, c2, c3 and c1; of one place only c2 and c3. args: those of native_group_norm_backward."""
    _, x, _, _, weight, batch, channels, places, groups, mask = args[:10]
    each = 4 if x.dtype in _HALF else x.element_size()
    by_group = (batch * groups * each,) * 2 if mask[0] else ()
    if places == 1:
        return by_group
    by_channel = batch * channels * each
    return by_channel, by_channel, *by_group, by_channel if mask[0] and weight is not None else 0


STATISTICS = Rule(
    name="layer_norm_statistics",
    what="mean and rstd in fp32 beside a 16-bit input",
    source="acc_type in layer_norm_cuda of aten/src/ATen/native/cuda/layer_norm_kernel.cu",
    operators={_aten.native_layer_norm.default: _statistics},
)
FUSED_RMS = Rule(
    name="fused_rms_norm",
    what="RMS norm is one kernel that keeps one number a row, instead of seven operations",
    source="rms_norm_symint in aten/src/ATen/native/layer_norm.cpp, _fused_rms_norm_cuda in cuda/layer_norm_kernel.cu",
    since="2.9",
    kernels={("AutogradCPU", _aten.rms_norm.default): _rms_norm},
)
GROUP = Rule(
    name="group_norm_temporaries",
    what="group norm's sums by channel and group, in fp32, for the time of its kernels",
    source="GroupNormKernelImplInternal, GroupNormBackwardKernelImplInternal in "
    "aten/src/ATen/native/cuda/group_norm_kernel.cu",
    operators={
        _aten.native_group_norm.default: with_temporaries(group_norm_forward),
        _aten.native_group_norm_backward.default: with_temporaries(group_norm_backward),
    },
)
