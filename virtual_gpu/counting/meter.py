"""Counting bytes: every allocation by id, with what it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..allocator import CachingAllocator, round_size
from ..trace.recorder import TimelineRecorder
from ..trace.timeline import CATEGORIES


class Allocation(NamedTuple):
    """nbytes: asked for, rounded up to 512. held: what the allocator gave, with the rest that it did not split off."""

    nbytes: int
    held: int
    category: str


class AllocationMeter:
    """What is allocated now and for what; bytes are the caching allocator's, as `torch.cuda.memory_allocated` has them.

    `capacity_bytes` None means without limit. `allocate` raises MemoryError *before* it takes what does not fit.
    place: where the driver puts a segment, see `CachingAllocator`. first_id, id_step: of its allocations, the ids.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        place: Callable[[int], int] | None = None,
        first_id: int = 1,
        id_step: int = 1,
    ):
        self.allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments, place=place)
        self.recorder: TimelineRecorder | None = None
        self._blocks: dict[int, Allocation] = {}
        self._next_id, self._id_step = first_id, id_step
        self.stream: Callable[[], int] | None = None  # which one is current, where there are several

    @property
    def live_bytes(self) -> int:
        """Bytes allocated now."""
        return self.allocator.allocated_bytes

    @property
    def allocations(self) -> int:
        """How many there were so far: the id of the last one."""
        return self._next_id - 1

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at once since the start or the last `reset_peaks`."""
        return self.allocator.peak_allocated_bytes

    def allocate(self, nbytes: int, category: str) -> int:
        """Take room for `nbytes` and return the allocation's id."""
        size = round_size(nbytes)
        block = self._next_id
        stream = self.stream() if self.stream is not None else 0
        held = self.allocator.allocate(block, size, stream)
        self._next_id += self._id_step
        self._blocks[block] = Allocation(size, held, category)
        if self.recorder is not None:
            self.recorder.allocated(block, size, held, category, stream)
        return block

    def free(self, block: int) -> None:
        """Release an allocation by its id."""
        del self._blocks[block]
        self.allocator.free(block)
        if self.recorder is not None:
            self.recorder.freed(block)

    def label(self, block: int, category: str) -> None:
        """Say what an allocation is for: it counts as that from its birth on."""
        self._blocks[block] = self._blocks[block]._replace(category=category)
        if self.recorder is not None:
            self.recorder.label(block, category)

    def reset_peaks(self) -> None:
        """Start the peaks of what is allocated and reserved anew from what is held now."""
        self.allocator.reset_peaks()

    def live_blocks(self) -> dict[int, Allocation]:
        """id → what is allocated now."""
        return dict(self._blocks)

    def live_by_category(self) -> dict[str, int]:
        """category → bytes allocated now."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for _, held, category in self._blocks.values():
            totals[category] += held
        return totals
