"""What kernels allocate inside and free before they return, where their source or a card's trace states it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from .registry import Rule, with_temporaries

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def flash_backward(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """softmax_d and dq_accum in fp32, lengths rounded to 128 and heads to 32; dk and dv for every query head.

    query, key: (batch, heads, length, head_dim). Source: mha_bwd in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, length, dim = query.shape
    rows, wide = -(-length // 128) * 128, 256 if dim > 192 else -(-dim // 32) * 32
    return batch * heads * rows * 4, batch * rows * heads * wide * 4, *[_of_every_head(key, heads)] * 2


def efficient_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """delta in fp32, where gradients are 16-bit the fp32 sum of the query's, dk and dv for every query head.

    query, key, value: (batch, heads, length, head_dim). The sum's padding to blocks is left out. Source:
    _efficient_attention_backward in aten/src/ATen/native/transformers/cuda/attention_backward.cu, workspace_size in
    mem_eff_attention/kernel_backward.h; grouped heads are summed by a second kernel (pull request 191085).
    """
    delta, heads = query.numel() // query.shape[-1] * 4, query.shape[1]
    summed = query.numel() * 4 if query.dtype in _HALF else 0
    return delta, summed, _of_every_head(key, heads), _of_every_head(value, heads)


def _of_every_head(tensor: torch.Tensor, heads: int) -> int:
    """Bytes of a gradient with one part for each of the query's heads; 0 where the heads are not grouped."""
    own = tensor.shape[1]
    return tensor.numel() // own * heads * tensor.element_size() if own != heads else 0


def _index_put(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """One index of whole numbers, added to: its linear form, two sorted arrays, a range, and cub's smallest storage.

    Source: index_put_with_sort_kernel in aten/src/ATen/native/cuda/Indexing.cu; the order as a card's trace has it.
    """
    out = run()
    indices = [index for index in args[1] if index is not None]
    if len(args) > 3 and args[3] and len(indices) == 1 and indices[0].dtype == torch.int64:
        mode.count(out)
        array = indices[0].numel() * 8
        with ExitStack() as kernel:
            with mode.gpu.holding(array):  # the index without negative numbers, until it is multiplied
                kernel.enter_context(mode.gpu.holding(array))
            kernel.enter_context(mode.gpu.holding(array, array, array, 1))
    return out


ATTENTION = Rule(
    name="attention_temporaries",
    what="fp32 sums of the query's gradient, and gradients of grouped keys and values for every head",
    source="mha_bwd in flash_api.cpp, _efficient_attention_backward in attention_backward.cu",
    operators={
        _aten._scaled_dot_product_flash_attention_backward.default: with_temporaries(
            lambda a: flash_backward(a[1], a[2])
        ),
        _aten._scaled_dot_product_efficient_attention_backward.default: with_temporaries(
            lambda a: efficient_backward(*a[1:4])
        ),
    },
)
INDICES = Rule(
    name="index_temporaries",
    what="sorted copies of the indices where a gradient is added at indices",
    source="index_put_with_sort_kernel in aten/src/ATen/native/cuda/Indexing.cu",
    operators={_aten.index_put.default: _index_put},
)
