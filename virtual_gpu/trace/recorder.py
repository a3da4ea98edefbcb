"""Recording a trace."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .timeline import _INDEX, Timeline
from .trace import Trace


class TimelineRecorder:
    """Collects allocations and releases by id, and turns them into a `Timeline` once it is known what each was for."""

    def __init__(self, live_blocks: Mapping[int, tuple[int, int, str]]):
        self._sizes = {block: (nbytes, held) for block, (nbytes, held, _) in live_blocks.items()}
        self._category = {block: category for block, (_, _, category) in live_blocks.items()}
        self._stream: dict[int, int] = {}  # of blocks of other streams than 0
        self._before = list(live_blocks)
        self._events: list[int] = []  # +id: allocated, -id: released
        self._spans: list[tuple[str, int, int]] = []  # phase, first event, end event
        self._open: tuple[str, int] | None = None

    def allocated(self, block: int, nbytes: int, held: int, category: str, stream: int = 0) -> None:
        self._sizes[block] = nbytes, held
        if stream:
            self._stream[block] = stream
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

    def births(self) -> list[int]:
        """The ids of all allocations so far, in the order in which the trace has them."""
        return [event for event in (*self._before, *self._events) if event > 0]

    def trace(self) -> Trace:
        """All that was recorded so far."""
        events = np.array(self._before + self._events, dtype=np.int64)
        entries, blocks, releases = np.arange(len(events)), np.abs(events), events < 0
        lookup = np.zeros((max(self._sizes, default=0) + 1, 5), dtype=np.int64)  # both bytes, category, birth, stream
        for block, sizes in self._sizes.items():
            lookup[block, :3] = *sizes, _INDEX[self._category[block]]
        lookup[blocks[~releases], 3] = entries[~releases]
        lookup[list(self._stream), 4] = list(self._stream.values())
        span = np.zeros(len(events), dtype=np.int64)
        for k, (_, start, end) in enumerate(self._spans):
            span[len(self._before) + start :] = 2 * k + 1
            span[len(self._before) + end :] = 2 * k + 2
        # A stretch of releases ends at an allocation and at the edge of a phase.
        breaks = ~releases
        breaks[1:] |= ~releases[:-1] | (span[1:] != span[:-1])
        order = np.lexsort((lookup[blocks, 3], breaks.cumsum()))
        nbytes, held, category, born, stream = lookup[blocks[order]].T
        return Trace(born, nbytes, category, span, tuple(name for name, _, _ in self._spans), held, stream)

    def timeline(self) -> Timeline:
        """The phases that ended so far."""
        return self.trace().timeline()
