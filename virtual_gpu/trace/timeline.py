"""What was held when: live bytes by category over the phases of training, on either GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..allocator import CachingAllocator

# "activations" is whatever a phase allocates that turns out to be nothing else; "other" are buffers, the batch and
# library workspaces.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
_INDEX = {category: index for index, category in enumerate(CATEGORIES)}


@dataclass
class PhaseCurve:
    """One phase: `live[i, c]` bytes of category c at its beginning, at every local maximum, and at its end.

    reserved_bytes: the most that the caching allocator held reserved in it, where a real GPU's counter said so.
    """

    name: str
    live: np.ndarray
    reserved_bytes: int | None = None

    @property
    def total(self) -> np.ndarray:
        """Live bytes over the phase, all categories together."""
        return self.live.sum(axis=1)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once in this phase."""
        return int(self.total.max())


@dataclass(frozen=True)
class Trace:
    """Every allocation and release of a run in its order: entry i of each array is about the i-th of them.

    born: the entry that allocated the block (an allocation's own). nbytes: bytes of the block. category: index into
    CATEGORIES. span: 2k + 1 inside phase k, 2k before it; what was there at the start comes first. names: the phases.
    Releases that follow each other stand in the order in which their blocks were born: it makes no difference.
    """

    born: np.ndarray
    nbytes: np.ndarray
    category: np.ndarray
    span: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.born)

    @property
    def allocates(self) -> np.ndarray:
        """Which entries are allocations."""
        return self.born == np.arange(len(self))

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return int(np.where(self.allocates, self.nbytes, -self.nbytes).cumsum().max(initial=0))

    def timeline(self) -> Timeline:
        """The bytes held over the phases."""
        allocates = self.allocates
        changes = np.zeros((len(self) + 1, len(CATEGORIES)), dtype=np.int64)
        changes[np.arange(1, len(self) + 1), self.category] = np.where(allocates, self.nbytes, -self.nbytes)
        live = changes.cumsum(axis=0)  # live[i]: before entry i
        phases = []
        for k, name in enumerate(self.names):
            start, end = np.searchsorted(self.span, (2 * k + 1, 2 * k + 2))
            # Where an allocation is followed by a release, or by the end: nothing higher lies between.
            grew = allocates[start:end]
            tops = np.flatnonzero(grew & ~np.append(grew[1:], False)) + start + 1
            phases.append(PhaseCurve(name, live[np.concatenate(([start], tops, [end]))]))
        return Timeline(phases, self)

    def reserved_peak(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False) -> int:
        """The most bytes that the caching allocator reserves on the way; MemoryError where `capacity_bytes` end it."""
        allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
        for entry, (born, nbytes) in enumerate(zip(self.born.tolist(), self.nbytes.tolist(), strict=True)):
            if born == entry:
                allocator.allocate(entry, nbytes)
            else:
                allocator.free(born)
        return allocator.peak_reserved_bytes

    def smallest_capacity(self, step_bytes: int) -> int:
        """Bytes, `step_bytes` apart from the tensors' peak on, in which the caching allocator gets through."""
        peak = self.peak_bytes
        low, high = 0, -(-(self.reserved_peak() - peak) // step_bytes)
        while low < high:
            middle = (low + high) // 2
            try:
                self.reserved_peak(peak + middle * step_bytes)
                high = middle
            except MemoryError:
                low = middle + 1
        return peak + low * step_bytes


@dataclass
class Timeline:
    """The phases of a run in their order, and on a virtual GPU the trace that they were read from."""

    phases: list[PhaseCurve] = field(default_factory=list)
    trace: Trace | None = field(default=None, repr=False)

    @property
    def peak(self) -> tuple[int, int]:
        """(index of the phase, index in the phase) of the first moment at which most bytes are held."""
        index = max(range(len(self.phases)), key=lambda i: (self.phases[i].peak_bytes, -i))
        return index, int(self.phases[index].total.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return max((phase.peak_bytes for phase in self.phases), default=0)

    @property
    def peak_phase(self) -> str | None:
        """The name of the phase that holds the peak."""
        return self.phases[self.peak[0]].name if self.phases else None

    def at_peak(self) -> dict[str, int]:
        """category → bytes at the moment of the peak."""
        if not self.phases:
            return dict.fromkeys(CATEGORIES, 0)
        phase, moment = self.peak
        return dict(zip(CATEGORIES, map(int, self.phases[phase].live[moment]), strict=True))

    def at_end(self, index: int) -> dict[str, int]:
        """category → bytes at the end of the phase with that index."""
        return dict(zip(CATEGORIES, map(int, self.phases[index].live[-1]), strict=True))


class TimelineRecorder:
    """Collects allocations and releases by id, and turns them into a `Timeline` once it is known what each was for."""

    def __init__(self, live_blocks: Mapping[int, tuple[int, str]]):
        self._sizes = {block: size for block, (size, _) in live_blocks.items()}
        self._category = {block: category for block, (_, category) in live_blocks.items()}
        self._before = list(live_blocks)
        self._events: list[int] = []  # +id: allocated, -id: released
        self._spans: list[tuple[str, int, int]] = []  # phase, first event, end event
        self._open: tuple[str, int] | None = None

    def allocated(self, block: int, size: int, category: str) -> None:
        self._sizes[block] = size
        self._category[block] = category
        self._events.append(block)

    def freed(self, block: int) -> None:
        self._events.append(-block)

    def label(self, block: int, category: str) -> None:
        self._category[block] = category

    def enter(self, name: str) -> None:
        self._open = (name, len(self._events))

    def leave(self) -> None:
        name, start = self._open
        self._spans.append((name, start, len(self._events)))
        self._open = None

    def trace(self) -> Trace:
        """All that was recorded so far."""
        events = np.array(self._before + self._events, dtype=np.int64)
        entries, blocks, releases = np.arange(len(events)), np.abs(events), events < 0
        lookup = np.zeros((max(self._sizes, default=0) + 1, 3), dtype=np.int64)  # bytes, category, entry of its birth
        for block, size in self._sizes.items():
            lookup[block, :2] = size, _INDEX[self._category[block]]
        lookup[blocks[~releases], 2] = entries[~releases]
        span = np.zeros(len(events), dtype=np.int64)
        for k, (_, start, end) in enumerate(self._spans):
            span[len(self._before) + start :] = 2 * k + 1
            span[len(self._before) + end :] = 2 * k + 2
        # A stretch of releases ends at an allocation and at the edge of a phase.
        breaks = ~releases
        breaks[1:] |= ~releases[:-1] | (span[1:] != span[:-1])
        order = np.lexsort((lookup[blocks, 2], breaks.cumsum()))
        nbytes, category, born = lookup[blocks[order]].T
        return Trace(born, nbytes, category, span, tuple(name for name, _, _ in self._spans))

    def timeline(self) -> Timeline:
        """The phases that ended so far."""
        return self.trace().timeline()
