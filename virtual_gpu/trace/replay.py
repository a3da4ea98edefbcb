"""Real allocation histories, replayed: does our allocator put every block where the card's put it?"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..allocator import SMALL_BYTES, CachingAllocator, round_size
from ..errors import WrongValue
from ..interrupts import interrupts_heard
from ..language import tr
from .histories import WRONG_FORM, History, read_histories, unreadable


@dataclass
class Replay:
    """How far our allocator agrees with a card: requests and driver calls, and how many of each are equal.

    equal: requests whose block lies at the card's address. first_difference: (event, what the card did, what we did),
    the first of all. start, end and card_end: (allocated, reserved) bytes. segments: of our allocator at the end,
    address → (bytes, stream, blocks in use: address → bytes). same_end: whether every segment and every block in use
    lies where it lies on the card. peaks in bytes, of our allocator.
    """

    device: int
    requests: int = 0
    equal: int = 0
    driver_calls: Counter = field(default_factory=Counter)
    equal_driver_calls: Counter = field(default_factory=Counter)
    first_difference: tuple[int, Any, Any] | None = None
    start: tuple[int, int] = (0, 0)
    end: tuple[int, int] = (0, 0)
    card_end: tuple[int, int] = (0, 0)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    segments: dict[int, tuple[int, int, dict[int, int]]] = field(default_factory=dict)
    same_end: bool = False

    @property
    def exact(self) -> bool:
        """Whether all of it is equal."""
        return self.first_difference is None and self.same_end

    def text(self) -> str:
        """What is compared, a line each."""
        calls = ", ".join(
            f"{name} {self.equal_driver_calls[name]:,}/{count:,}" for name, count in self.driver_calls.items()
        )
        (allocated, reserved), (card_allocated, card_reserved) = self.end, self.card_end
        lines = [
            tr(
                ko=f"GPU {self.device}: 요청 {self.requests:,}개 가운데 {self.equal:,}개가 카드와 같은 주소다.",
                en=f"GPU {self.device}: {self.equal:,} of {self.requests:,} requests lie at the card's address.",
            ),
            tr(ko=f"드라이버 호출: {calls}", en=f"calls of the driver: {calls}"),
            tr(
                ko=f"끝: 할당 {allocated:,}, 예약 {reserved:,}바이트 (카드 {card_allocated:,}, {card_reserved:,})",
                en=f"end: {allocated:,} bytes allocated, {reserved:,} reserved (card: {card_allocated:,}, "
                f"{card_reserved:,})",
            ),
        ]
        if self.first_difference is not None:
            event, card, ours = self.first_difference
            lines.append(
                tr(
                    ko=f"처음 달라지는 곳: 사건 {event}, 카드 {card}, 여기 {ours}",
                    en=f"first difference: event {event}, on the card {card}, here {ours}",
                )
            )
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "device": self.device, "requests": self.requests, "equal": self.equal, "exact": self.exact,
            "driver_calls": dict(self.driver_calls), "equal_driver_calls": dict(self.equal_driver_calls),
            "start": self.start, "end": self.end, "card_end": self.card_end, "same_end": self.same_end,
            "peak_allocated_bytes": self.peak_allocated_bytes, "peak_reserved_bytes": self.peak_reserved_bytes,
            "segments": [[address, size, stream] for address, (size, stream, _) in sorted(self.segments.items())],
        }  # fmt: skip

    def differs(self, event: int, card: Any, ours: Any) -> None:
        """Take a difference down."""
        self.first_difference = self.first_difference or (event, card, ours)


class Replays(list[Replay]):
    """The GPUs of a recorded file, and what holds for all of them: requests, equal and end are sums."""

    @property
    def requests(self) -> int:
        """Requests, of all GPUs."""
        return sum(gpu.requests for gpu in self)

    @property
    def equal(self) -> int:
        """Requests whose block lies at the card's address."""
        return sum(gpu.equal for gpu in self)

    @property
    def exact(self) -> bool:
        """Whether all of it is equal."""
        return all(gpu.exact for gpu in self)

    @property
    def same_end(self) -> bool:
        """Whether every segment and every block in use lies where it lies on the card at the end."""
        return all(gpu.same_end for gpu in self)

    @property
    def segments(self) -> dict[int, tuple[int, int, dict[int, int]]]:
        """At the end, as `Replay.segments`; one process has its addresses once for all GPUs."""
        return {address: segment for gpu in self for address, segment in gpu.segments.items()}

    @property
    def end(self) -> tuple[int, int]:
        """(allocated, reserved) bytes at the end."""
        return sum(gpu.end[0] for gpu in self), sum(gpu.end[1] for gpu in self)


