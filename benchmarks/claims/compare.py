"""The card's rows beside the virtual ones: `python -m benchmarks.claims.compare CARD VIRTUAL`, two folders.

For each row every number that both have; for each recorded program the requests in their order, where they first
differ and who asked. What the doctor says of each message is beside it. `--json FILE` keeps the peaks of both sides,
and how many requests are equal (benchmarks/claims/beside.json: `python -m benchmarks.claims.table` writes the page).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from virtual_gpu.allocator import round_size
from virtual_gpu.trace.compare import align

PROGRAMS = ("adapters", "levers", "loading", "steps", "two-models")  # that have a peak of their own
Rows = dict[tuple[str, str], dict[str, Any]]
APART = ("seconds", "free", "total", "outside", "nvml", "segments", "wall", "traceback", "stats", "alive", "trace")


def rows_of(folder: Path, name: str) -> Rows:
    """(case, row) → row, of all files of that name; what one run had no time for, another may have."""
    found: Rows = {}
    for path in sorted(folder.rglob(name)):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                if row["row"] != "not run":
                    found[row["case"], row["row"]] = row
    return found


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number below a value, with its path."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key not in APART:
                yield from numbers(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from numbers(below, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def layout(segments: list[Any]) -> list[Any]:
    """What of the segments is the allocator's, not the driver's: by stream and pool, sizes and their blocks."""
    return sorted([one[1], one[3], one[5], [[size, state] for size, state, *_ in one[6]]] for one in segments)


def traces_of(folder: Path, name: str) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.rglob(name)):
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                found[member.name] = json.loads(gzip.decompress(file.read())) if file else None
    return found


def requests(trace: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """(bytes of the block, frames) of each allocation."""
    return [(round_size(size), trace["frames"][frame]) for kind, _, size, _, frame in trace["events"] if kind == "a"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("card", type=Path)
    parser.add_argument("virtual", type=Path)
    parser.add_argument("--only", default="", help="cases that begin so")
    parser.add_argument("--all", action="store_true", help="equal rows too")
    parser.add_argument("--json", type=Path, help="keep what both sides took at most")
    given = parser.parse_args()
    real, ours = rows_of(given.card, "claims*.jsonl.gz"), rows_of(given.virtual, "virtual.jsonl.gz")
    for key, row in real.items():
        if key[0].startswith(given.only):
            _row(key, row, ours.get(key), given.all)
    theirs, mine = traces_of(given.card, "claims*_traces.tar.gz"), traces_of(given.virtual, "virtual_traces.tar.gz")
    traces = {name: (requests(theirs[name]), requests(mine[name])) for name in sorted(theirs.keys() & mine.keys())}
    for name, sides in traces.items():
        if name.startswith(given.only):
            _trace(name, *sides)
    if given.json:
        found = list(_beside(real, ours, traces))
        given.json.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n", encoding="utf-8")


def _beside(real: Rows, ours: Rows, traces: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each program took at most, [on the card, here], and how many requests it made, equal from the first on."""
    for key in sorted(real.keys() & ours.keys()):
        sides = real[key], ours[key]
        if (
            not key[0].startswith(PROGRAMS)
            or not all("peak" in row or "phases" in row for row in sides)
            or any(row.get("error") for row in sides)
        ):
            continue
        peaks = [_most(row) for row in sides]
        row = {"case": key[0], "row": key[1], "peak": [p[0] for p in peaks], "reserved": [p[1] for p in peaks]}
        if (name := sides[0].get("trace")) in traces:
            sizes = [[size for size, _ in side] for side in traces[name]]
            row["requests"] = [*map(len, sizes), equal_from_the_first(*sizes)]
        yield row


def _most(row: dict[str, Any]) -> tuple[int, int]:
    """(allocated, reserved) bytes at most."""
    if "phases" in row:
        return max(phase[1] for phase in row["phases"]), max(phase[3] for phase in row["phases"])
    return row["peak"], row["peak_reserved"]


def equal_from_the_first(one: list[int], other: list[int]) -> int:
    """How many entries are equal before the first that differs."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, same))


def _row(key: tuple[str, str], row: dict[str, Any], ours: dict[str, Any] | None, every: bool) -> None:
    title = " | ".join(key)
    if ours is None:
        print(f"{title}: only on the card" + (f"; {_said(row)}" if row.get("error") else ""))
        return
    left, right = dict(numbers(row)), dict(numbers(ours))
    differ = [(name, left[name], right[name]) for name in left if name in right and left[name] != right[name]]
    here, there = row.get("segments"), ours.get("segments")
    if isinstance(here, list) and isinstance(there, list) and layout(here) != layout(there):
        differ.append(("segments", len(here), len(there)))
    if differ or every:
        print(f"{title}: {len(left.keys() & right.keys()) - len(differ)} equal, {len(differ)} differ")
        for name, here, there in differ[:14]:
            share = f"{there / here - 1:+.3%}" if here else ""
            print(f"    {name}: card {here:,}, virtual {there:,} ({there - here:+,}) {share}")
    if row.get("error") or ours.get("error"):
        print(f"    card:    {_said(row)}\n    virtual: {_said(ours)}")


def _said(row: dict[str, Any]) -> str:
    """The error, and of one of memory what the doctor says."""
    error = row.get("error")
    if not error:
        return "no error"
    text = error if isinstance(error, str) else f"{error['type']}: {error['text']}"
    if "memory" in text.lower() or "alloc" in text.lower():
        from virtual_gpu import diagnose

        found = diagnose(text if isinstance(error, str) else error["traceback"])
        return f"{text[:420]}\n             doctor: {found.verdict} ({found.sure})"
    return text[:420]


def _trace(name: str, real: list[Any], ours: list[Any]) -> None:
    sizes = [size for size, _ in real], [size for size, _ in ours]
    if sizes[0] == sizes[1]:
        print(f"{name}: {len(real):,} requests, all equal")
        return
    pairs, _ = align(*(side[:40_000] for side in reversed(sizes)))
    print(f"{name}: {len(real):,} requests on the card, {len(ours):,} virtual, {len(pairs):,} in common")
    matched_ours, matched_real = {a for a, _ in pairs}, {b for _, b in pairs}
    for label, side, matched in (("card", real, matched_real), ("virtual", ours, matched_ours)):
        kinds: dict[tuple[int, str], int] = {}
        for index, (size, frames) in enumerate(side[:40_000]):
            if index not in matched:
                where = next((frame for frame in frames if "torch/" not in frame[:8]), frames[0] if frames else "-")
                kinds[size, where] = kinds.get((size, where), 0) + 1
        for (size, where), count in sorted(kinds.items(), key=lambda one: -one[0][0] * one[1])[:6]:
            print(f"    only {label}: {count} × {size:,} bytes, {where}")


if __name__ == "__main__":
    main()
