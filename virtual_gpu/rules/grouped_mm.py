"""The product that runs all experts of an MoE layer at once."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule, overload


def grouped_mm_shape(mat_a: torch.Tensor, mat_b: torch.Tensor, offsets: torch.Tensor | None = None) -> list[int]:
    """The shape of `torch.nn.functional.grouped_mm`.

    A 2-dimensional matrix has its groups side by side. The kernel takes fp32, fp16 and bf16, PyTorch's own rule of
    shapes bf16 alone. transformers uses it from compute capability 8.0 on, and below that a loop over the experts with
    the same tensors.

    Source: create_grouped_gemm_output_tensor in aten/src/ATen/native/GroupedMMUtils.h.
    """
    shape = [mat_a.shape[-2], mat_b.shape[-1]]
    if mat_a.dim() == mat_b.dim():
        shape.insert(0, offsets.shape[0] if mat_a.dim() == 2 else mat_a.shape[0])
    return shape


def _grouped_mm(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    return args[0].new_empty(grouped_mm_shape(*args[:3]))


_operator = overload("_grouped_mm")  # since torch 2.8
ALL_TYPES = Rule(
    name="grouped_mm",
    what="all experts of an MoE layer in one product, for fp32 and fp16 too",
    source="create_grouped_gemm_output_tensor in aten/src/ATen/native/GroupedMMUtils.h",
    since="2.8",
    operators={} if _operator is None else {_operator: _grouped_mm},
)
