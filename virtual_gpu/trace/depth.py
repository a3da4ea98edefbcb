"""The trace of a deep model from those of two shallow ones: a training step goes through its layers in loops.

Forward, backward, the optimizer's lists and all else repeat a stretch of allocations and releases for every layer. So
the trace of a model two layers deeper has every such stretch twice more, the same both times, and is otherwise the
same. What a release of a stretch gives back says how the stretch goes on: its like of the same layer, where it goes
through the layers as the one did that allocated; or, where it goes the other way, counted from the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .trace import Trace

TURNS = 2  # by which the one trace is deeper than the other: a stretch is to be seen to repeat itself
SEARCHED = 10_000  # a trace of a training step has 10 to 70 loops, found in about as many steps


@dataclass(frozen=True)
class Continuation:
    """How a deep trace follows from a shallow one.

    like: the shallow one. turns: for each of its entries the like of it in the first turn. entries: for each entry of
    the deep trace the one of `like` that it repeats. born: the deep trace's own births.
    """

    like: Trace
    turns: np.ndarray
    entries: np.ndarray
    born: np.ndarray

    def of(self, trace: Trace) -> Trace | None:
        """The deep trace from a shallow one that differs from `like` in sizes alone (another micro-batch).

        None for any other, where its turns differ, and where what comes out would release what is not there.
        """
        if not _alike(self.like, trace) or not np.array_equal(trace.nbytes[self.turns], trace.nbytes):
            return None
        deep = _repeated(trace, self.entries, self.born)
        return deep if _is_sound(deep, trace.allocates[self.entries]) else None


def continuation(short: Trace, long: Trace, more: int, seen: int = 1) -> Continuation | None:
    """How the trace `more` turns deeper than `short` follows from one that is `seen` deeper; `long` is TURNS deeper.

    `like` is not a run's (but for TURNS `seen`): what so many turns more should do, which a run may contradict. None
    where a deep trace is not proven: every entry must be found in both, every loop repeat itself entry by entry, and a
    release give back the same block in both, or its like in the last turn; inside a loop that of the next turn, or of
    the one before.
    """
    if short.names != long.names:
        return None
    _, ids = np.unique(np.concatenate([_labels(short), _labels(long)]), axis=0, return_inverse=True)
    loops = _loops(np.split(ids.ravel(), [len(short)]), (short.born, long.born))
    if loops is None:
        return None
    like, deep = (loops.births(short.born, long.born, turns) for turns in (seen, more))
    return Continuation(
        _repeated(long, loops.likes(seen, TURNS), like), loops.likes(seen, seen), loops.likes(more, seen), deep
    )


def on_a_line(one: Mapping[Any, int], other: Mapping[Any, int], more: int, apart: int = 1) -> dict[Any, int] | None:
    """The numbers `more` steps after the one of two that lie `apart` steps apart; None where there is no whole number.

    A name that is missing counts as 0.
    """
    found = {}
    for name in dict.fromkeys((*one, *other)):
        first = one.get(name, 0)
        step, rest = divmod(other.get(name, 0) - first, apart)
        if rest:
            return None
        found[name] = first + more * step
    return found


def _repeated(trace: Trace, entries: np.ndarray, born: np.ndarray) -> Trace:
    """The trace that repeats these entries of another, with births of its own."""
    columns = (trace.nbytes, trace.category, trace.span)
    return Trace(born, *(column[entries] for column in columns), trace.names, stream=trace.stream[entries])


def _alike(a: Trace, b: Trace) -> bool:
    """Whether two traces are the same but for the sizes."""
    return a.names == b.names and all(
        np.array_equal(getattr(a, column), getattr(b, column)) for column in ("born", "category", "span", "stream")
    )


def _labels(trace: Trace) -> np.ndarray:
    """(entries, 7): what an entry has in common with its like at another depth. The last: the span of its release."""
    allocates = trace.allocates
    death = np.full(len(trace), -1)
    death[trace.born[~allocates]] = trace.span[~allocates]
    born = trace.born
    return np.column_stack(
        [allocates, trace.nbytes, trace.category, trace.stream, trace.span, trace.span[born], death[born]]
    )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many entries from their beginning the two have in common."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())


class _Loop(NamedTuple):
    """A stretch of `length` entries that comes in at `place` of the short trace; `before` it, so many came in."""

    place: int
    length: int
    before: int


@dataclass(frozen=True)
class _Loops:
    """Where the entries of the short trace, and those of the loops, stand in a trace that is some turns deeper."""

    entries: int
    loops: tuple[_Loop, ...] = ()

    @property
    def added(self) -> int:
        """How many entries a turn adds."""
        return sum(loop.length for loop in self.loops)

    def outside(self, turns: int) -> np.ndarray:
        entries = np.arange(self.entries)
        return entries + turns * self.lies(entries, 0)[0]

    def inside(self, loop: _Loop, turn: int, turns: int) -> np.ndarray:
        return loop.place + turns * loop.before + turn * loop.length + np.arange(loop.length)

    def lies(self, entries: np.ndarray, turns: int) -> tuple[np.ndarray, np.ndarray]:
        """Where entries of the trace that many turns deeper stand: (shifts, lengths).

        By how much each stands later with each turn; how long the loop is that it is in, or that comes next (0: none).
        """
        places, lengths, befores = np.array([*self.loops, (self.entries, 0, self.added)], dtype=np.int64).T
        starts = places + turns * befores
        begun = np.searchsorted(starts[:-1], entries, "right")
        loop = begun - (entries < (starts + turns * lengths)[begun - 1]) * (begun > 0)
        return befores[loop], lengths[loop]

    def follow(self, short: np.ndarray, long: np.ndarray) -> np.ndarray:
        """Which births of the long trace are those of the short one: the same entry, or its like in the last turn."""
        later, length = self.lies(short, 0)
        return (long == short + TURNS * later) | (long == short + TURNS * (later + length))

    def repeats(self, loop: _Loop, long: np.ndarray) -> bool:
        """Whether what the loop's second turn gives back is one turn of its loop from what the first does."""
        first, second = (long[self.inside(loop, turn, TURNS)] for turn in range(TURNS))
        return np.array_equal(np.abs(second - first), self.lies(first, TURNS)[1])

    def likes(self, turns: int, of: int) -> np.ndarray:
        """For each entry of the trace that many turns deeper, the one that it repeats of that `of` turns deeper."""
        entries = np.empty(self.entries + turns * self.added, dtype=np.int64)
        entries[self.outside(turns)] = self.outside(of)
        for loop in self.loops:
            for turn in range(turns):
                entries[self.inside(loop, turn, turns)] = self.inside(loop, 0, of)
        return entries

    def births(self, short: np.ndarray, long: np.ndarray, turns: int) -> np.ndarray:
        """The births of the trace that many turns deeper, from those of the short and of the long one."""
        born = np.empty(self.entries + turns * self.added, dtype=np.int64)
        born[self.outside(turns)] = short + turns * ((long[self.outside(TURNS)] - short) // TURNS)
        for loop in self.loops:
            first, second = (long[self.inside(loop, turn, TURNS)] for turn in range(TURNS))
            step = second - first
            later = self.lies(first, TURNS)[0] + np.maximum(-step, 0)  # the other way: counted from the last turn
            for turn in range(turns):
                born[self.inside(loop, turn, turns)] = first + (turns - TURNS) * later + turn * step
        return born


def _loops(labels: Sequence[np.ndarray], births: Sequence[np.ndarray]) -> _Loops | None:
    """What comes into the short trace so that with each stretch TURNS times it is the long one.

    A search from left to right: where the two part, the longest stretch that repeats itself in the long one and after
    which they meet again (a layer, rather than its parts one by one); if that leads nowhere, a shorter one. A stretch
    may be cut anywhere: it begins with what does not give back what its like in the short trace does. It gives up after
    SEARCHED steps.
    """
    (a, b), (born_a, born_b) = labels, births
    whole, rest = divmod(len(b) - len(a), TURNS)
    stack = [] if rest else [_Loops(len(a))]
    for _ in range(SEARCHED):
        if not stack:
            break
        loops = stack.pop()
        place, before = loops.loops[-1].place if loops.loops else 0, loops.added
        left, shift = whole - before, TURNS * before
        end = place + _common(a[place:], b[place + shift :])
        follows = loops.follow(born_a[place:end], born_b[place + shift : end + shift])
        cut = end if follows.all() else place + int(follows.argmin())
        if not left and cut == len(a):
            return loops
        if end == len(a):
            lengths = np.arange(left, left + (left > 0))
        else:
            at = end + shift
            room = max(min(left, (len(b) - at - 1) // TURNS), 0)
            meets = (b[at + 1 : at + room + 1] == b[at]) & (b[at + TURNS : at + TURNS * room + 1 : TURNS] == a[end])
            lengths = np.flatnonzero(meets) + 1
        fitting = []
        for length in lengths.tolist():
            at, after = cut + shift, cut + shift + TURNS * length
            loop = _Loop(cut, length, before)
            more = _Loops(len(a), (*loops.loops, loop))
            if (
                np.array_equal(b[at : at + length], b[at + length : after])
                and np.array_equal(a[cut:end], b[after : after + end - cut])
                and more.repeats(loop, born_b)
            ):
                fitting.append(more)
        stack += fitting
    return None


def _is_sound(trace: Trace, allocates: np.ndarray) -> bool:
    """Whether every release is of a block of that size and kind, allocated before, and released once."""
    released, entries = trace.born[~allocates], np.flatnonzero(~allocates)
    return (
        np.array_equal(trace.allocates, allocates)
        and bool((released >= 0).all() and (released < entries).all())
        and bool(allocates[released].all())
        and np.array_equal(trace.nbytes[released], trace.nbytes[entries])
        and np.array_equal(trace.category[released], trace.category[entries])
        and len(np.unique(released)) == len(released)
    )
