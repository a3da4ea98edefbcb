"""The allocations of a run on a real GPU beside the virtual ones: where they first differ, and which operation did it.

The real side is what `torch.cuda.memory._snapshot()` says of a run under `_record_memory_history` (its docstring, and
torch/cuda/_memory_viz.py, describe the format): a list of events in their order, frames innermost first. Nothing here
needs a GPU; what was recorded on one is read as plain dicts.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import ROOT
from virtual_gpu.allocator import CachingAllocator, round_size
from virtual_gpu.trace.compare import align, equal_prefix, sorted_releases
from virtual_gpu.trace.histories import ACTIONS
from virtual_gpu.trace.timeline import CATEGORIES
from virtual_gpu.trace.trace import Trace

FRAMES = 6  # so many of the innermost frames are kept of an allocation
GROUPS = 12  # so many kinds of differences are kept, those of most bytes
AROUND = 3  # so many entries are shown on either side of the first difference
NO_FRAMES = "no Python frame (backward runs in a thread of autograd)"
CODES = {action: code for code, action in enumerate(ACTIONS)}
# Of the entries at the first difference: has the virtual one no counterpart, has the real one none?
KINDS = {
    (True, True): "another size",
    (True, False): "virtual has one more",
    (False, True): "real has one more",
    (False, False): "released at another place",
}


@dataclass(frozen=True)
class RealTrace:
    """A recorded run as a `Trace` (category and phases are not known: all "activations" of one phase "training").

    frames: for each entry those of its allocation, innermost first; empty for what was there before.
    """

    trace: Trace
    frames: list[list[dict[str, Any]]]


def read_history(before: dict[str, Any], after: dict[str, Any], device: int = 0) -> RealTrace:
    """The run between two snapshots, recorded from the first on. Sizes in bytes, rounded up to the allocator's blocks.

    An event says the bytes that were asked for. A block is released where "free_requested" stands: there
    `memory_allocated` falls ("free_completed" comes later where another stream still uses the block, and only says when
    its place can be taken again). ValueError where the history does not reach back to the first snapshot: it keeps the
    last `max_entries` events.
    """
    born: dict[int, int] = {}  # address → the number of the block that lies there
    sizes: list[int] = []
    frames: list[list[dict[str, Any]]] = []
    events: list[int] = []  # +block: allocated, ~block: released

    def allocate(address: int, nbytes: int, where: list[dict[str, Any]]) -> None:
        if address in born:
            raise ValueError(f"two blocks at address {address:#x}: events of the allocation history are missing")
        born[address] = len(sizes)
        events.append(len(sizes))
        sizes.append(round_size(nbytes))
        frames.append(where)

    for segment in before["segments"]:
        if segment.get("device", device) == device:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    allocate(block.get("address", address), block.get("requested_size", block["size"]), [])
                address += block["size"]
    start = len(events)
    for event in after["device_traces"][device]:
        if event["action"] == "alloc":
            allocate(event["addr"], event["size"], event.get("frames", []))
        elif event["action"] == "free_requested":
            if event["addr"] not in born:
                raise ValueError(f"a release of unknown address {event['addr']:#x}: the history does not reach back")
            events.append(~born.pop(event["addr"]))
    blocks = np.array([event if event >= 0 else ~event for event in events], dtype=np.int64)
    releases = np.array(events, dtype=np.int64) < 0
    order = sorted_releases(blocks, releases)
    blocks, releases = blocks[order], releases[order]
    births = np.zeros(len(sizes), dtype=np.int64)
    births[blocks[~releases]] = np.flatnonzero(~releases)
    span = (np.arange(len(events)) >= start).astype(np.int64)
    category = np.full(len(events), CATEGORIES.index("activations"))
    nbytes = np.array(sizes, dtype=np.int64)[blocks]
    trace = Trace(births[blocks], nbytes, category, span, ("training",))
    return RealTrace(trace, [frames[block] for block in blocks.tolist()])


def reduced(before: dict[str, Any], after: dict[str, Any], device: int = 0) -> dict[str, Any]:
    """The run between two snapshots as a JSON object that `virtual_gpu.replay` and `read_histories` read.

    What was there before, every event in its order with the operation of an allocation, what is there after.
    """
    labels: dict[str, int] = {}
    events = []
    for event in after["device_traces"][device]:
        if event["action"] in CODES:
            address = event.get("addr", event.get("device_free", 0))
            entry = [CODES[event["action"]], address, event["size"], event["stream"]]
            if event["action"] in ("alloc", "oom"):
                entry.append(labels.setdefault(operation(event.get("frames", [])), len(labels)))
            events.append(entry)
    start = _segments(before, device)
    return {
        "allocator_settings": after.get("allocator_settings"),
        "labels": list(labels),
        "devices": [
            {
                "device": device,
                "initial_segments": [segment[:4] for segment in start],
                "initial_blocks": [
                    block[:3] for segment in start for block in segment[4] if block[3].startswith("active")
                ],
                "events": events,
                "final_segments": _segments(after, device),
            }
        ],
    }


def keep(path: str | Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Write `reduced` to a gzipped file; its folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(reduced(before, after), file, separators=(",", ":"))


def _segments(found: dict[str, Any], device: int) -> list[list[Any]]:
    segments = []
    for segment in found["segments"]:
        if segment.get("device", device) == device:
            address, blocks = segment["address"], []
            for block in segment["blocks"]:
                blocks.append([address, block["size"], block.get("requested_size", block["size"]), block["state"]])
                address += block["size"]
            told = (segment["address"], segment["total_size"], segment["stream"], segment["segment_type"])
            segments.append([*told, blocks])
    return segments


def compare(virtual: Trace, real: RealTrace) -> dict[str, Any]:
    """Both runs from the start of the training on, as a JSON object; bytes throughout.

    Entries are +bytes for an allocation, -bytes for a release. equal_prefix: so many are equal from the start on.
    first_difference: what stands there on either side (None: it has ended), what kind of difference it is (KINDS), and
    which operation allocated the real block; the virtual side knows no operation, so where it has one more,
    `operation_before` and `operation_after` are what the real side did around.
    differing_allocations: those without a counterpart in the shortest alignment of the allocations.
    released_elsewhere: those with one that is released between other allocations (equal sizes may change places).
    at_peak: `difference` is real less virtual, `explained` of it are allocations that only one side has and holds at
    its peak; the rest is held longer or shorter, or the peak lies elsewhere.
    """
    ours, theirs = _Side(virtual), _Side(real.trace)
    pairs, shortest = align(ours.sizes.tolist(), theirs.sizes.tolist())
    matched_ours, matched_theirs = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    only_ours = np.setdiff1d(np.arange(len(ours.sizes)), matched_ours)
    only_theirs = np.setdiff1d(np.arange(len(theirs.sizes)), matched_theirs)
    peaks = virtual.peak_bytes, real.trace.peak_bytes
    held = int(theirs.held_at_peak(only_theirs)), int(ours.held_at_peak(only_ours))
    # The phase of an allocation that only the real side has is that of the last matched one before it.
    neighbour = np.searchsorted(matched_theirs, only_theirs) - 1
    spans = [int(ours.span[matched_ours[place]]) if place >= 0 else 1 for place in neighbour]
    return {
        "virtual_entries": len(ours.signed),
        "real_entries": len(theirs.signed),
        "at_start": {"virtual_bytes": ours.start_bytes, "real_bytes": theirs.start_bytes},
        "equal_prefix": equal_prefix(ours.signed, theirs.signed),
        "first_difference": _first_difference(virtual, ours, only_ours, real, theirs, only_theirs),
        "differing_allocations": {"virtual_only": len(only_ours), "real_only": len(only_theirs), "shortest": shortest},
        "released_elsewhere": _released_elsewhere(ours, theirs, matched_ours, matched_theirs),
        "real_only": _groups(
            (phase_label(virtual, span), int(theirs.sizes[index]), operation(real.frames[theirs.births[index]]))
            for index, span in zip(only_theirs, spans, strict=True)
        ),
        "virtual_only": _groups(
            (phase_label(virtual, int(ours.span[index])), int(ours.sizes[index]), None) for index in only_ours
        ),
        "at_peak": {
            "virtual_bytes": peaks[0],
            "real_bytes": peaks[1],
            "difference": peaks[1] - peaks[0],
            "real_only": held[0],
            "virtual_only": held[1],
            "explained": held[0] - held[1],
        },
        # What our rules of the allocator make of the real allocations: beside the measured one it judges them alone.
        "replayed_reserved_bytes": real.trace.reserved_peak(),
    }


def text(found: dict[str, Any]) -> str:
    """The comparison in a few lines."""
    if "error" in found:
        return f"allocations not compared: {found['error']}"
    first, differing, peak = found["first_difference"], found["differing_allocations"], found["at_peak"]
    entries = f"of {found['virtual_entries']:,} virtual and {found['real_entries']:,} real entries"
    if first is None:
        lines = [f"allocations: all {found['real_entries']:,} entries are equal"]
    else:
        lines = [
            f"allocations: {found['equal_prefix']:,} {entries} are equal from the start; then, in {first['phase']}: "
            f"virtual {_signed(first['virtual_bytes'])}, real {_signed(first['real_bytes'])}",
            f"  {first['kind']}, between {first['operation_before']} and {first['operation_after']}"
            if first["kind"] == KINDS[True, False]
            else f"  {first['kind']}, by {first['operation']}",
            f"  differing allocations: {differing['virtual_only']} virtual only, {differing['real_only']} real only"
            f"{'' if differing['shortest'] else ' (rough alignment)'}, {found['released_elsewhere']} released "
            "at another place",
        ]
    lines.append(f"  peak: real less virtual {peak['difference']:+,} bytes, these explain {peak['explained']:+,}")
    return "\n".join(lines)


def reserved_by_phase(
    trace: Trace, capacity_bytes: int | None = None, *, expandable_segments: bool = False
) -> list[int]:
    """The most bytes that the caching allocator holds reserved in each phase; MemoryError where there is no room."""
    allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
    born, nbytes = trace.born.tolist(), trace.nbytes.tolist()
    edges = np.searchsorted(trace.span, np.arange(2 * len(trace.names) + 1)).tolist()
    most = []
    for span, (start, end) in enumerate(pairwise(edges)):
        allocator.reset_peaks()
        for entry in range(start, end):
            if born[entry] == entry:
                allocator.allocate(entry, nbytes[entry])
            else:
                allocator.free(born[entry])
        if span % 2:
            most.append(allocator.peak_reserved_bytes)
    return most


def operation(frames: list[dict[str, Any]]) -> str:
    """The innermost frames in one line, without those in which a module only calls another's forward."""
    told = [frame for frame in frames if not frame["filename"].replace("\\", "/").endswith("nn/modules/module.py")]
    if not told:
        return NO_FRAMES
    return " < ".join(f"{_file(frame['filename'])}:{frame['line']} {frame['name']}" for frame in told[:FRAMES])


