"""The trace of a deep model from those of shallow ones: a training step goes through its layers in loops.

Forward, backward, the optimizer's lists and all else repeat a stretch of allocations and releases for every layer. So
the trace of one layer more has one repetition more in each of these loops, and is otherwise the same. Three traces show
where the loops are, and that nothing else grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .trace import Trace

SEARCHED = 10_000  # a trace of a training step has 10 to 70 loops, found in about as many steps


@dataclass(frozen=True)
class Continuation:
    """How a deep trace follows from a shallow one.

    like: the shallow one. entries: for each entry of the deep trace the one of `like` that it repeats. born: the deep
    trace's own births.
    """

    like: Trace
    entries: np.ndarray
    born: np.ndarray

    def of(self, trace: Trace) -> Trace | None:
        """The deep trace from a shallow one that differs from `like` in sizes alone (another micro-batch).

        None for any other, and where what comes out would release what is not there.
        """
        if not _alike(self.like, trace):
            return None
        deep = Trace(
            self.born,
            *(column[self.entries] for column in (trace.nbytes, trace.category, trace.span)),
            trace.names,
            stream=trace.stream[self.entries],
        )
        return deep if _is_sound(deep, trace.allocates[self.entries]) else None


def continuation(traces: Sequence[Trace], more: int) -> Continuation | None:
    """How the trace `more` steps in depth after the first of three, one step apart, follows from the second of them.

    None where that is not proven: every entry must be found in all three, every loop repeat itself entry by entry, and
    the number of the entry that allocated what is released here must be linear in the repetition and in the depth.
    """
    if len({trace.names for trace in traces}) > 1:
        return None
    _, ids = np.unique(np.concatenate([_labels(trace) for trace in traces]), axis=0, return_inverse=True)
    labels = np.split(ids.ravel(), np.cumsum([len(trace) for trace in traces])[:2])
    inserted = _insertions(*labels)
    if inserted is None:
        return None
    births = [trace.born for trace in traces]
    loops = _Loops(len(labels[0]), [_turned(loop, births, labels) for loop in inserted])
    found = _repeat(loops, births, labels, more)
    return found and Continuation(traces[1], *found)


def _alike(a: Trace, b: Trace) -> bool:
    """Whether two traces are the same but for the sizes."""
    return a.names == b.names and all(
        np.array_equal(getattr(a, column), getattr(b, column)) for column in ("born", "category", "span", "stream")
    )


def on_a_line(numbers: Sequence[Mapping[Any, int]], more: int) -> dict[Any, int] | None:
    """The numbers `more` steps after the first of several that lie one step apart; None where no line holds them all.

    A name that is missing counts as 0.
    """
    names = dict.fromkeys(name for some in numbers for name in some)
    table = np.array([[some.get(name, 0) for name in names] for some in numbers], dtype=object)
    steps = table[1:] - table[:-1]
    if not (steps == steps[0]).all():
        return None
    return dict(zip(names, (table[0] + more * steps[0]).tolist(), strict=True))


def _labels(trace: Trace) -> np.ndarray:
    """(entries, 7): what an entry has in common with its like at another depth. The last: the span of its release."""
    allocates = trace.allocates
    death = np.full(len(trace), -1)
    death[trace.born[~allocates]] = trace.span[~allocates]
    born = trace.born
    return np.column_stack(
        [allocates, trace.nbytes, trace.category, trace.stream, trace.span, trace.span[born], death[born]]
    )


def _common(*sequences: np.ndarray) -> int:
    """How many entries from their beginning the sequences have in common."""
    n = min(map(len, sequences))
    same = np.logical_and.reduce([sequences[0][:n] == other[:n] for other in sequences[1:]])
    return n if same.all() else int(same.argmin())


class _Loop(NamedTuple):
    """A stretch of `length` entries that comes in at `place` of the first trace; `before` it, so many came in."""

    place: int
    length: int
    before: int


def _insertions(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[_Loop] | None:
    """What comes into a so that with each stretch once it is b, and with each twice it is c.

    A search from left to right: where the three part, the shortest stretch that repeats itself in c and after which the
    three meet again; if that leads nowhere, a longer one. It gives up after SEARCHED steps.
    """
    stack = [(0, 0, [])]
    for _ in range(SEARCHED):
        if not stack:
            break
        place, before, found = stack.pop()
        i, j, k = place, place + before, place + 2 * before
        n = _common(a[i:], b[j:], c[k:])
        i, j, k = i + n, j + n, k + n
        left = len(b) - len(a) - before
        if not left and i == len(a) and len(c) == k:
            return found
        if i == len(a):
            lengths = [left] * (left > 0)
        else:
            room = min(left, len(b) - j - 1, (len(c) - k - 1) // 2)
            meets = (b[j + 1 : j + room + 1] == a[i]) & (c[k + 2 : k + 2 * room + 1 : 2] == a[i])
            lengths = (np.flatnonzero(meets) + 1).tolist()
        fitting = []
        for f in lengths:
            stretch = b[j : j + f]
            if np.array_equal(stretch, c[k : k + f]) and np.array_equal(stretch, c[k + f : k + 2 * f]):
                fitting.append((i, before + f, [*found, _Loop(i, f, before)]))
        stack += reversed(fitting)
    return None


def _turned(loop: _Loop, births: list[np.ndarray], labels: list[np.ndarray]) -> _Loop:
    """The same loop, begun where the repetition begins.

    A stretch that repeats itself may be cut anywhere; but what stands before the cut must release what it released at
    the other depths.
    """
    place, length, before = loop
    (a, b, c), (born_a, born_b, born_c) = labels, births
    j, k = place + before + length, place + 2 * (before + length)
    back = _common(a[:place][::-1], b[:j][::-1], c[:k][::-1])
    entries = np.arange(place - back, place)
    at_a, at_b, at_c = (born[entries + n * before] for n, born in enumerate((born_a, born_b, born_c)))
    linear = at_c - at_b == at_b - at_a
    return loop if linear.all() else loop._replace(place=place - back + int(linear.argmin()))


@dataclass
class _Loops:
    """Where the entries of the first trace, and those of the loops, stand in a trace that is `more` steps deeper."""

    entries: int
    loops: list[_Loop]

    def outside(self, more: int) -> np.ndarray:
        shift = np.zeros(self.entries, dtype=np.int64)
        for loop in self.loops:
            shift[loop.place :] += more * loop.length
        return np.arange(self.entries) + shift

    def inside(self, loop: _Loop, turn: int, more: int) -> np.ndarray:
        return loop.place + more * loop.before + turn * loop.length + np.arange(loop.length)

    def length(self, more: int) -> int:
        return self.entries + more * sum(loop.length for loop in self.loops)


def _repeat(loops: _Loops, births: list[np.ndarray], labels: list[np.ndarray], more: int) -> tuple | None:
    """(which entry of the second trace each is, births) of the deeper trace."""
    entries, born = (np.empty(loops.length(more), dtype=np.int64) for _ in range(2))
    at = [loops.outside(n) for n in range(3)]
    a, b, c = (birth[where] for birth, where in zip(births, at, strict=True))
    same = all(np.array_equal(labels[0], labels[n][at[n]]) for n in (1, 2))
    if not same or not np.array_equal(c - b, b - a):
        return None
    entries[loops.outside(more)], born[loops.outside(more)] = loops.outside(1), a + more * (b - a)
    for loop in loops.loops:
        first, second, third = loops.inside(loop, 0, 1), loops.inside(loop, 0, 2), loops.inside(loop, 1, 2)
        if not (np.array_equal(labels[1][first], labels[2][second])
                and np.array_equal(labels[1][first], labels[2][third])):  # fmt: skip
            return None
        x, y, z = births[1][first], births[2][second], births[2][third]
        for turn in range(more):
            where = loops.inside(loop, turn, more)
            entries[where], born[where] = first, x + (more - 1) * (y - x) + turn * (z - y)
    return entries, born


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
