"""PyTorch's memory snapshot read: whose line asked for what is still alive, and the events in their order."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...rows import LeftRows

_LIBRARY = re.compile(
    r"(?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]|^<frozen|[/\\]virtual_gpu[/\\]|^\?\?$"
)


def alive_by_line(snapshot: Mapping[str, Any], most: int = 5) -> LeftRows:
    """What is alive in `torch.cuda.memory._snapshot()`, by the innermost line that is no library's; largest first."""
    nbytes, count = Counter(), Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                line = line_of(block.get("frames") or ())
                nbytes[line] += block["requested_size"]
                count[line] += 1
    rows = [[human_bytes(size), count[line], line] for line, size in nbytes.most_common(most)]
    return LeftRows((tr(ko="살아 있는 것", en="alive"), tr(ko="블록", en="blocks"), tr(ko="줄", en="line")), rows)


def events(snapshot: Mapping[str, Any], least: int = 1, most: int = 12) -> LeftRows:
    """The first events of a snapshot that are of `least` bytes or more: what the allocator did, how much, for whom."""
    told = (event for event in snapshot["device_traces"][0] if event["size"] >= least)
    rows = [
        [event["action"], human_bytes(event["size"]), line_of(event["frames"]) if event["frames"] else ""]
        for event in islice(told, most)
    ]
    return LeftRows(("action", "size", tr(ko="줄", en="line")), rows)


def line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of the user's own, as it is written there."""
    for frame in frames:
        if not _LIBRARY.search(frame["filename"]):
            return linecache.getline(frame["filename"], frame["line"]).strip() or f"{frame['name']}:{frame['line']}"
    return tr(ko="(기록을 켜기 전, 또는 라이브러리)", en="(before the history began, or a library's)")
