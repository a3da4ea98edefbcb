"""Allocation histories that real GPUs recorded, read from files; a file is data, and names no class or function.

Two forms are read: the reduced one of published traces (JSON, gzipped or not: {"devices": [{"device",
"initial_segments", "initial_blocks", "events", "final_segments"}]}), and PyTorch's own snapshot
(`torch.cuda.memory._dump_snapshot`), a pickle.
"""

from __future__ import annotations

import bisect
import io
import json
import pickle
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..allocator import SMALL_BYTES, Piece, Segment, round_size
from ..allocator_settings import AllocatorSettings
from ..errors import WrongValue
from ..language import tr
from ..units import path_of
from .timeline import CATEGORIES
from .trace import Trace

LARGEST_FILE = 512 * 2**20  # bytes, also of what a gzipped file unpacks to
MOST_BYTES = 2**50  # of a block, and of an address 2**63: more is no memory
_FRAMES = 4  # so many of an allocation's frames are told
_GROWS = 64  # bytes of Python objects for a byte of a pickle: an empty list is one byte there and 56 here
# What reading a file of another form, a broken or a hostile one raises.
WRONG_FORM = (
    LookupError, TypeError, AttributeError, ValueError, EOFError, ArithmeticError, RecursionError, MemoryError,
    pickle.UnpicklingError,
)  # fmt: skip
# Of the reduced form, in the order of its codes, named as torch/cuda/_memory_viz.py has them.
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot",
)  # fmt: skip


@dataclass(frozen=True)
class History:
    """What one GPU was asked for, and what it held before and after.

    before: its segments at the start; None where the history begins with an empty allocator. events: (action, address,
    bytes, stream) in their order; after: address → (bytes, stream, blocks in use: address → bytes) of the segments.
    frames: beside each event the innermost Python frames that asked for it, "" where the file does not say.
    """

    device: int
    settings: AllocatorSettings
    before: list[Segment]
    events: list[tuple[str, int, int, int]]
    after: dict[int, tuple[int, int, dict[int, int]]]
    frames: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        pieces = [(p.address, p.size, s.stream) for s in self.before for p in s.pieces]
        used = [(a, n, stream) for _, stream, blocks in self.after.values() for a, n in blocks.items()]
        ends = [(address, nbytes, stream) for address, (nbytes, stream, _) in self.after.items()]
        for address, nbytes, stream in (*pieces, *(event[1:] for event in self.events), *used, *ends):
            whole = type(address) is type(nbytes) is type(stream) is int
            if not (whole and 0 <= address < 2**63 and 0 <= nbytes < MOST_BYTES and 0 <= stream < 2**63):
                raise unreadable(f"{address!r:.40}, {nbytes!r:.40}, {stream!r:.40}")

    def trace(self) -> Trace:
        """As a `Trace` of one phase, "recorded": bytes of blocks (rounded to 512), category unknown ("activations")."""
        born: dict[int, int] = {}
        rows: list[tuple[int, int, int]] = []  # entry of its birth, bytes, stream
        for address, nbytes, stream in self._there():
            born[address] = len(rows)
            rows.append((len(rows), nbytes, stream))
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

    def places(self) -> list[str]:
        """For each entry of `trace` the frames that asked for its block, "" where the file does not say."""
        asked = {address: "" for address, _, _ in self._there()}
        told = list(asked.values())
        for (action, address, _, _), frames in zip(self.events, self.frames or [""] * len(self.events), strict=True):
            if action == "alloc":
                asked[address] = frames
                told.append(frames)
            elif action == "free_completed":
                told.append(asked.pop(address))
        return told

    def _there(self) -> Iterator[tuple[int, int, int]]:
        """(address, bytes, stream) of each block that was there; of one that goes, as many as were asked for."""
        gone: dict[int, int] = {}
        for action, address, nbytes, _ in self.events:
            if action in ("alloc", "free_completed"):
                gone.setdefault(address, round_size(nbytes) if action == "free_completed" else 0)
        for segment in self.before:
            for piece in segment.pieces:
                if piece.name is not None:
                    yield piece.address, gone.get(piece.address) or piece.size, segment.stream


