"""A trace on its way through the caching allocator, kept so that any moment of it can be looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..allocator import CachingAllocator
from .timeline import CATEGORIES
from .trace import Trace

HOLE = len(CATEGORIES)  # beside the categories: reserved, and of no block


@dataclass(frozen=True)
class Spans:
    """Stretches of memory, each from one entry of the trace to another: bytes, and what it is for."""

    born: np.ndarray
    gone: np.ndarray
    address: np.ndarray
    nbytes: np.ndarray
    category: np.ndarray

    def at(self, moment: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(address, bytes, category) of what is there after the first `moment` entries, by address."""
        there = np.flatnonzero((self.born < moment) & (moment <= self.gone))
        there = there[np.argsort(self.address[there])]
        return self.address[there], self.nbytes[there], self.category[there]


@dataclass(frozen=True)
class Frame:
    """The allocator's memory at one moment: its pieces one after the other, segment after segment.

    nbytes and category of each piece: an index into CATEGORIES, or HOLE. segments: bytes of each, in the same order.
    """

    nbytes: np.ndarray
    category: np.ndarray
    segments: np.ndarray

    @property
    def reserved(self) -> int:
        """Bytes that the driver gave."""
        return int(self.segments.sum())

    @property
    def holes(self) -> np.ndarray:
        """Bytes of each hole."""
        return self.nbytes[self.category == HOLE]

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole; 0 where there is none."""
        return int(self.holes.max(initial=0))


class Film:
    """Every moment of a trace in the caching allocator, up to its end or to the request for which there is no room.

    A moment is a number of entries that have happened. end: the last one; failed: the entry that found no room, whose
    driver calls are part of the last moment (cached segments that were given back), or None.
    """

    def __init__(self, trace: Trace, capacity_bytes: int | None = None, *, expandable_segments: bool = False):
        self.trace, self.capacity_bytes, self.expandable_segments = trace, capacity_bytes, expandable_segments
        calls: list[tuple[str, int, int, int]] = []
        allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments, driver_calls=calls)
        blocks, stretches = _Open(), _Open()
        self.failed: int | None = None
        columns = trace.born.tolist(), trace.nbytes.tolist(), trace.stream.tolist(), trace.category.tolist()
        for entry, (born, nbytes, stream, category) in enumerate(zip(*columns, strict=True)):
            if born != entry:
                blocks.close(allocator.address_of(born), entry)
                allocator.free(born)
                continue
            try:
                held = allocator.allocate(entry, nbytes, stream)
            except MemoryError:
                self.failed = entry
            for what, address, size, _ in calls:
                if what in ("segment_alloc", "segment_map"):
                    stretches.open(address, size, entry)
                else:
                    stretches.cut(address, size, entry)
            calls.clear()
            if self.failed is not None:
                break
            blocks.open(allocator.address_of(entry), held, entry, category)
        self.end = len(trace) if self.failed is None else self.failed + 1
        self.blocks, self.stretches = blocks.spans(), stretches.spans()

    def at(self, moment: int) -> Frame:
        """The memory at that moment, or at the last one where that is earlier."""
        moment = min(moment, self.end)
        start, nbytes, _ = self.stretches.at(moment)
        if self.expandable_segments and len(start):  # pages that touch are one segment
            first = np.append(True, start[1:] != start[:-1] + nbytes[:-1])
            start, nbytes = start[first], np.add.reduceat(nbytes, np.flatnonzero(first))
        address, size, category = self.blocks.at(moment)
        # Holes lie between what ends and what begins next: a segment's edges among them, which are of no bytes.
        begins = np.concatenate((address, start + nbytes))
        ends = np.concatenate((start, address + size))
        begins, ends = np.sort(begins), np.sort(ends)
        hole = begins > ends
        places = np.concatenate((address, ends[hole]))
        order = np.argsort(places)
        return Frame(
            np.concatenate((size, (begins - ends)[hole]))[order],
            np.concatenate((category, np.full(hole.sum(), HOLE)))[order],
            nbytes,
        )


class _Open:
    """Stretches that are there, and those that were."""

    def __init__(self) -> None:
        self._there: dict[int, tuple[int, int, int]] = {}  # address → bytes, the entry since when, category
        self._were: list[tuple[int, int, int, int, int]] = []

    def open(self, address: int | None, nbytes: int, entry: int, category: int = 0) -> None:
        if address is not None:  # a request of no bytes has no block
            self._there[address] = nbytes, entry, category

    def close(self, address: int | None, entry: int) -> None:
        if address is not None:
            nbytes, born, category = self._there.pop(address)
            self._were.append((born, entry, address, nbytes, category))

    def cut(self, address: int, nbytes: int, entry: int) -> None:
        """Close a part, which may reach over several; what is left of those stays."""
        end = address + nbytes
        for start in [a for a, (size, _, _) in self._there.items() if a < end and address < a + size]:
            size, born, category = self._there.pop(start)
            first, last = max(start, address), min(start + size, end)
            self._were.append((born, entry, first, last - first, category))
            for left, right in ((start, first), (last, start + size)):
                if left < right:
                    self._there[left] = right - left, born, category

    def spans(self) -> Spans:
        for address in list(self._there):
            self.close(address, np.iinfo(np.int64).max)
        columns = np.array(self._were, dtype=np.int64).reshape(-1, 5).T
        return Spans(*columns)
