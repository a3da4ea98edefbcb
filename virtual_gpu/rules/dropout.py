"""Dropout's mask on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule, parts

_aten = torch.ops.aten


def _dropout(rules: Any, op: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return parts(op, input, p, train)


def _mask_first(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    out, mask = run()
    mode.count(mask)
    return out, mask


MASK = Rule(
    name="dropout_mask",
    what="a mask of one byte an element instead of a tensor in the input's dtype",
    source="is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp, dropout_cuda in cuda/Dropout.cu",
    kernels={("AutogradCPU", _aten.dropout.default): _dropout},
    operators={_aten.native_dropout.default: _mask_first},
)
