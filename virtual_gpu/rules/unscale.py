"""The gradient scaler's check of the gradients, which has no kernel for bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def _unscale(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    """As a program on a card ends that scales a loss for fp16 and trains parameters in bfloat16."""
    if any(gradient.dtype is torch.bfloat16 for gradient in args[0]):
        raise NotImplementedError("\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'")
    return run()


NO_BFLOAT16 = Rule(
    name="unscale_bf16",
    what="the gradient scaler has no kernel for gradients in bfloat16; a CPU's has",
    source="AT_DISPATCH_FLOATING_TYPES_AND_HALF in aten/src/ATen/native/cuda/AmpKernels.cu; pytorch #127176",
    operators={_UNSCALE: _unscale},
)
