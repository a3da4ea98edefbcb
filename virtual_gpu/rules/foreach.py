"""What operations on lists of tensors take beside their outputs."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule

_aten = torch.ops.aten
_CHUNK = 65_536  # kChunkSize in MultiTensorApply.cuh


def norm_partials(sizes: list[int], element: int) -> int:
    """Bytes of the norms of each tensor's chunks, as many for each tensor as the largest has.

    sizes: elements of the tensors. element: bytes of a number of theirs; 16-bit ones are added up in fp32.
    Source: foreach_tensor_norm_cuda in aten/src/ATen/native/cuda/ForeachReduceOp.cu.
    """
    return len(sizes) * -(-max(sizes, default=0) // _CHUNK) * max(4, element)


def _norms(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> list[torch.Tensor]:
    out, tensors = run(), args[0]
    alike = len({tensor.dtype for tensor in tensors}) == 1  # else one after the other
    nbytes = norm_partials([tensor.numel() for tensor in tensors], tensors[0].element_size()) if alike else 0
    with mode.gpu.holding(nbytes):
        for item in out:
            mode.count(item)
    return out


NORM = Rule(
    name="foreach_norm",
    what="norms of a list of tensors (clip_grad_norm_): one number for each chunk of 65,536, for their time",
    source="foreach_tensor_norm_cuda in aten/src/ATen/native/cuda/ForeachReduceOp.cu",
    operators={_aten._foreach_norm.Scalar: _norms},
)
