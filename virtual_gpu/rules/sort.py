"""What sorting takes on CUDA beside values and indices."""

from __future__ import annotations

from typing import Any

import torch

from .cub import sort_keys_bytes, sort_pairs_bytes
from .registry import Rule

_aten = torch.ops.aten
_SMALL = 4096  # should_use_small_sort: up to so many values each row is sorted in shared memory
_FEW_ROWS, _LONG_ROW = 128, 1_000_000


def sort_requests(
    rows: int, length: int, element: int, compute_capability: tuple[int, int]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """(bytes that a sort of rows of `length` values holds, those that each of its steps holds beside them).

    element: bytes of a value. One long row is sorted with its indices, and so is each of several very long ones; few
    rows are sorted as one and then by row; many rows by CUB's segments, whose storage are the second arrays.

    Source: launch_stable_sort_kernel, segmented_sort_pairs and its two siblings in
    aten/src/ATen/native/cuda/SortStable.cu; DispatchSegmentedRadixSort.
    """
    numel = rows * length
    if length <= _SMALL:
        return (8 * length,), []
    if rows == 1 or length >= _LONG_ROW:
        return (8 * length,), [(sort_pairs_bytes(length, compute_capability, element),)] * rows
    if rows < _FEW_ROWS:
        pairs = element * numel, sort_pairs_bytes(numel, compute_capability, element)
        return (8 * numel, 8 * numel), [pairs, (sort_keys_bytes(numel, compute_capability),)]
    others = sum(-(-size // 256) * 256 for size in (element * numel, 8 * numel)) + 255
    return (8 * numel,), [(others,)]


def _sort(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    out = run()
    for item in out:
        mode.count(item)
    values = args[0]
    if values.dim() and values.numel():
        place = 1 if op is _aten.sort.default else 2
        length = values.shape[kwargs.get("dim", args[place] if len(args) > place else -1)]
        rows, capability = values.numel() // length, mode.gpu.spec.compute_capability
        held, steps = sort_requests(rows, length, values.element_size(), capability)
        with mode.gpu.holding(*held):
            for step in steps:
                mode.gpu.temporaries(*step)
    return out


TEMPORARIES = Rule(
    name="sort_temporaries",
    what="a sort's second arrays of keys and indices and CUB's storage, for its time",
    source="sort_cuda_kernel in aten/src/ATen/native/cuda/Sort.cpp, launch_stable_sort_kernel in SortStable.cu",
    operators={_aten.sort.default: _sort, _aten.sort.stable: _sort},
)
