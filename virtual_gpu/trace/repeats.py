"""Where a trace does the same again: micro-batches that allocate and release what the one before them did."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .trace import Trace


class Repeat(NamedTuple):
    """`length` entries from `start` on that come `times` in a row."""

    start: int
    length: int
    times: int


def alike(trace: Trace, start: int, length: int) -> bool:
    """Whether so many entries from `start` on come once more behind them, a micro-batch later.

    Entry by entry, down to which entry of theirs or of those right before them allocated what is released.
    """
    one, two = slice(start, start + length), slice(start + length, start + 2 * length)
    return (
        np.array_equal(trace.born[one] + length, trace.born[two])
        and np.array_equal(trace.nbytes[one], trace.nbytes[two])
        and np.array_equal(trace.category[one], trace.category[two])
        and np.array_equal(trace.stream[one], trace.stream[two])
        and np.array_equal(trace.span[one] + 4, trace.span[two])
        and bool((trace.born[two] >= start).all())
    )


def repeats_of(trace: Trace) -> list[Repeat]:
    """The micro-batches, each a forward and a backward phase, of which three and more in a row are `alike`."""
    found = []
    for phases in _groups(trace.names):
        # A micro-batch goes from its forward to the next one, or to the phase that follows the last.
        ends = np.searchsorted(trace.span, [2 * phase + 1 for phase in (*phases, phases[-1] + 2)]).tolist()
        first = 0
        for place in range(1, len(phases) + 1):
            length = ends[first + 1] - ends[first]
            same = place < len(phases) and ends[place + 1] - ends[place] == length
            if same and alike(trace, ends[place - 1], length):
                continue
            if place - first > 2:
                found.append(Repeat(ends[first], length, place - first))
            first = place
    return found


def _groups(names: tuple[str, ...]) -> list[list[int]]:
    """The places of the forward phases that follow each other, each with its backward phase."""
    groups: list[list[int]] = []
    place = 0
    while place < len(names):
        if names[place : place + 2] != ("forward", "backward"):
            place += 1
            continue
        if not groups or groups[-1][-1] + 2 != place:
            groups.append([])
        groups[-1].append(place)
        place += 2
    return groups
