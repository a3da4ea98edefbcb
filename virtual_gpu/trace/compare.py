"""Two runs beside each other: the first difference of their requests, the rule that explains it, and the sums."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..allocator import round_size
from ..errors import WrongValue
from ..interrupts import interrupts_heard
from ..language import tr
from ..units import human_bytes
from .saved import Saved, read

MOST_DIFFERENCES = 3000  # up to here the alignment is the shortest possible: time and memory grow with the square
GROUPS = 8  # so many kinds of allocations that only one run has are told, those of most bytes


class Entry(NamedTuple):
    """A request (bytes, negative for a release), the phase it came in, and who asked for the block: line and module (of
    a card's snapshot the frames, where they were recorded), and the operation.
    """

    nbytes: int
    phase: str
    place: str
    operation: str


@dataclass(frozen=True)
class Comparison:
    """What two runs, "before" and "after", have in common; bytes throughout.

    entries: allocations and releases of both, without what was there before. first_difference: None where all of them
    are equal; else its index and what stands there on either side, None where that run has ended. rules: those without
    which the first run is equal to the second for longer → where they differ then (None: nowhere), what goes furthest
    first; None where that was not tried. peaks: of both. phases, at_peak: name → both. only: for each run (count, bytes
    of one, phase, place) of the allocations without a counterpart, the largest first. shortest: whether no alignment
    leaves fewer out.
    """

    entries: tuple[int, int]
    first_difference: tuple[int, Entry | None, Entry | None] | None
    rules: dict[str, int | None] | None
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
            *self._explained(),
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

    def _explained(self) -> list[str]:
        if self.rules is None:
            return []
        if not self.rules:
            text = tr(ko="  하나만 빼서 더 오래 같아지는 규칙이 없다", en="  no single rule explains it")
            return [text]
        same = tr(ko="모두 같다", en="all are equal")
        return [
            tr(
                ko=f"  규칙 {rule}을(를) 빼면: {same if at is None else f'{at:,}개까지 같다'}",
                en=f"  without the rule {rule}: {same if at is None else f'{at:,} entries are equal'}",
            )
            for rule, at in self.rules.items()
        ]


@interrupts_heard()
def compare(
    before: Saved | str | Path, after: Saved | str | Path, *, without: Callable[[str], Saved] | None = None
) -> Comparison:
    """Compare two runs entry by entry: files of `virtual-gpu run --save`, PyTorch's snapshots, or what `read` gives.

    Releases that follow each other stand in the order of their bytes, which makes no difference. without: the first run
    once more on a virtual GPU that leaves out the rule of this name; asked for each rule that had a say in it where the
    two differ, to say which explains that. WrongValue for a file that cannot be read, or what is no function.
    """
    if without is not None and not callable(without):
        raise WrongValue(
            tr(ko=f"without={without!r:.80}: 함수여야 한다.", en=f"without={without!r:.80}: must be a function.")
        )
    first, second = (one if isinstance(one, Saved) else read(one) for one in (before, after))
    sides = ours, theirs = _Side(first), _Side(second)
    index = first_difference(ours.signed, theirs.signed)
    rules = None
    if without is not None:
        acted = () if index is None else _all_rules() if first.rules is None else first.rules
        rules = explained_by(lambda rule: _Side(without(rule)).signed, acted, theirs.signed, index)
    pairs, shortest = align(ours.sizes, theirs.sizes)
    matched = tuple({pair[side] for pair in pairs} for side in (0, 1))
    return Comparison(
        entries=(len(ours.signed), len(theirs.signed)),
        first_difference=None if index is None else (index, *(side.entry(index) for side in sides)),
        rules=rules,
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
        asked = np.array([round_size(nbytes) for nbytes in trace.nbytes.tolist()], dtype=np.int64)
        signed = np.where(trace.allocates, asked, -asked)
        order = sorted_releases(asked, ~trace.allocates)[saved.start :]  # what was there was allocated: it comes first
        self.saved, self.order, self.signed = saved, order, signed[order].tolist()
        self.births = np.flatnonzero(trace.allocates)
        self.sizes = asked[self.births[saved.start :]].tolist()
        live = np.where(trace.allocates, trace.held, -trace.held).cumsum()
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

    def entry(self, index: int) -> Entry | None:
        if index >= len(self.signed):
            return None
        entry = int(self.order[index])
        names = (name(entry) for name in (self.saved.phase_of, self.saved.place_of, self.saved.operation_of))
        return Entry(self.signed[index], *names)

    def without(self, matched: set[int]) -> list[tuple[int, int, str, str]]:
        groups = Counter(
            (size, self.saved.phase_of(entry), self.saved.place_of(entry))
            for number, (size, entry) in enumerate(zip(self.sizes, self._recorded(), strict=True))
            if number not in matched
        )
        most = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:GROUPS]
        return [(count, *what) for what, count in most]

    def _recorded(self) -> list[int]:
        return self.births[self.saved.start :].tolist()


def _entry(entry: Entry | None) -> str:
    if entry is None:
        return "  " + tr(ko="끝났다", en="nothing more")
    return "  ".join(filter(None, (f"  {entry.nbytes:+,} bytes", entry.phase, entry.operation, entry.place)))


def _all_rules() -> Iterable[str]:
    from ..rules.active import RULES  # which loads torch

    return RULES


def sorted_releases(keys: np.ndarray, releases: np.ndarray) -> np.ndarray:
    """Order in which releases that follow each other stand by their keys, which makes no difference."""
    breaks = ~releases
    breaks[1:] |= ~releases[:-1]
    return np.lexsort((keys, breaks.cumsum()))


def first_difference(ours: Sequence, theirs: Sequence) -> int | None:
    """The index of the first element that differs, or that only one has; None where both are equal."""
    index = equal_prefix(ours, theirs)
    return None if index == len(ours) == len(theirs) else index


def explained_by(
    without: Callable[[str], Sequence], rules: Iterable[str], theirs: Sequence, at: int | None
) -> dict[str, int | None]:
    """rule → where the first difference is without it, of those without which it comes after `at`; the furthest first.

    without: the requests of a run that leaves out the rule of this name.
    """
    found = {} if at is None else {rule: first_difference(without(rule), theirs) for rule in rules}
    later = [(rule, other) for rule, other in found.items() if other is None or other > at]
    return dict(sorted(later, key=lambda item: (item[1] is not None, -(item[1] or 0))))


def equal_prefix(a: Sequence, b: Sequence) -> int:
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
