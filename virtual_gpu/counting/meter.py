"""Counting bytes: every allocation by id, with what it is for."""

from __future__ import annotations

from collections.abc import Callable

from ..allocator import CachingAllocator, round_size
from ..trace.recorder import TimelineRecorder
from ..trace.timeline import CATEGORIES


class AllocationMeter:
    """Counts live bytes, each allocation rounded up to 512 bytes, and lets the caching allocator find room for them.

    `capacity_bytes` None means without limit. `allocate` raises MemoryError *before* it counts what does not fit. The
    rest of up to 1 MiB that the allocator does not split off a large block is not counted here (`allocator` knows it).
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False):
        self.allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
        self.live_bytes = 0
        self.peak_bytes = 0
        self.recorder: TimelineRecorder | None = None
        self._blocks: dict[int, list] = {}  # id -> [bytes, category]
        self._next_id = 1
        self.stream: Callable[[], int] | None = None  # which one is current, where there are several

    def allocate(self, nbytes: int, category: str) -> int:
        """Count `nbytes` (rounded up) and return the allocation's id."""
        size = round_size(nbytes)
        block = self._next_id
        stream = self.stream() if self.stream is not None else 0
        self.allocator.allocate(block, size, stream)
        self._next_id += 1
        self._blocks[block] = [size, category]
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self.recorder is not None:
            self.recorder.allocated(block, size, category, stream)
        return block

    def free(self, block: int) -> None:
        """Release an allocation by its id."""
        self.live_bytes -= self._blocks.pop(block)[0]
        self.allocator.free(block)
        if self.recorder is not None:
            self.recorder.freed(block)

    def label(self, block: int, category: str) -> None:
        """Say what an allocation is for: it counts as that from its birth on."""
        self._blocks[block][1] = category
        if self.recorder is not None:
            self.recorder.label(block, category)

    def live_blocks(self) -> dict[int, tuple[int, str]]:
        """id → (bytes, category) of everything that is allocated now."""
        return {block: (size, category) for block, (size, category) in self._blocks.items()}

    def live_by_category(self) -> dict[str, int]:
        """category → bytes allocated now."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for size, category in self._blocks.values():
            totals[category] += size
        return totals
