"""What the gradient of an embedding's rows takes on CUDA: the tokens are sorted, and each token's places are summed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from .cub import scan_bytes, sort_pairs_bytes, unique_bytes
from .registry import Rule

_aten = torch.ops.aten
_FEW_INDICES = 3072  # up to so many a kernel that takes nothing
_ROWS_A_PART = 10  # NROWS_PER_THREAD: the places of a token are summed in parts of ten
_BLOCK, _BLOCKS_A_MULTIPROCESSOR = 1024, 4  # MAX_BLOCK_SIZE, MAX_ATOMIC_ACCUM_BLOCKS_PER_SM


def most_parts(count: int, weights: int) -> int:
    """Parts that `count` places of at most `weights` tokens can have: which tokens there are is not asked."""
    return count // _ROWS_A_PART + min(count, weights)


def accumulates(count: int, weights: int, width: int, multiprocessors: int) -> bool:
    """Whether the parts are added to the gradient at once: of few tokens, too few for the card.

    Source: use_fused_kernel in EmbeddingBackwardKernel.cu, pull request 172454.
    """
    warped = -(-width // 32) * 32
    grid = -(-min(count, weights) * warped // min(warped, _BLOCK))
    return grid < multiprocessors * _BLOCKS_A_MULTIPROCESSOR and most_parts(count, weights) > 4 * grid


def _backward(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """Sorted and original indices with the sort, the gradient, the tokens' first places, their parts, a row for each.

    Order and bytes are those of an H100's requests (torch 2.11), to the byte.
    """
    out, (grad, indices, weights, _, by_frequency) = run(), args[:5]
    count, width, gpu = indices.numel(), grad.shape[-1], mode.gpu
    if count <= _FEW_INDICES or by_frequency:
        return out
    capability = gpu.spec.compute_capability
    array, segments = count * indices.element_size(), min(count, weights) * indices.element_size()
    parts = most_parts(count, weights)
    wide = max(4, grad.element_size())
    with ExitStack() as kernel:
        if not grad.is_contiguous():
            kernel.enter_context(gpu.holding(grad.numel() * grad.element_size()))
        kernel.enter_context(gpu.holding(array, array))
        gpu.temporaries(array, sort_pairs_bytes(count, capability))
        mode.count(out)
        kernel.enter_context(gpu.holding(array, 8))
        gpu.temporaries(array, unique_bytes(count, capability))
        kernel.enter_context(gpu.holding(segments, segments))
        gpu.temporaries(scan_bytes(min(count, weights), 8))
        kernel.enter_context(gpu.holding(8, parts * indices.element_size()))
        if mode.rules.applies("embedding_accumulates") and accumulates(count, weights, width, gpu.spec.multiprocessors):
            gpu.temporaries(parts * indices.element_size(), weights * width * 4 if grad.element_size() == 2 else 0)
        else:
            gpu.temporaries(parts * width * wide)
    return out


BACKWARD = Rule(
    name="embedding_backward",
    what="sorted tokens, where each begins, and a row in fp32 for each ten places, for the time of the kernel",
    source="embedding_dense_backward_cuda in aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu",
    operators={_aten.embedding_dense_backward.default: _backward},
)
ACCUMULATES = Rule(
    name="embedding_accumulates",
    what="an embedding of few rows is summed up in its gradient, without a row for each ten places",
    source="use_fused_kernel in aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, pull request 172454",
    since="2.11",
)
