"""Pinned (page-locked) memory: PyTorch's caching host allocator, which rounds a request up to a power of two.

Source: aten/src/ATen/core/CachingHostAllocator.h, `allocate` and `free` (its text of PyTorch 2.13 comes with the wheel,
torch/include/ATen/core). What is released stays with the allocator, and in RAM, until `torch._C._host_emptyCache`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping

from ..allocator_settings import VARIABLES
from ..units import MiB

_LIMIT = re.compile(r"(?:^|,)\s*(pinned_max_round_threshold_mb|pinned_max_cached_size_mb)\s*:\s*(\d+)\s*(?=,|$)")


class PinnedAllocator:
    """Blocks by size; bytes are what is locked in RAM. rounds_up=False: a request takes just what it asks for.

    round_threshold, cached_size: the largest request that is rounded up, and that is kept when it is released
    (`pinned_max_round_threshold_mb`, `pinned_max_cached_size_mb`); without limit by default.
    """

    def __init__(
        self, *, rounds_up: bool = True, round_threshold: float = float("inf"), cached_size: float = float("inf")
    ):
        self.rounds_up, self.round_threshold, self.cached_size = rounds_up, round_threshold, cached_size
        self.reserved_bytes = 0
        self._free: Counter[int] = Counter()  # size → how many blocks wait

    @classmethod
    def from_environment(
        cls, *, rounds_up: bool = True, environment: Mapping[str, str] = os.environ
    ) -> PinnedAllocator:
        """With the limits that PYTORCH_ALLOC_CONF names."""
        text = next((environment[name] for name in VARIABLES if environment.get(name)), "")
        limits = {name: int(value) * MiB for name, value in _LIMIT.findall(text)}
        return cls(
            rounds_up=rounds_up,
            round_threshold=limits.get("pinned_max_round_threshold_mb", float("inf")),
            cached_size=limits.get("pinned_max_cached_size_mb", float("inf")),
        )

    def size_of(self, nbytes: int) -> int:
        """Bytes of the block that a request gets."""
        if self.rounds_up and 0 < nbytes <= min(self.round_threshold, self.cached_size):
            return 1 << (nbytes - 1).bit_length()
        return nbytes

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """(the block's size, the bytes that are locked anew: none where a block of this size waits)."""
        size = self.size_of(nbytes)
        if self._free[size]:
            self._free[size] -= 1
            return size, 0
        self.reserved_bytes += size
        return size, size

    def free(self, size: int) -> int:
        """Release a block of this size; the bytes that go back to the system."""
        if size <= self.cached_size:
            self._free[size] += 1
            return 0
        self.reserved_bytes -= size
        return size

    def empty_cache(self) -> int:
        """Unlock every block that waits; the bytes that go back to the system."""
        given = sum(size * count for size, count in self._free.items())
        self._free.clear()
        self.reserved_bytes -= given
        return given
