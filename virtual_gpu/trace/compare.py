"""Two runs beside each other: the first difference in the order of their allocations, and what differs in sum."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from ..language import tr
from ..units import human_bytes
from .saved import Saved

MOST_DIFFERENCES = 3000  # up to here the alignment is the shortest possible: time and memory grow with the square
GROUPS = 8  # so many kinds of allocations that only one run has are told, those of most bytes


@dataclass(frozen=True)
class Comparison:
    """What two runs, "before" and "after", have in common; bytes throughout.

    first_difference: None where all entries are equal; else its index and what stands there on either side: (bytes,
    negative for a release, phase, place), None where that run has ended. peaks: of both. phases, at_peak: name → both.
    only: for each run (count, bytes of one, phase, place) of the allocations without a counterpart, the largest first.
    shortest: whether no alignment leaves fewer out.
    """

    entries: tuple[int, int]
    first_difference: tuple[int, tuple[int, str, str] | None, tuple[int, str, str] | None] | None
    peaks: tuple[int, int]
    phases: dict[str, tuple[int, int]]
    at_peak: dict[str, tuple[int, int]]
    only: tuple[list[tuple[int, int, str, str]], list[tuple[int, int, str, str]]]
    shortest: bool

    @property
    def growth(self) -> float:
        """By how much the peak grew, of what it was."""
        before, after = self.peaks
        return (after - before) / before if before else float(bool(after))

    def json(self) -> dict[str, Any]:
        """All of it, in JSON's types."""
        return {**vars(self), "growth": self.growth}

    def text(self) -> str:
        """A page of text."""
        before, after = self.peaks
        out = [
            tr(
                ko=f"최대 메모리 {human_bytes(before)} → {human_bytes(after)} ({self.growth:+.2%})",
                en=f"peak {human_bytes(before)} → {human_bytes(after)} ({self.growth:+.2%})",
            )
        ]
        if self.first_difference is None:
            n = self.entries[0]
            out.append(tr(ko=f"할당과 해제 {n:,}개가 모두 같다", en=f"all {n:,} allocations and releases are equal"))
            return "\n".join(out)
        index, ours, theirs = self.first_difference
        out += [
            tr(ko=f"{index:,}개까지 같고 그다음이 다르다", en=f"{index:,} entries are equal, then:"),
            *map(_entry, (ours, theirs)),
        ]
        for head, rows in (
            (tr(ko="최대일 때 차지하는 것", en="at the peak"), self.at_peak),
            (tr(ko="단계별 최대", en="peak of each phase"), self.phases),
        ):
            out += ["", head]
            out += [
                f"  {name:<20}{human_bytes(a):>12} → {human_bytes(b):>12}  {b - a:+,}"
                for name, (a, b) in rows.items()
                if a or b
            ]
        for head, rows in zip(
            (tr(ko="첫째에만 있는 할당", en="only in the first"), tr(ko="둘째에만 있는 할당", en="only in the second")),
            self.only,
            strict=True,
        ):
            out += ["", head] if rows else []
            out += [f"  {count:>5} × {human_bytes(size):>12}  {phase}  {place}" for count, size, phase, place in rows]
        return "\n".join(out)


def compare(before: Saved, after: Saved) -> Comparison:
    """Compare two runs entry by entry."""
    sides = _Side(before), _Side(after)
    ours, theirs = sides
    index = equal_prefix(ours.signed, theirs.signed)
    pairs, shortest = align(ours.sizes, theirs.sizes)
    matched = tuple({pair[side] for pair in pairs} for side in (0, 1))
    same = index == len(ours.signed) == len(theirs.signed)
    return Comparison(
        entries=(len(ours.signed), len(theirs.signed)),
        first_difference=None if same else (index, *(side.entry(index) for side in sides)),
        peaks=(ours.peak, theirs.peak),
        phases={name: (ours.phases[name], theirs.phases[name]) for name in ours.phases | theirs.phases},
        at_peak={name: (ours.at_peak[name], theirs.at_peak[name]) for name in ours.at_peak | theirs.at_peak},
        only=tuple(side.without(mine) for side, mine in zip(sides, matched, strict=True)),
        shortest=shortest,
    )


