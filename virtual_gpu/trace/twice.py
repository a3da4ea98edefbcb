"""What checkpointed blocks compute twice, in a trace; and the trace in which some of it is kept, or brought back.

A result that is kept is there from its forward until backward has done with it: the release after forward and the
second allocation are no more. Of one that is not computed again, what its operation takes for a moment is no more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .timeline import CATEGORIES
from .trace import Trace

MARKS = len(CATEGORIES)  # from here on a category is a mark
_ACTIVATIONS = CATEGORIES.index("activations")


class Mark(NamedTuple):
    """A block of the allocator that an operation took: of which result, the how-manieth of that name in its layers.

    number: of its outputs, or -1 and below: of what it took for a moment.
    """

    name: str
    place: int
    number: int
    again: bool


@dataclass(frozen=True)
class Twice:
    """A trace under checkpointing, and its results that are computed twice: a row each in the arrays.

    name: index into names. block: of the model, of `blocks`; -1 where results of that name are not the same in each.
    made, gone: the entries of the first time, -1 of what is taken for a moment. again, done: those of the second.
    """

    trace: Trace
    names: tuple[str, ...]
    blocks: int
    name: np.ndarray
    block: np.ndarray
    made: np.ndarray
    gone: np.ndarray
    again: np.ndarray
    done: np.ndarray

    @classmethod
    def of(cls, trace: Trace, marks: Mapping[int, Mark], blocks: int) -> Twice:
        """From a trace in which such blocks' category is MARKS + a key of marks; forward and backward are its phases.

        Left out is a name of which a layer is not computed again: kept, its result would lie there for nothing.
        """
        entries: dict[Mark, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for entry in np.flatnonzero(trace.allocates & (trace.category >= MARKS)).tolist():
            entries[marks[int(trace.category[entry]) - MARKS]][int(trace.span[entry]) // 2].append(entry)
        death = np.full(len(trace), -1)
        death[trace.born[~trace.allocates]] = np.flatnonzero(~trace.allocates)
        found = {name: _rows_of(name, entries, death, blocks) for name in dict.fromkeys(mark.name for mark in entries)}
        names = tuple(name for name, rows in found.items() if rows)
        table = [(k, *row) for k, name in enumerate(names) for row in found[name]]
        columns = np.array(table, dtype=np.int64).reshape(-1, 6).T
        plain = np.where(trace.category >= MARKS, _ACTIVATIONS, trace.category)
        return cls(replace(trace, category=plain, held=None), names, blocks, *columns)

    @property
    def nbytes(self) -> np.ndarray:
        """Of each row."""
        return self.trace.nbytes[self.again]

    def live(self) -> np.ndarray:
        """The bytes held after each entry, before the allocator's rests."""
        return np.where(self.trace.allocates, self.trace.nbytes, -self.trace.nbytes).cumsum()

    def change(self, kept: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """By how much `live` changes with these rows (masks) kept on the card, or brought back from the CPU."""
        change = np.zeros(len(self.trace) + 1, dtype=np.int64)
        output = self.made >= 0
        for rows, start, end, sign in (
            (kept & output, self.gone, self.again, 1),
            ((kept | moved) & ~output, self.again, self.done, -1),
        ):
            np.add.at(change, start[rows], sign * self.nbytes[rows])
            np.add.at(change, end[rows], -sign * self.nbytes[rows])
        return change[:-1].cumsum()

    def edited(self, kept: np.ndarray, moved: np.ndarray) -> Trace:
        """The trace of the same training with these rows (masks) kept on the card, or brought back from the CPU."""
        trace, output = self.trace, self.made >= 0
        born, stays = trace.born.copy(), np.ones(len(trace), dtype=bool)
        rows = kept & output
        born[self.done[rows]] = self.made[rows]
        stays[self.gone[rows]] = stays[self.again[rows]] = False
        rows = (kept | moved) & ~output
        stays[self.again[rows]] = stays[self.done[rows]] = False
        allocates = (trace.allocates & stays)[stays]
        born, span = born[stays], trace.span[stays]
        # A stretch of releases stands in the order of their births (see `Trace`), of which some are others now.
        breaks = allocates.copy()
        breaks[1:] |= allocates[:-1] | (span[1:] != span[:-1])
        order = np.lexsort((born, breaks.cumsum()))
        place = stays.cumsum() - 1
        nbytes, category, span, stream = (
            getattr(trace, name)[stays][order] for name in ("nbytes", "category", "span", "stream")
        )
        return Trace(place[born[order]], nbytes, category, span, trace.names, stream=stream)


def _rows_of(
    name: str, entries: Mapping[Mark, Mapping[int, list[int]]], death: np.ndarray, blocks: int
) -> list[tuple[int, ...]]:
    """The rows of a name, without the first column: backward goes through the blocks the other way."""
    rows: list[tuple[int, ...]] = []
    for mark, phases in entries.items():
        if mark.name != name or (mark.number < 0 and not mark.again):
            continue
        if mark.number >= 0 and mark._replace(again=not mark.again) not in entries:
            return []
        for phase, again in phases.items() if mark.again else ():
            made = [-1] * len(again)
            if mark.number >= 0:
                made = entries[mark._replace(again=False)].get(phase - 1, [])
            if len(made) != len(again):
                return []
            for block, (first, second) in enumerate(zip(made, again[::-1], strict=True)):
                gone = int(death[first]) if first >= 0 else -1
                if gone >= second or (gone < 0 <= first):
                    return []  # it is there all the while
                rows.append((block, first, gone, second, int(death[second])))
    even = all(row[0] < blocks for row in rows) and len(rows) % blocks == 0
    counts = Counter(row[0] for row in rows)
    return rows if even and len({*counts.values()}) == 1 else [(-1, *row[1:]) for row in rows]
