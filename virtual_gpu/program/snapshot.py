"""PyTorch's memory snapshot of a run: what `torch.cuda.memory._snapshot()` gives and pytorch.org/memory_viz opens."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from ._core import SMALL_BYTES


def snapshot(gpu: Any) -> dict[str, Any]:
    """Segments with their blocks now, and where the run is watched every allocation and release until now.

    Frames are there where the watch keeps stacks. Times are the order of the events, one microsecond each.
    """
    frames = _frames()
    watch, allocator = gpu.watch, gpu.meter.allocator
    blocks = {} if watch is None else watch.blocks
    segments = []
    for pieces in allocator.segments():
        total = sum(piece.size for piece in pieces)
        used = sum(piece.size for piece in pieces if piece.name is not None)
        segments.append(
            {
                "device": gpu.index, "address": pieces[0].address, "total_size": total, "allocated_size": used,
                "active_size": used, "requested_size": used, "stream": 0, "segment_pool_id": (0, 0), "frames": [],
                "segment_type": "small" if total <= 2 * SMALL_BYTES else "large",
                "is_expandable": allocator.expandable_segments,
                "blocks": [
                    {
                        "address": piece.address, "size": piece.size, "requested_size": piece.size,
                        "state": "inactive" if piece.name is None else "active_allocated",
                        "frames": frames(blocks[piece.name].stack) if piece.name in blocks else [],
                    }
                    for piece in pieces
                ],
            }
        )  # fmt: skip
    return {
        "segments": segments,
        "device_traces": [_trace(watch, frames) if index == gpu.index else [] for index in range(gpu.count)],
        "external_annotations": [],
        "allocator_settings": {"expandable_segments": allocator.expandable_segments},
    }


def save(gpu: Any, path: str | Path) -> None:
    """Write the snapshot as a pickle, which memory_viz opens and `torch.cuda._memory_viz` reads."""
    with open(path, "wb") as file:
        pickle.dump(snapshot(gpu), file)


def _trace(watch: Any, frames: Callable) -> list[dict[str, Any]]:
    entries = []
    for time, event in enumerate(watch.events if watch is not None else ()):
        block = watch.blocks[abs(event)]
        entry = {"addr": block.address, "size": block.nbytes, "stream": 0, "time_us": time, "pool_id": (0, 0)}
        if event > 0:
            entries.append({"action": "alloc", "frames": frames(block.stack), **entry})
        else:
            entries.append({"action": "free_requested", "frames": [], **entry})
            entries.append({"action": "free_completed", "frames": [], **entry})
    return entries


def _frames() -> Callable[[tuple[tuple[CodeType, int], ...]], list[dict[str, Any]]]:
    """Stacks as the format has them; one list for each stack, however often it comes."""
    known: dict[tuple, list[dict[str, Any]]] = {}

    def frames(stack: tuple[tuple[CodeType, int], ...]) -> list[dict[str, Any]]:
        if stack not in known:
            known[stack] = [
                {"name": code.co_qualname, "filename": code.co_filename, "line": line} for code, line in stack
            ]
        return known[stack]

    return frames
