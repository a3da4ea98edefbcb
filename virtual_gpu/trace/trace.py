"""The trace of a run: every allocation and release in its order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..allocator import CachingAllocator
from ..allocator_settings import AllocatorSettings
from .repeats import repeats_of
from .timeline import CATEGORIES, PhaseCurve, Timeline

MOST_STATES = 16  # of the allocator, in which a turn of micro-batches is looked for: four was the longest seen


@dataclass(frozen=True)
class Trace:
    """Every allocation and release of a run in its order: entry i of each array is about the i-th of them.

    born: the entry that allocated the block (an allocation's own). nbytes: bytes of the block. category: index into
    CATEGORIES. span: 2k + 1 inside phase k, 2k before it; what was there at the start comes first. names: the phases.
    held: bytes that the allocator gave for it, with the rest that it did not split off; None in a trace that was edited
    and has not been through an allocator (`through`). stream: whose pool the block comes from and goes back to; None
    stands for 0 throughout, the stream that computes. emptied: names of phases before which the allocator's cache is
    given back (`torch.cuda.empty_cache`).
    Releases that follow each other stand in the order in which their blocks were born: it makes no difference.
    """

    born: np.ndarray
    nbytes: np.ndarray
    category: np.ndarray
    span: np.ndarray
    names: tuple[str, ...]
    held: np.ndarray | None = None
    stream: np.ndarray | None = None
    emptied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stream is None:
            object.__setattr__(self, "stream", np.zeros(len(self.born), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.born)

    @property
    def allocates(self) -> np.ndarray:
        """Which entries are allocations."""
        return self.born == np.arange(len(self))

    @property
    def peak_bytes(self) -> int:
        """The most bytes asked for at once, before the allocator's rests."""
        return int(np.where(self.allocates, self.nbytes, -self.nbytes).cumsum().max(initial=0))

    def timeline(self) -> Timeline:
        """The bytes held over the phases, as the allocator counts them."""
        if self.held is None:
            return self.through()[0].timeline()
        changes = np.zeros((len(self) + 1, len(CATEGORIES)), dtype=np.int64)
        changes[np.arange(1, len(self) + 1), self.category] = np.where(self.allocates, self.held, -self.held)
        live = changes.cumsum(axis=0)  # live[i]: before entry i
        return Timeline([PhaseCurve(name, live[self.moments(k)]) for k, name in enumerate(self.names)], self)

    def moments(self, phase: int) -> np.ndarray:
        """The entries before which a phase's curve has its points: its beginning, every local maximum, its end."""
        start, end = self.entries(phase)
        # Where an allocation is followed by a release, or by the end: nothing higher lies between.
        grew = self.allocates[start:end]
        tops = np.flatnonzero(grew & ~np.append(grew[1:], False)) + start + 1
        return np.concatenate(([start], tops, [end]))

    def entries(self, phase: int) -> tuple[int, int]:
        """The first entry of a phase, and the first after it."""
        start, end = np.searchsorted(self.span, (2 * phase + 1, 2 * phase + 2))
        return int(start), int(end)

    def reserved_in(self, name: str) -> int:
        """The most that the caching allocator has reserved in the last phase of this name, without a limit."""
        phase = len(self.names) - 1 - self.names[::-1].index(name)
        start, end = self.entries(phase)
        before = {column: getattr(self, column)[:start] for column in ("born", "nbytes", "category", "span", "stream")}
        _, allocator = replace(self, **before, names=self.names[:phase], held=None).through()
        if name in self.emptied:
            allocator.empty_cache()
        most = allocator.reserved_bytes
        for entry in range(start, end):
            if self.born[entry] == entry:
                allocator.allocate(entry, int(self.nbytes[entry]), int(self.stream[entry]))
                most = max(most, allocator.reserved_bytes)
            else:
                allocator.free(int(self.born[entry]))
        return most

    def through(
        self,
        capacity_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        settings: AllocatorSettings | None = None,
    ) -> tuple[Trace, CachingAllocator]:
        """The trace with what the caching allocator gives for each block, and the allocator as it is at the end.

        MemoryError where `capacity_bytes` end it.
        """
        allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments, settings=settings)
        born, nbytes, stream = self.born.tolist(), self.nbytes.tolist(), self.stream.tolist()
        held: list[int] = []
        emptied = {self.entries(k)[0] for k, name in enumerate(self.names) if name in self.emptied}

        def run(start: int, end: int) -> None:
            allocate, free, give = allocator.allocate, allocator.free, held.append
            for entry in range(start, end):
                if entry in emptied:
                    allocator.empty_cache()
                block = born[entry]
                if block == entry:
                    give(allocate(entry, nbytes[entry], stream[entry]))
                else:
                    free(block)
                    give(held[block])

        done = 0
        for repeat in () if allocator.settings.garbage_collection_threshold else repeats_of(self):
            run(done, repeat.start)
            done = repeat.start
            states: list[tuple] = []  # after each
            left = repeat.times
            while left:
                run(done, done + repeat.length)
                left -= 1
                state = allocator.state(done) if left and len(states) < MOST_STATES else None
                if state in states:  # from here on everything gets what it got since then
                    turns = len(states) - states.index(state)
                    again = left // turns
                    held += held[-turns * repeat.length :] * again
                    allocator.rename(done, again * turns * repeat.length)
                    done += again * turns * repeat.length
                    left -= again * turns
                    states = []
                elif state is not None:
                    states.append(state)
                done += repeat.length
        run(done, len(self))
        return replace(self, held=np.array(held, dtype=np.int64)), allocator

    def reserved_peak(
        self,
        capacity_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        settings: AllocatorSettings | None = None,
    ) -> int:
        """The most bytes that the caching allocator reserves on the way; MemoryError where `capacity_bytes` end it."""
        _, allocator = self.through(capacity_bytes, expandable_segments=expandable_segments, settings=settings)
        return allocator.peak_reserved_bytes

    def smallest_capacity(
        self, step_bytes: int, settings: AllocatorSettings | None = None, reserved: int | None = None
    ) -> int:
        """Bytes, `step_bytes` apart from the tensors' peak on, in which the caching allocator gets through.

        reserved: `reserved_peak` without a limit, where it is known.
        """
        peak = self.peak_bytes
        reserved = self.reserved_peak(settings=settings) if reserved is None else reserved
        low, high = 0, -(-(reserved - peak) // step_bytes)
        while low < high:
            middle = (low + high) // 2
            # With less room than a run had, but all that it reserved, it would be the same run.
            if peak + middle * step_bytes < reserved:
                try:
                    reserved = self.reserved_peak(peak + middle * step_bytes, settings=settings)
                except MemoryError:
                    low = middle + 1
                    continue
            high = middle
        return peak + low * step_bytes
