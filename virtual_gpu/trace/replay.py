"""Real allocation histories, replayed: does our allocator put every block where the card's put it?

Two forms are read: the reduced one of published traces (JSON, gzipped or not: {"devices": [{"device",
"initial_segments", "initial_blocks", "events", "final_segments"}]}), and PyTorch's own snapshot
(`torch.cuda.memory._dump_snapshot`), a pickle, which is read without letting it name any class or function.
"""

from __future__ import annotations

import bisect
import gzip
import io
import json
import pickle
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..allocator import SMALL_BYTES, CachingAllocator, Piece, Segment, round_size
from ..allocator_settings import AllocatorSettings
from ..errors import WrongValue
from ..language import tr
from .timeline import CATEGORIES
from .trace import Trace

LARGEST_FILE = 512 * 2**20  # bytes, also of what a gzipped file unpacks to
# Of the reduced form, in the order of its codes, named as torch/cuda/_memory_viz.py has them.
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot",
)  # fmt: skip


class _Plain(pickle.Unpickler):
    """A pickle of dicts, lists, strings and numbers; one that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise _unreadable(f"{module}.{name}")


@dataclass(frozen=True)
class History:
    """What one GPU was asked for, and what it held before and after.

    before: its segments at the start; None where the history begins with an empty allocator. events: (action, address,
    bytes, stream) in their order; after: address → (bytes, stream, blocks in use: address → bytes) of the segments.
    """

    device: int
    settings: AllocatorSettings
    before: list[Segment]
    events: list[tuple[str, int, int, int]]
    after: dict[int, tuple[int, int, dict[int, int]]]

    def trace(self) -> Trace:
        """As a `Trace` of one phase, "recorded": bytes of blocks (rounded to 512), category unknown ("activations")."""
        born: dict[int, int] = {}
        rows: list[tuple[int, int, int]] = []  # entry of its birth, bytes, stream
        for segment in self.before:
            for piece in segment.pieces:
                if piece.name is not None:
                    born[piece.address] = len(rows)
                    rows.append((len(rows), piece.size, segment.stream))
        start, streams = len(rows), {}
        for action, address, nbytes, stream in self.events:
            if action == "alloc":
                born[address] = len(rows)
                rows.append((len(rows), round_size(nbytes), stream))
            elif action == "free_completed":
                birth = born.pop(address)
                rows.append((birth, *rows[birth][1:]))
        births, nbytes, stream = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        streams = {one: n for n, one in enumerate([0, *sorted({*stream.tolist()} - {0})])}
        span = (np.arange(len(rows)) >= start).astype(np.int64)
        category = np.full(len(rows), CATEGORIES.index("activations"))
        numbers = np.array([streams[one] for one in stream.tolist()], dtype=np.int64)
        return Trace(births, nbytes, category, span, ("recorded",), stream=numbers)


@dataclass
class Replay:
    """How far our allocator agrees with a card: requests and driver calls, and how many of each are equal.

    first_difference: (event, what the card did, what we did), the first of all. end and card_end: (allocated, reserved)
    bytes. same_end: whether every segment and every block in use lies where it lies on the card.
    """

    device: int
    requests: int = 0
    equal: int = 0
    driver_calls: Counter = field(default_factory=Counter)
    equal_driver_calls: Counter = field(default_factory=Counter)
    first_difference: tuple[int, Any, Any] | None = None
    end: tuple[int, int] = (0, 0)
    card_end: tuple[int, int] = (0, 0)
    peak_reserved_bytes: int = 0
    same_end: bool = False

    @property
    def exact(self) -> bool:
        """Whether all of it is equal."""
        return self.first_difference is None and self.same_end

    def differs(self, event: int, card: Any, ours: Any) -> None:
        """Take a difference down."""
        self.first_difference = self.first_difference or (event, card, ours)


def replay(path: str | Path) -> list[Replay]:
    """Every GPU of a recorded file, replayed. ValueError for a file that cannot be read as one of the two forms."""
    return [replayed(history) for history in read_histories(path)]


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
                raise ValueError(tr(
                    ko=f"{address:#x}: 기록에 없는 블록을 돌려준다. 기록이 처음까지 닿지 않는다.",
                    en=f"{address:#x} is released and was never allocated: the history does not reach back.",
                ))  # fmt: skip
            allocator.free(name)
        if action in ("alloc", "segment_free", "segment_unmap"):
            _compare(found, index, expected, calls)
    found.end = allocator.allocated_bytes, allocator.reserved_bytes
    blocks = sum(sum(used.values()) for _, _, used in history.after.values())
    found.card_end = blocks, sum(total for total, _, _ in history.after.values())
    found.peak_reserved_bytes = allocator.peak_reserved_bytes
    ours = {
        s.address: (s.size, s.stream, {p.address: p.size for p in s.pieces if p.name is not None})
        for s in allocator.segments()
    }
    found.same_end = ours == history.after
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


# -- reading -------------------------------------------------------------------------------------------------------


def read_histories(path: str | Path) -> list[History]:
    """The histories of every GPU in a file: the reduced JSON, or PyTorch's snapshot pickle."""
    data = _bytes(Path(path))
    try:
        if data[:1] in (b"{", b"["):
            return [
                _reduced(device, found.get("allocator_settings"))
                for found in [json.loads(data)]
                for device in found["devices"]
            ]
        return _snapshot(_Plain(io.BytesIO(data)).load())
    except (
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        EOFError,
        pickle.UnpicklingError,
        json.JSONDecodeError,
    ) as error:
        raise _unreadable(f"{type(error).__name__}: {error}") from error


