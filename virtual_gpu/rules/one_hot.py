"""Whole numbers as rows with a single one, as MoE layers count who goes where."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule, parts

_aten = torch.ops.aten


def _one_hot(rules: Any, op: Any, index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Zeros with ones scattered in; a comparison with all classes is what the compiler takes."""
    if num_classes <= 0 or not index.numel():
        return parts(op, index, num_classes)
    zeros = torch.zeros(*index.shape, num_classes, dtype=index.dtype, device=index.device)
    return zeros.scatter_(-1, index.unsqueeze(-1), 1)


SCATTERED = Rule(
    name="one_hot",
    what="one_hot scatters ones into zeros; a fake tensor's way compares with every class",
    source="one_hot in aten/src/ATen/native/Onehot.cpp",
    kernels={("AutogradCPU", _aten.one_hot.default): _one_hot},
)
