"""A card's requests beside those of today's virtual GPU, one by one: `python benchmarks/against_traces.py`.

For each setting of a record of `make measure-gpu` with a trace (`--traces`): the same two steps once more on the
virtual card, with the libraries that are installed, and whether every allocation and release has the card's bytes and
place in the order. The record's own predictions are not touched: they were made before the card had run.

    python benchmarks/against_traces.py --only Qwen2.5 --card H100
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import sequences
from benchmarks.measure_gpu import NUMBERS, RECORDS, slug
from virtual_gpu.cards import CATALOG, GPUSpec
from virtual_gpu.language import set_language
from virtual_gpu.terminal import tell
from virtual_gpu.trace.compare import equal_prefix, sorted_releases
from virtual_gpu.trace.histories import read_histories
from virtual_gpu.trace.trace import Trace

RECORD = RECORDS / "nvidia-h100-80gb-hbm3-2026-11-23.json"
TRACES = RECORDS / "traces" / "h100-2026-11-23"


def main(arguments: list[str] | None = None) -> int:
    """Compare every setting that has a trace; 1 where a difference was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORD, help="of make measure-gpu")
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder that it kept the card's requests in")
    parser.add_argument("--card", default="H100", help="the catalogue's card for the kernels (default H100)")
    parser.add_argument("--only", default="", help="only the settings whose line contains this text")
    args = parser.parse_args(arguments)
    set_language("en")
    record = json.loads(args.record.read_text(encoding="utf-8"))
    spec = replace(CATALOG[args.card], memory_bytes=record["gpu"]["bytes"], usable_bytes=None)
    print(versions(record))
    found, chosen = (
        [],
        [
            (row, path)
            for row in record["rows"]
            if args.only in row["title"] and (path := args.traces / f"{slug(row['title'])}.json.gz").is_file()
        ],
    )
    for number, (row, path) in enumerate(chosen, 1):
        tell(f"{number} of {len(chosen)}: {row['title']} … Ctrl+C stops")
        found.append(again(row, path, spec))
        print(line(found[-1]), flush=True)
    equal = sum(one["equal"] == one["entries"][1] == one["entries"][0] for one in found)
    print(f"Of {len(found)} settings every request is the card's in {equal}.")
    return int(equal != len(found))


def again(row: dict[str, Any], path: Path, spec: GPUSpec) -> dict[str, Any]:
    """One setting: entries of both sides, how many are equal from the start on, and the errors of the numbers."""
    from helpers.experiment import predict_memory
    from virtual_gpu.counting.gpu import VirtualGPU

    report = predict_memory(gpu=VirtualGPU(spec), **row["setting"])
    trace, history = report.timeline.trace, read_histories(path)[0]
    real = history.trace()
    (entries, ours), (others, theirs) = signed(trace), signed(real)
    equal = equal_prefix(ours, theirs)
    found: dict[str, Any] = {
        "title": row["title"],
        "entries": (len(ours), len(theirs)),
        "equal": equal,
        "errors": {
            word: getattr(report, name) / row["measured"][name] - 1
            for name, word in NUMBERS.items()
            if row["measured"][name] and getattr(report, name)
        },
    }
    if equal < len(ours) or equal < len(theirs):
        sides = (ours[equal] if equal < len(ours) else None, theirs[equal] if equal < len(theirs) else None)
        phase = sequences.phase_label(trace, int(trace.span[entries[equal]])) if equal < len(ours) else "the end"
        place = history.places()[others[equal]] if equal < len(theirs) else ""
        found["first"] = (*sides, phase, place)
    return found


def signed(trace: Trace) -> tuple[np.ndarray, list[int]]:
    """(entry, +bytes or -bytes) of each request after the start; releases that follow each other by their bytes."""
    order = sorted_releases(trace.nbytes, ~trace.allocates)
    order = order[trace.span[order] > 0]
    return order, np.where(trace.allocates, trace.nbytes, -trace.nbytes)[order].tolist()


def line(found: dict[str, Any]) -> str:
    """A setting as it is printed."""
    errors = "  ".join(f"{word} {error:+.3%}" for word, error in found["errors"].items())
    text = f"{found['title']:<62} {found['equal']:>7,} of {found['entries'][1]:>7,} equal   {errors}"
    if "first" in found:
        ours, theirs, phase, place = found["first"]
        sides = " and ".join("nothing more" if side is None else f"{side:+,}" for side in (ours, theirs))
        text += f"\n    then, in {phase}, virtual and real: {sides}  {place}"
    return text


def versions(record: dict[str, Any]) -> str:
    """The record's libraries, and those that are installed where they are others."""
    import importlib.metadata

    told = []
    for name in ("torch", "transformers", "peft", "bitsandbytes"):
        then, now = record["versions"].get(name), importlib.metadata.version(name)
        told.append(f"{name} {then}" + ("" if then == now.partition("+")[0] else f" (here {now})"))
    return "The card had " + ", ".join(told) + "."


if __name__ == "__main__":
    sys.exit(main())
