"""A trace with the tensor behind each of its blocks: the operation that made it, for which module, on which line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .timeline import CATEGORIES
from .trace import Trace


class Place(NamedTuple):
    """Who asks: an operation (of backward its node), the module that runs, and the innermost (file, line) of a model,
    an optimizer or a loop. module: None outside of all; "" is the model itself. line: None where nothing tells.
    """

    operation: str
    module: str | None
    line: tuple[str, int] | None


@dataclass(slots=True)
class Origin:
    """What lies in one block.

    made: by whom. kept: whose backward released it, where forward had made it: the last that needed it. name: of a
    parameter, a buffer, a gradient or an optimizer's state. shape and dtype: None for what a kernel holds inside.
    """

    made: Place
    kept: Place | None = None
    name: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class Held(NamedTuple):
    """A block at one moment. span: that of its birth, as in `Trace`. nbytes: asked for. held: given for it."""

    category: str
    span: int
    nbytes: int
    held: int
    origin: Origin

    @property
    def place(self) -> Place:
        """Where it belongs: with what keeps it, or else with what made it."""
        return self.origin.kept or self.origin.made


@dataclass(frozen=True)
class Details:
    """A trace, and the origin of each of its blocks in the order of their births."""

    trace: Trace
    origins: list[Origin]

    def held(self, phase: int) -> list[Held]:
        """All blocks at the moment of the phase, counted from 0, at which most bytes are held: the first of several."""
        trace = self.trace
        allocates = trace.allocates
        live = np.concatenate(([0], np.where(allocates, trace.held, -trace.held).cumsum()))
        start, end = np.searchsorted(trace.span, (2 * phase + 1, 2 * phase + 2))
        return self.at(int(start + live[start : end + 1].argmax()))

    def at(self, moment: int) -> list[Held]:
        """All blocks before the entry with that number."""
        trace, allocates = self.trace, self.trace.allocates
        released = trace.born[:moment][~allocates[:moment]]
        alive = allocates[:moment].copy()
        alive[released] = False
        return list(self._of(np.flatnonzero(alive), allocates.cumsum() - 1))

    def _of(self, entries: np.ndarray, order: np.ndarray) -> Iterator[Held]:
        trace = self.trace
        for entry in entries.tolist():
            category = CATEGORIES[trace.category[entry]]
            numbers = int(trace.span[entry]), int(trace.nbytes[entry]), int(trace.held[entry])
            yield Held(category, *numbers, self.origins[order[entry]])