def _bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if zipped else open(path, "rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise _unreadable(f"> {LARGEST_FILE} bytes")
    return data


def _reduced(device: dict[str, Any], settings: dict[str, Any] | None) -> History:
    blocks = sorted((address, size) for address, size, _ in device["initial_blocks"] or ())
    before = [
        _segment(address, total, stream, pool, blocks)
        for address, total, stream, pool in device["initial_segments"] or ()
    ]
    events = [(ACTIONS[code], address, size, stream) for code, address, size, stream, *_ in device["events"]]
    after = {
        address: (total, stream, {a: size for a, size, _, state in blocks if state.startswith("active")})
        for address, total, stream, _, blocks in device["final_segments"]
    }
    return History(device["device"], AllocatorSettings.from_snapshot(settings), before, events, after)


def _segment(address: int, total: int, stream: int, pool: str, blocks: list[tuple[int, int]]) -> Segment:
    """A segment with its blocks in use (address, bytes), and the free ones between them."""
    pieces, end = [], address
    for start, size in blocks[bisect.bisect_left(blocks, (address,)) : bisect.bisect_left(blocks, (address + total,))]:
        if start > end:
            pieces.append(Piece(end, start - end, None))
        pieces.append(Piece(start, size, start))
        end = start + size
    if end < address + total:
        pieces.append(Piece(end, address + total - end, None))
    return Segment(stream, pool == "small", pieces)


def _snapshot(found: dict[str, Any]) -> list[History]:
    """PyTorch's snapshot: the state at its end, and the events; the state before is what the events lead back to."""
    settings = AllocatorSettings.from_snapshot(found.get("allocator_settings"))
    histories = []
    for device, trace in enumerate(found["device_traces"]):
        events = [
            (e["action"], e.get("addr", e.get("device_free", 0)), e["size"], e["stream"])
            for e in trace
            if e["action"] in ACTIONS
        ]
        after, live, segments = {}, {}, {}
        for s in found["segments"]:
            if s.get("device", 0) != device:
                continue
            address, used = s["address"], {}
            for block in s["blocks"]:
                if block["state"].startswith("active"):
                    used[address] = block["size"]
                address += block["size"]
            after[s["address"]] = s["total_size"], s["stream"], used
            segments[s["address"]] = s["total_size"], s["stream"], s["segment_type"]
            live |= used
        histories.append(History(device, settings, _before(events, dict(live), segments), events, after))
    return histories


def _before(events: list, live: dict[int, int], segments: dict[int, tuple[int, int, str]]) -> list[Segment]:
    """The segments before the first event, from those after the last: every event undone, backwards."""
    for action, address, nbytes, stream in reversed(events):
        if action == "alloc":
            live.pop(address)
        elif action == "free_completed":
            live[address] = round_size(nbytes)
        elif action == "segment_alloc":
            segments.pop(address)
        elif action == "segment_free":
            segments[address] = nbytes, stream, "small" if nbytes <= 2 * SMALL_BYTES else "large"
        elif action in ("segment_map", "segment_unmap"):
            # Expandable segments merge and split as they are mapped: only a history from their beginning is replayed.
            segments.pop(address, None)
    if not live:
        return []
    if any(event[0] == "segment_map" for event in events):
        raise _unreadable(
            tr(ko="확장 세그먼트의 기록이 처음부터 있지 않다", en="expandable segments, not from their start")
        )
    blocks = sorted(live.items())
    found = [_segment(address, total, stream, pool, blocks) for address, (total, stream, pool) in segments.items()]
    return [_with_rests(segment) for segment in found]


def _with_rests(segment: Segment) -> Segment:
    """A rest of up to 1 MiB behind a large block was not split off (should_split): it is part of the block."""
    pieces: list[Piece] = []
    for piece in segment.pieces:
        last = pieces[-1] if pieces else None
        if not segment.small and last is not None and piece.name is None and piece.size <= SMALL_BYTES:
            pieces[-1] = Piece(last.address, last.size + piece.size, last.name)
        else:
            pieces.append(piece)
    return Segment(segment.stream, segment.small, pieces)


def _unreadable(why: str) -> WrongValue:
    return WrongValue(
        tr(ko=f"메모리 기록으로 읽을 수 없다: {why}", en=f"This cannot be read as an allocation history: {why}")
    )
