"""What kernels allocate inside and free before they return, where their source or a card's trace states it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from .cub import sort_pairs_bytes
from .registry import Rule

_aten = torch.ops.aten


def _index_put(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """One index of whole numbers, added to: its linear form, two sorted arrays, a range, and CUB's storage.

    As many bits are sorted as the places have that are indexed. Source: index_put_with_sort_kernel in
    aten/src/ATen/native/cuda/Indexing.cu; the order as a card's trace has it.
    """
    out, into = run(), args[0]
    indices = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    if len(args) > 3 and args[3] and len(indices) == 1 and indices[0][1].dtype == torch.int64:
        mode.count(out)
        (dim, index), array = indices[0], indices[0][1].numel() * 8
        largest = into.shape[: dim + 1].numel() - 1  # largestIndex(self) / sliceSize
        storage = sort_pairs_bytes(index.numel(), mode.gpu.spec.compute_capability, bits=max(1, largest.bit_length()))
        with ExitStack() as kernel:
            with mode.gpu.holding(array):  # the index without negative numbers, until it is multiplied
                kernel.enter_context(mode.gpu.holding(array))
            kernel.enter_context(mode.gpu.holding(array, array, array, storage))
    return out


def _index(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """Indices of several dimensions that lie differently are made as large as what they pick.

    Source: AdvancedIndex in aten/src/ATen/native/TensorAdvancedIndexing.cpp.
    """
    indices = [index for index in args[1] if index is not None]
    if len(indices) == 1 and (picked := _picked(mode, indices[0])) is not None:
        mask = indices[0]
        with mode.gpu.holding(8 * picked * mask.dim()):  # where it is true (expandTensors, IndexingUtils.h)
            out = args[0].new_empty((picked, *args[0].shape[mask.dim() :]))
            mode.count(out)
        return out
    out = run()
    if len(indices) > 1 and all(index.dtype == torch.int64 for index in indices):
        indices = torch.broadcast_tensors(*indices)
        if len({index.stride() for index in indices}) > 1:
            with mode.gpu.holding(*(8 * index.numel() for index in indices if not index.is_contiguous())):
                mode.count(out)
    return out


def _masked_select(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """What a mask picks, where it is known how much that is; its places are held meanwhile.

    Source: masked_select_out_cuda_impl in aten/src/ATen/native/cuda/IndexKernel.cpp, which indexes by the mask.
    """
    picked = _picked(mode, args[1])
    if picked is None:
        return run()
    with mode.gpu.holding(8 * picked * args[1].dim()):
        out = args[0].new_empty((picked,))
        mode.count(out)
    return out


def _picked(mode: Any, mask: torch.Tensor) -> int | None:
    """How many elements a mask picks; None where that is not known."""
    chosen = getattr(mode.gpu.answers, "chosen", None)
    return chosen.get(mask.numel()) if chosen and mask.dtype == torch.bool else None


def _embedding(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """Indices that do not lie densely (positions that are expanded to the batch) are copied.

    Source: `indices.reshape({-1})` in embedding_symint of aten/src/ATen/native/Embedding.cpp.
    """
    out, indices = run(), args[1]
    dense = indices.dim() == 1 or indices.is_contiguous()
    with mode.gpu.holding(0 if dense else indices.numel() * indices.element_size()):
        mode.count(out)
    return out


INDICES = Rule(
    name="index_temporaries",
    what="sorted copies of the indices where a gradient is added at indices, dense ones of those that are expanded",
    source="index_put_with_sort_kernel in aten/src/ATen/native/cuda/Indexing.cu; AdvancedIndex in "
    "TensorAdvancedIndexing.cpp; embedding_symint in Embedding.cpp",
    operators={
        _aten.index_put.default: _index_put,
        _aten.index.Tensor: _index,
        _aten.masked_select.default: _masked_select,
        _aten.embedding.default: _embedding,
    },
)