def phase_label(trace: Trace, span: int) -> str:
    """The phase of a span in words: "forward 1" is the first forward, "after step 2" what follows the last phase."""
    names = numbered(trace.names)
    if span % 2:
        return names[span // 2]
    return f"before {names[span // 2]}" if span // 2 < len(names) else f"after {names[-1]}"


def numbered(names: Sequence[str]) -> list[str]:
    """The phases' names, each with how often it has come by then."""
    return [f"{name} {names[: k + 1].count(name)}" for k, name in enumerate(names)]


# ----------------------------------------------------------------------------------------------------------------------


class _Side:
    """A trace from the start of the training on: signed entries, and its allocations as arrays of their own."""

    def __init__(self, trace: Trace):
        blocks = trace.born
        order = sorted_releases(blocks, ~trace.allocates)  # a stretch of releases does not end with a phase here
        allocates, nbytes = trace.allocates[order], trace.nbytes[order]
        start = int(np.searchsorted(trace.span, 1))
        self.start_bytes = int(np.where(allocates, nbytes, -nbytes)[:start].sum())
        self.entries = order[start:]  # of the trace
        self.signed = np.where(allocates, nbytes, -nbytes)[start:].tolist()
        self.births = np.flatnonzero(trace.allocates & (trace.span > 0))  # entry of each allocation
        self.sizes, self.span = trace.nbytes[self.births], trace.span[self.births]
        released = np.full(len(trace), len(trace))
        gone = np.flatnonzero(~trace.allocates)
        released[trace.born[gone]] = gone
        self.released = released[self.births]  # entry of each one's release, or the end
        # How many allocations come before it.
        self.gap = np.searchsorted(self.births, self.released)
        self.survives = self.released == len(trace)
        live = np.where(trace.allocates, trace.nbytes, -trace.nbytes).cumsum()
        self.peak_entry = int(live.argmax()) if len(live) else -1

    def held_at_peak(self, which: np.ndarray) -> int:
        """Bytes of these allocations that are held at the peak."""
        held = (self.births[which] <= self.peak_entry) & (self.released[which] > self.peak_entry)
        return self.sizes[which][held].sum()


def _file(path: str) -> str:
    """The file within its library or within the course: a record says nothing of whose machine it is from."""
    path = path.replace("\\", "/")
    for folder in ("/site-packages/", "/dist-packages/", f"{ROOT.as_posix()}/"):
        if folder in path:
            return path.rpartition(folder)[2]
    return path.rpartition("/")[2]


def _first_difference(
    virtual: Trace, ours: _Side, only_ours: np.ndarray, real: RealTrace, theirs: _Side, only_theirs: np.ndarray
) -> dict[str, Any] | None:
    index = equal_prefix(ours.signed, theirs.signed)
    if index == len(ours.signed) == len(theirs.signed):
        return None
    here, there = (side.signed[index] if index < len(side.signed) else None for side in (ours, theirs))
    span = int(virtual.span[ours.entries[index]]) if here is not None else 2 * len(virtual.names)
    extra = here is not None and ours.entries[index] in ours.births[only_ours]
    missing = there is not None and theirs.entries[index] in theirs.births[only_theirs]
    around = slice(max(0, index - AROUND), index + AROUND + 1)
    return {
        "index": index,
        "phase": phase_label(virtual, span),
        "kind": KINDS[bool(extra), bool(missing)],
        "virtual_bytes": here,
        "real_bytes": there,
        "operation": None if there is None else operation(real.frames[theirs.entries[index]]),
        "operation_before": _nearest(real, theirs, range(index - 1, -1, -1)),
        "operation_after": _nearest(real, theirs, range(index, len(theirs.signed))),
        "virtual_around": ours.signed[around],
        "real_around": theirs.signed[around],
    }


def _nearest(real: RealTrace, theirs: _Side, indices: range) -> str:
    """The operation of the nearest real allocation that has frames."""
    for index in indices:
        if theirs.signed[index] > 0 and real.frames[theirs.entries[index]]:
            return operation(real.frames[theirs.entries[index]])
    return NO_FRAMES


def _released_elsewhere(ours: _Side, theirs: _Side, matched_ours: np.ndarray, matched_theirs: np.ndarray) -> int:
    """How many matched allocations are released between other matched allocations than their counterpart."""
    places = [
        np.where(side.survives[matched], -1, np.searchsorted(matched, side.gap[matched]))
        for side, matched in ((ours, matched_ours), (theirs, matched_theirs))
    ]
    return int((places[0] != places[1]).sum())


def _groups(found: Any) -> list[dict[str, Any]]:
    counts = Counter(found)
    most = sorted(counts.items(), key=lambda item: -item[0][1] * item[1])[:GROUPS]
    rows = [{"phase": phase, "bytes": size, "count": count, "operation": what} for (phase, size, what), count in most]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _signed(nbytes: int | None) -> str:
    return "nothing more" if nbytes is None else f"{nbytes:+,} bytes"
