"""Recorded allocation histories, replayed by our allocator: its peaks and its end beside the card's.

Where the driver put segments, and when cached ones went back to it, is taken from the history; which block serves a
request, and when the driver is asked, our allocator decides. The file that a row speaks of ("saved as traces/NAME" in
its note) is looked for in traces/ beside the rows and among the tests' data.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from virtual_gpu.trace.replay import Replay, replay

from .recipe import ANY, Prediction, Recipe, Refused, Row

TESTS = Path(__file__).resolve().parents[2] / "tests" / "data" / "traces"
_NAMED = re.compile(r"traces/(?P<name>[\w.]+\.json\.gz)")


@functools.lru_cache(32)
def _replayed(path: Path) -> Replay:
    found = replay(path)
    if len(found) != 1:
        raise Refused(f"{path.name} has {len(found)} devices")
    return found[0]


def predict(row: Row) -> Prediction:
    """ "peak_reserved" and its kin, of the history that the row names."""
    named = _NAMED.search(row.get("note", ""))
    if not named:
        raise Refused("names no recorded file")
    places = [Path(row["file"]).parent / "traces", TESTS] if row.get("file") else [TESTS]
    path = next((place / named["name"] for place in places if (place / named["name"]).exists()), None)
    if path is None:
        raise Refused(f"{named['name']} is not here")
    found = _replayed(path)
    equal = f"{found.equal:,} of {found.requests:,} addresses are the card's"
    bytes_of = {
        "start_allocated": found.start[0],
        "start_reserved": found.start[1],
        "peak_allocated": found.peak_allocated_bytes,
        "peak_reserved": found.peak_reserved_bytes,
        "end_allocated": found.end[0],
        "end_reserved": found.end[1],
    }
    if row["metric"] not in bytes_of:
        raise Refused(f"a history has no {row['metric']!r}")
    return Prediction(bytes_of[row["metric"]], given=row["metric"].startswith("start"), note=equal)


RECIPES = (
    Recipe(
        name="replay",
        what="published memory snapshots, every request and release through our allocator",
        what_ko="공개된 메모리 스냅샷의 모든 요청과 반환을 이 할당자로",
        handles=lambda row: row["kind"] == "trace",
        predict=predict,
        settings=dict.fromkeys(("torch", "allocator_settings"), ANY),  # the trace says them itself
        fast=lambda row: True,
    ),
)
