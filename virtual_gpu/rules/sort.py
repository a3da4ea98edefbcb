"""What sorting takes on CUDA beside values and indices."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule

_aten = torch.ops.aten
_SMALL = 4096  # should_use_small_sort: up to so many values each row is sorted in shared memory
_FEW_ROWS, _LONG_ROW = 128, 1_000_000


def sort_temporaries(rows: int, length: int, element: int) -> tuple[int, ...]:
    """Bytes that a sort of `rows` rows of `length` values holds at once; element: bytes of a value.

    Known are the arrays that PyTorch makes, and for many rows cub's: the other buffers of keys and values
    (DispatchSegmentedRadixSort, each aligned to 256, and 255 to align the first). What cub takes for one long row is
    not stated there, and is left out.

    Source: launch_stable_sort_kernel, segmented_sort_pairs and its two siblings in
    aten/src/ATen/native/cuda/SortStable.cu.
    """
    if length <= _SMALL:
        return (8 * length,)
    numel = rows * length
    if rows == 1 or length >= _LONG_ROW:
        return (8 * length,)
    if rows < _FEW_ROWS:
        return 8 * numel, 8 * numel, element * numel
    others = sum(-(-size // 256) * 256 for size in (element * numel, 8 * numel)) + 255
    return 8 * numel, others


def _sort(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    out = run()
    for item in out:
        mode.count(item)
    values = args[0]
    if values.dim() and values.numel():
        place = 1 if op is _aten.sort.default else 2
        length = values.shape[kwargs.get("dim", args[place] if len(args) > place else -1)]
        mode.gpu.temporaries(*sort_temporaries(values.numel() // length, length, values.element_size()))
    return out


TEMPORARIES = Rule(
    name="sort_temporaries",
    what="a sort's second arrays of keys and indices, for its time",
    source="sort_cuda_kernel in aten/src/ATen/native/cuda/Sort.cpp, launch_stable_sort_kernel in SortStable.cu",
    operators={_aten.sort.default: _sort, _aten.sort.stable: _sort},
)
