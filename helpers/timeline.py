"""What was held when: live bytes by category over the phases of training, on either GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .caching_allocator import CachingAllocator

# "activations" is whatever a phase allocates that turns out to be nothing else; "other" are buffers, the batch and
# library workspaces.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
_INDEX = {category: index for index, category in enumerate(CATEGORIES)}


@dataclass
class PhaseCurve:
    """One phase: `live[i, c]` bytes of category c at its beginning, at every local maximum, and at its end.

    moments[i] says when, counted in local maxima; None means one after the other. (A predicted curve leaves out the
    layers in the middle.)
    """

    name: str
    live: np.ndarray
    moments: np.ndarray | None = None

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
    """Every allocation and release of a run in its order, for the caching allocator to go through again.

    before: (id, bytes) of what was there at the start. events: +id allocated, -id released; sizes: id → bytes.
    """

    before: list[tuple[int, int]]
    events: list[int]
    sizes: dict[int, int]

    def reserved_peak(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False) -> int:
        """The most bytes that the caching allocator reserves on the way; MemoryError where `capacity_bytes` end it."""
        allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
        for block, nbytes in self.before:
            allocator.allocate(block, nbytes)
        for event in self.events:
            if event > 0:
                allocator.allocate(event, self.sizes[event])
            else:
                allocator.free(-event)
        return allocator.peak_reserved_bytes


@dataclass
class Timeline:
    """The phases of a run in their order; its trace, where every operation was run on a virtual GPU."""

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

    def timeline(self) -> Timeline:
        events = np.array(self._events, dtype=np.int64)
        blocks = np.abs(events)
        ids = np.array([*self._sizes, 0])
        lookup = np.zeros((int(ids.max()) + 1, 2), dtype=np.int64)
        for block, size in self._sizes.items():
            lookup[block] = size, _INDEX[self._category[block]]
        changes = np.zeros((len(events) + 1, len(CATEGORIES)), dtype=np.int64)
        for block in self._before:
            changes[0, lookup[block, 1]] += lookup[block, 0]
        changes[np.arange(1, len(events) + 1), lookup[blocks, 1]] = np.sign(events) * lookup[blocks, 0]
        live = changes.cumsum(axis=0)  # live[i]: before event i
        phases = []
        for name, start, end in self._spans:
            # Where an allocation is followed by a release, or by the end: nothing higher lies between.
            grew = events[start:end] > 0
            tops = np.flatnonzero(grew & ~np.append(grew[1:], False)) + start + 1
            phases.append(PhaseCurve(name, live[np.concatenate(([start], tops, [end]))]))
        before = [(block, self._sizes[block]) for block in self._before]
        return Timeline(phases, Trace(before, self._events, self._sizes))