class _Side:
    """One run: signed entries in an order that does not depend on that of releases, and its sums."""

    def __init__(self, saved: Saved):
        trace = saved.trace if saved.trace.held is not None else saved.trace.through()[0]
        order = sorted_releases(trace.born, ~trace.allocates)
        signed = np.where(trace.allocates, trace.held, -trace.held)
        self.saved, self.order, self.signed = saved, order, signed[order].tolist()
        self.births = np.flatnonzero(trace.allocates)
        self.sizes = trace.held[self.births].tolist()
        live = signed.cumsum()
        top = int(live.argmax()) if len(live) else -1
        self.peak = int(live.max(initial=0))
        released = np.full(len(trace), len(trace))
        gone = np.flatnonzero(~trace.allocates)
        released[trace.born[gone]] = gone
        self.at_peak: Counter[str] = Counter()
        for entry in self.births[(self.births <= top) & (released[self.births] > top)].tolist():
            self.at_peak[saved.kind_of(entry)] += int(trace.held[entry])
        self.phases: Counter[str] = Counter()
        for entry, height in enumerate(live.tolist()):
            name = saved.phase_of(entry)
            self.phases[name] = max(self.phases[name], height)

    def entry(self, index: int) -> tuple[int, str, str] | None:
        if index >= len(self.signed):
            return None
        entry = int(self.order[index])
        return self.signed[index], self.saved.phase_of(entry), self.saved.place_of(entry)

    def without(self, matched: set[int]) -> list[tuple[int, int, str, str]]:
        groups = Counter(
            (size, self.saved.phase_of(entry), self.saved.place_of(entry))
            for number, (size, entry) in enumerate(zip(self.sizes, self.births.tolist(), strict=True))
            if number not in matched
        )
        most = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:GROUPS]
        return [(count, *what) for what, count in most]


def _entry(entry: tuple[int, str, str] | None) -> str:
    if entry is None:
        return "  " + tr(ko="끝났다", en="nothing more")
    nbytes, phase, place = entry
    return f"  {nbytes:+,} bytes  {phase}  {place}"


def sorted_releases(blocks: np.ndarray, releases: np.ndarray) -> np.ndarray:
    """Order in which releases that follow each other stand as their blocks were born, which makes no difference."""
    breaks = ~releases
    breaks[1:] |= ~releases[:-1]
    return np.lexsort((blocks, breaks.cumsum()))


def equal_prefix(a: list[int], b: list[int]) -> int:
    """How many elements are equal from the start on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def align(ours: list[int], theirs: list[int], most: int = MOST_DIFFERENCES) -> tuple[list[tuple[int, int]], bool]:
    """(pairs of equal elements in order, whether no alignment leaves fewer out).

    Myers, "An O(ND) Difference Algorithm and Its Variations" (1986), greedy. difflib alone looks for long stretches and
    leaves out thousands where a few sizes come again and again; it takes over beyond `most` differences.
    """
    front = equal_prefix(ours, theirs)
    a, b = ours[front:], theirs[front:]
    back = equal_prefix(a[::-1], b[::-1])
    a, b = a[: len(a) - back], b[: len(b) - back]
    ends = [(i, i) for i in range(front)], [(len(ours) - i, len(theirs) - i) for i in range(back, 0, -1)]
    middle = _shortest(a, b, most)
    if middle is None:
        blocks = SequenceMatcher(None, a, b).get_matching_blocks()
        rough = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    pairs = rough if middle is None else middle
    return [*ends[0], *((front + i, front + j) for i, j in pairs), *ends[1]], middle is not None


def _shortest(a: list[int], b: list[int], most: int) -> list[tuple[int, int]] | None:
    n, m = len(a), len(b)
    reach = array("q", [0]) * (2 * min(most, n + m) + 3)  # by diagonal: how far into a
    middle = len(reach) // 2
    history = []
    for d in range(min(most, n + m) + 1):
        history.append(reach[middle - d : middle + d + 1])
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and reach[middle + k - 1] < reach[middle + k + 1])
            x = reach[middle + k + 1] if down else reach[middle + k - 1] + 1
            y = x - k
            while x < n and y < m and a[x] == b[y]:
                x, y = x + 1, y + 1
            reach[middle + k] = x
            if x >= n and y >= m:
                return _walk_back(history, n, m)
    return None


def _walk_back(history: list[array], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for d in range(len(history) - 1, -1, -1):
        k = x - y
        if d == 0:
            before_x, before_y = 0, 0
        else:
            reach = history[d]  # what round d - 1 left, diagonals -d to d
            down = k == -d or (k != d and reach[d + k - 1] < reach[d + k + 1])
            k += 1 if down else -1
            before_x = reach[d + k]
            before_y = before_x - k
        while x > before_x and y > before_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = before_x, before_y
    return pairs[::-1]
