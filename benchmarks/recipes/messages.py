"""PyTorch's out-of-memory messages, and cards as they name them: what is stated there, against the catalogue's.

Nothing is run: a message states the segment that was asked for, the card's memory, what was free, held and cached. Held
against it are the allocator's rule for segments, and the ranges in virtual_gpu/cards.json. These ranges were read off
messages too: a row within them shows that the catalogue covers it, not that it was predicted.
"""

from __future__ import annotations

import re

from virtual_gpu.allocator import round_size, segment_size
from virtual_gpu.cards import GPUSpec, Range

from .recipe import Prediction, Recipe, Refused, Row, gpu_of

_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (B|bytes|KiB|MiB|GiB)"
_STATED = {
    "tried_bytes": rf"Tried to allocate {_SIZE}",
    "total_bytes": rf"total capacity of {_SIZE}",
    "free_bytes": rf"of which {_SIZE} is free",
    "in_use_bytes": rf"this process has {_SIZE} memory in use",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch",
    "reserved_unallocated_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
MIB = 2**20


def message(text: str) -> dict[str, int]:
    """The sizes that a message states, in bytes, as finely as it prints them."""
    found = {name: re.search(pattern, text) for name, pattern in _STATED.items()}
    return {name: round(float(m[1]) * _UNITS[m[2]]) for name, m in found.items() if m}


def predict_message(row: Row) -> Prediction:
    """Whether the tried size is a segment's, and memory and context lie within the catalogue's ranges for the card."""
    tried, resolution = row["tried_bytes"], row.get("resolution_bytes", 0)
    wrong, checked = [], []
    if tried < 2**30:  # printed to 0.01 MiB
        checked.append("the size tried is a segment's")
        if not is_segment(tried):
            wrong.append(f"{tried / MIB:.2f} MiB is no segment's size")
    spec = _known(row)
    for name, what, seen, rounded in (
        ("total_bytes", "memory", spec and spec.memory_seen, 1),
        ("non_pytorch_bytes", "context", spec and spec.context_seen, 3),  # a difference of three printed numbers
    ):
        if seen and row.get(name):
            checked.append(what)
            if not seen.low - rounded * resolution <= row[name] <= seen.high + rounded * resolution:
                wrong.append(f"{what} {row[name]:,}, known from {seen.low:,} to {seen.high:,}")
    if not checked:
        raise Refused("states a size to 0.01 GiB only, and no card of the catalogue")
    return Prediction(None, died=True, agrees=not wrong, note="; ".join(wrong) or ", ".join(checked))


def is_segment(nbytes: int) -> bool:
    """Whether the allocator asks the driver for a segment of this size, as far as 0.01 MiB tells."""
    nearest = max(2 * MIB, round(nbytes / (2 * MIB)) * 2 * MIB)
    segments = {segment_size(round_size(asked)) for asked in (MIB, 5 * MIB, nearest)}
    return nearest in segments and abs(nearest - nbytes) <= 0.005 * MIB


def predict_capacity(row: Row) -> Prediction:
    """Whether the memory that a source states for a card ("14.56-14.76 GiB") lies within the catalogue's."""
    low, high = stated(str(row["value"]))
    spec = _known(row)
    if spec is None:
        raise Refused(f"the card {row['gpu']!r} is not in virtual_gpu/cards.json")
    ours = spec.memory_seen or Range(spec.memory_bytes, spec.memory_bytes)
    slack = round(0.005 * 2**30)  # printed to 0.01 GiB
    note = f"stated {low:,} to {high:,}, the catalogue has {ours.low:,} to {ours.high:,}"
    return Prediction(None, agrees=ours.low - slack <= low and high <= ours.high + slack, note=note)


def stated(text: str) -> tuple[int, int]:
    """The least and the most of "12,622,168,064 B = 11.755 GiB", "14.56-14.76 GiB" or "16160 MiB (NVML)", in bytes."""
    exact = re.match(r"([\d,]{7,}) B", text)
    if exact:
        return (int(exact[1].replace(",", "")),) * 2
    several = re.match(rf"([\d.]+)(?:-([\d.]+))? ({'|'.join(_UNITS)})", text)
    if not several:
        raise Refused(f"states no size: {text!r}")
    unit = _UNITS[several[3]]
    return round(float(several[1]) * unit), round(float(several[2] or several[1]) * unit)


def _known(row: Row) -> GPUSpec | None:
    """The card, also where a row calls it "A100-80 / A800"; None where it is not in the catalogue."""
    name = str(row.get("gpu") or "").partition(" / ")[0]
    for candidate in (name, f"{name}GB") if name and not name.startswith("not stated") else ():
        try:
            return gpu_of({"gpu": candidate}).spec
        except Refused:
            continue
    return None


RECIPES = (
    Recipe(
        name="messages",
        what="out-of-memory messages against the allocator's segments and the catalogue's ranges (nothing is run)",
        what_ko="메모리 부족 메시지와 할당자의 세그먼트, 카드 목록의 범위(실행하지 않음)",
        handles=lambda row: row["kind"] == "oom" and isinstance(row.get("tried_bytes"), int),
        predict=predict_message,
        fast=lambda row: True,
    ),
    Recipe(
        name="capacities",
        what="memory of cards as others state it, against the catalogue (nothing is run)",
        what_ko="남이 밝힌 카드의 메모리와 카드 목록(실행하지 않음)",
        handles=lambda row: row["kind"] == "capacity",
        predict=predict_capacity,
        fast=lambda row: True,
    ),
)
