"""A trace as PyTorch's memory snapshot: what `torch.cuda.memory._dump_snapshot` would write of the same run.

pytorch.org/memory_viz opens the file, `torch.cuda._memory_viz` reads it, and so does `trace.replay`. Source of the
format: torch/csrc/cuda/memory_snapshot.cpp, and the docstring of `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..allocator import CachingAllocator, Segment
from ..allocator_settings import AllocatorSettings
from .timeline import CATEGORIES
from .trace import Trace


def snapshot(
    trace: Trace,
    *,
    capacity_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    frames: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """The snapshot at the end of a trace, with every event until then; MemoryError where it does not fit.

    frames: entry of an allocation → its stack, innermost first, as {"name", "filename", "line"}; without them each
    says its phase and category. Times are the order of the events, one microsecond each.
    """
    allocator = CachingAllocator(capacity_bytes, settings=settings)
    stacks = frames or _Labels(trace)
    history = History(allocator)
    columns = trace.born.tolist(), trace.nbytes.tolist(), trace.stream.tolist()
    for entry, (born, nbytes, stream) in enumerate(zip(*columns, strict=True)):
        if born == entry:
            allocator.allocate(entry, nbytes, stream)
            history.allocated(entry, nbytes, stream, stacks.get(entry, []))
        else:
            allocator.free(born)
            history.freed(born)
    return contents(allocator, history)


class History:
    """What happens in an allocator, as the snapshot's events: tell it of every allocation and release.

    alive: name → (bytes asked for, stream) of what was taken before it began, of which releases are told as well.
    blocks: name → (address, bytes asked for, stream, stack) of what is alive.
    """

    def __init__(self, allocator: CachingAllocator, alive: Mapping[int, tuple[int, int]] | None = None):
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[int, tuple[int, int, int, Sequence]] = {}
        self._allocator = allocator
        allocator.driver_calls = []
        for name, (nbytes, stream) in (alive or {}).items():
            self._take(name, nbytes, stream, [])

    def allocated(self, name: int, nbytes: int, stream: int, stack: Sequence) -> None:
        """A block was taken."""
        self._driver(stack)
        if self._take(name, nbytes, stream, stack):
            self._tell("alloc", *self.blocks[name])

    def freed(self, name: int) -> None:
        """A block was released."""
        self._driver([])
        if name in self.blocks:
            address, nbytes, stream, _ = self.blocks.pop(name)
            for action in ("free_requested", "free_completed"):
                self._tell(action, address, nbytes, stream, [])

    def _take(self, name: int, nbytes: int, stream: int, stack: Sequence) -> bool:
        """Whether anything was asked for."""
        address = self._allocator.address_of(name)
        if address is None:
            return False
        self.blocks[name] = address, nbytes, stream, stack
        return True

    def _driver(self, stack: Sequence) -> None:
        for call in self._allocator.driver_calls:
            self._tell(*call, stack)
        self._allocator.driver_calls.clear()

    def _tell(self, action: str, address: int, nbytes: int, stream: int, stack: Sequence) -> None:
        self.events.append({
            "action": action, "addr": address, "size": nbytes, "stream": stream, "time_us": len(self.events),
            "pool_id": (0, 0), "frames": stack,
        })  # fmt: skip


def contents(
    allocator: CachingAllocator,
    history: History | None = None,
    *,
    alive: Mapping[int, tuple[int, int]] | None = None,
    device: int = 0,
    devices: int = 1,
) -> dict[str, Any]:
    """The snapshot of an allocator as it is now; without a history there are no events and no stacks.

    alive: as `History` takes it, where there is none.
    """
    known = {name: (0, nbytes, stream, []) for name, (nbytes, stream) in (alive or {}).items()}
    blocks, events = (known, []) if history is None else (history.blocks, history.events)
    return {
        "segments": [_segment(segment, allocator, blocks, device) for segment in allocator.segments()],
        "device_traces": [events if index == device else [] for index in range(devices)],
        "external_annotations": [],
        "allocator_settings": _settings(allocator.settings),
    }


def save(trace: Trace, path: str | Path, **options: Any) -> None:
    """Write the snapshot of a trace, see `snapshot`."""
    write(snapshot(trace, **options), path)


def write(contents: dict[str, Any], path: str | Path) -> None:
    """Write a snapshot as the pickle that pytorch.org/memory_viz opens and `torch.cuda._memory_viz` reads."""
    with open(path, "wb") as file:
        pickle.dump(contents, file)


class _Labels:
    """Stacks of one frame that say what an entry is for and when it was allocated; one list for each."""

    def __init__(self, trace: Trace):
        self.trace, self.known = trace, {}

    def get(self, entry: int, _: Any = None) -> list[dict[str, Any]]:
        span, category = int(self.trace.span[entry]), CATEGORIES[self.trace.category[entry]]
        if (span, category) not in self.known:
            phase = self.trace.names[span // 2] if span % 2 else "outside the phases"
            self.known[span, category] = [{"name": category, "filename": phase, "line": 0}]
        return self.known[span, category]


def _segment(segment: Segment, allocator: CachingAllocator, known: Mapping[int, tuple], device: int) -> dict[str, Any]:
    used = sum(piece.size for piece in segment.pieces if piece.name is not None)
    blocks = []
    for piece in segment.pieces:
        _, requested, _, stack = known.get(piece.name, (0, 0 if piece.name is None else piece.size, 0, []))
        state = "inactive" if piece.name is None else "active_allocated"
        blocks.append({
            "address": piece.address, "size": piece.size, "requested_size": requested, "state": state, "frames": stack,
        })  # fmt: skip
    return {
        "device": device, "address": segment.address, "total_size": segment.size, "allocated_size": used,
        "active_size": used, "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": segment.stream, "segment_type": "small" if segment.small else "large", "segment_pool_id": (0, 0),
        "is_expandable": allocator.expandable_segments, "frames": [], "blocks": blocks,
    }  # fmt: skip


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    divisions = settings.roundup_power2_divisions or (0,) * 16
    return {
        "max_split_size": settings.max_split_size or -1,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << n): value for n, value in enumerate(divisions)},
    }
