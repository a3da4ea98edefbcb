"""What NCCL takes on a card beside PyTorch's allocator: buffers of each process group, made at its first message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .layout import Layout

MIB = 2**20


class Range(NamedTuple):
    """Bytes: the least and the most that are plausible, and what was measured most often."""

    low: int
    likely: int
    high: int


# likely: 4 A100 with NVLink, a group of two 544 MB, of more 688 MB: https://github.com/NVIDIA/nccl/issues/964
# high: "about 1.6GB" for a first group on unnamed cards: https://github.com/NVIDIA/nccl/issues/864
# low: computed, not measured. Memory grows with the number of channels, which are few on PCIe (NCCL's developers, in
# https://github.com/NVIDIA/nccl/issues/986), and a connection has a buffer of 10 MiB (nccl/issues/1685): two channels
# of a ring with two connections each.
_OF_TWO = Range(2 * 2 * 10 * MIB, 544 * MIB, 1600 * MIB)
_OF_MORE = Range(2 * 2 * 10 * MIB, 688 * MIB, 1600 * MIB)


def nccl_bytes(layout: Layout) -> Range:
    """Bytes on each rank, for a group over the data-parallel ranks, the tensor-parallel ones, and the copies."""
    return of_groups((layout.data_parallel, layout.tensor_parallel, layout.replicas))


def of_groups(sizes: Iterable[int]) -> Range:
    """Bytes on each rank, for groups of so many ranks; a group of one sends nothing."""
    groups = [_OF_TWO if size == 2 else _OF_MORE for size in sizes if size > 1]
    return Range(*(sum(column) for column in zip(*groups, strict=True))) if groups else Range(0, 0, 0)