@interrupts_heard()
def replay(path: str | Path) -> Replays:
    """Every GPU of a recorded file, replayed: PyTorch's own snapshot, or a published trace in the reduced form.

    The file is read without letting it name any class or function; WrongValue for one that cannot be read, or whose
    history does not reach back to where its blocks were allocated.
    """
    histories = read_histories(path)
    try:
        return Replays(replayed(history) for history in histories)
    except WrongValue:
        raise
    except WRONG_FORM as error:  # events that contradict each other
        raise unreadable(f"{type(error).__name__}: {str(error)[:200]}") from error


def replayed(history: History) -> Replay:
    """Every request of a history, given to our allocator; where its driver puts segments is taken from the history.

    What is replayed is what the program asked for and gave back, and when cached segments went back to the driver (on
    the card that depends on memory outside PyTorch, and on calls of `empty_cache`). Which block serves a request, when
    the driver is asked and for how much, our allocator decides.
    """
    found = Replay(history.device)
    ahead = {  # addresses in the order in which the driver gave them
        "segment_alloc": deque(e[1] for e in history.events if e[0] == "segment_alloc"),
        "segment_map": _bases(history),
    }
    kind = "segment_map" if history.settings.expandable_segments else "segment_alloc"

    def place(nbytes: int) -> int:
        if not ahead[kind]:
            found.differs(index, None, ("segment", nbytes))
            return 2**62 + sum(found.driver_calls.values()) * 2**40
        return ahead[kind].popleft()

    calls: list[tuple[str, int, int, int]] = []
    allocator = CachingAllocator(settings=history.settings, place=place, driver_calls=calls)
    allocator.restore(history.before)
    found.start = allocator.allocated_bytes, allocator.reserved_bytes
    allocator.reset_peaks()
    expected: list[tuple[str, int, int, int]] = []
    named = {
        piece.address: piece.name for segment in history.before for piece in segment.pieces if piece.name is not None
    }
    for index, (action, address, nbytes, stream) in enumerate(history.events):
        if action in ("segment_alloc", "segment_map"):
            expected.append((action, address, nbytes, stream))
        elif action in ("segment_free", "segment_unmap"):
            expected.append((action, address, nbytes, stream))
            allocator.release(address)
        elif action == "alloc":
            found.requests += 1
            named[address] = name = len(history.before) * 10**9 + index
            allocator.allocate(name, nbytes, stream)
            ours = allocator.address_of(name)
            found.equal += ours == address
            if ours != address:
                found.differs(index, address, ours)
        elif action == "free_completed":
            name = named.pop(address, None)
            if name is None:
                raise unreadable(tr(
                    ko=f"{address:#x}: 기록에 없는 블록을 돌려준다. 기록이 처음까지 닿지 않는다.",
                    en=f"{address:#x} is released and was never allocated: the history does not reach back.",
                ))  # fmt: skip
            allocator.free(name)
        if action in ("alloc", "segment_free", "segment_unmap"):
            _compare(found, index, expected, calls)
    found.end = allocator.allocated_bytes, allocator.reserved_bytes
    blocks = sum(sum(used.values()) for _, _, used in history.after.values())
    found.card_end = blocks, sum(total for total, _, _ in history.after.values())
    found.peak_allocated_bytes = allocator.peak_allocated_bytes
    found.peak_reserved_bytes = allocator.peak_reserved_bytes
    found.segments = {
        s.address: (s.size, s.stream, {p.address: p.size for p in s.pieces if p.name is not None})
        for s in allocator.segments()
    }
    found.same_end = found.segments == history.after
    return found


def _compare(found: Replay, index: int, expected: list, calls: list) -> None:
    """The driver calls since the last comparison, those of the card and ours, in any order."""
    for call in expected:
        found.driver_calls[call[0]] += 1
        found.equal_driver_calls[call[0]] += call in calls
    if sorted(expected) != sorted(calls):
        found.differs(index, tuple(expected), tuple(calls))
    expected.clear()
    calls.clear()


def _bases(history: History) -> deque[int]:
    """Where each expandable segment begins: the first page that is mapped for a pool."""
    bases, pools, page = deque(), set(), None
    for action, address, nbytes, stream in history.events:
        if action == "segment_map" and page is None:
            page = address
        elif action == "alloc" and page is not None:
            pool = stream, round_size(nbytes) <= SMALL_BYTES
            if pool not in pools:
                pools.add(pool)
                bases.append(page)
            page = None
    return bases