class Plain(pickle.Unpickler):
    """A pickle of dicts, lists, strings and numbers; one that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise unreadable(f"{module}.{name}")


def read_histories(path: str | Path) -> list[History]:
    """The histories of every GPU in a file: the reduced JSON, or PyTorch's snapshot pickle.

    WrongValue for a file that is not there or is none of the two.
    """
    data = _bytes(path_of(path))
    try:
        if data[:1] in (b"{", b"["):
            return [
                _reduced(device, found.get("allocator_settings"), found.get("labels") or ())
                for found in [json.loads(data)]
                for device in found["devices"]
            ]
        with _room_for(len(data)), _nothing_told():
            found = Plain(io.BytesIO(data)).load()
        return _snapshot(found)
    except WrongValue:  # says already what cannot be read
        raise
    except WRONG_FORM as error:
        raise unreadable(f"{type(error).__name__}: {str(error)[:200]}") from error


@contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """In this block the process may grow by what a pickle of so many bytes can need; a request for more fails.

    A few bytes can ask Python's unpickler for a table of 64 GiB, which Linux would grant and then end the process for.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):  # Windows grants no memory that it does not have
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + _GROWS * nbytes + 2**30
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _nothing_told() -> Iterator[None]:
    """In this block errors are raised and not printed.

    Where there is no room for a bytearray, CPython (seen in 3.11.7) takes the half-made one for one that is in use, and
    prints a SystemError of its own before it raises the MemoryError.
    """
    before, sys.excepthook = sys.excepthook, lambda *_: None
    try:
        yield
    finally:
        sys.excepthook = before


def _bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if data[:2] == b"\x1f\x8b" and len(data) <= LARGEST_FILE:
            data = _unzipped(data)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: NUL in the name
        raise unreadable(f"{str(path)!r:.300}: {error}") from error
    if len(data) > LARGEST_FILE:
        raise unreadable(f"> {LARGEST_FILE} bytes")
    return data


def _unzipped(data: bytes) -> bytes:
    """What gzip packed, of more than LARGEST_FILE bytes the first. EOFError where it breaks off.

    Not by `gzip.open`: C reads it through Python there, and drops a Ctrl+C that comes while it opens or closes it.
    """
    found = b""
    while data and len(found) <= LARGEST_FILE:  # one part after another, as gzip appends them
        part = zlib.decompressobj(wbits=31)
        found += part.decompress(data, LARGEST_FILE + 1 - len(found))
        if not part.eof and len(found) <= LARGEST_FILE:
            raise EOFError("it ends in the middle")
        data = part.unused_data.lstrip(b"\0")
    return found


def _reduced(device: dict[str, Any], settings: dict[str, Any] | None, labels: Sequence[str]) -> History:
    blocks = sorted((address, size) for address, size, _ in device["initial_blocks"] or ())
    before = [
        _segment(address, total, stream, pool, blocks)
        for address, total, stream, pool in device["initial_segments"] or ()
    ]
    events = [(ACTIONS[code], address, size, stream) for code, address, size, stream, *_ in device["events"]]
    frames = [
        str(labels[label[0]]) if code == 0 and label and labels else "" for code, _, _, _, *label in device["events"]
    ]
    after = {
        address: (total, stream, {a: size for a, size, _, state in blocks if state.startswith("active")})
        for address, total, stream, _, blocks in device["final_segments"]
    }
    return History(device["device"], AllocatorSettings.from_snapshot(settings), before, events, after, frames)


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
        known = [e for e in trace if e["action"] in ACTIONS]
        events = [(e["action"], e.get("addr", e.get("device_free", 0)), e["size"], e["stream"]) for e in known]
        frames = [_frames(e.get("frames") or ()) if e["action"] == "alloc" else "" for e in known]
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
        histories.append(History(device, settings, _before(events, dict(live), segments), events, after, frames))
    return histories


def _frames(stack: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frames of Python in one line, without those in which a module only calls another's forward."""
    told = []
    for frame in stack:
        file = str(frame["filename"]).replace("\\", "/")
        if file.endswith(".py") and not file.endswith("nn/modules/module.py"):
            told.append(f"{file.rpartition('/')[2]}:{frame['line']} {frame['name']}")
        if len(told) == _FRAMES:
            break
    return " < ".join(told)


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
        raise unreadable(
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


def unreadable(why: str) -> WrongValue:
    return WrongValue(
        tr(ko=f"메모리 기록으로 읽을 수 없다: {why}", en=f"This cannot be read as an allocation history: {why}")
    )
