"""python -m benchmarks.programs.table: benchmarks/README.md's table of others' programs beside what a card measured.

Made of `predicted.json`, which `python -m benchmarks.programs FOLDER --gpu CARD --json FILE` wrote where the programs
and the card's records lay.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT

PREDICTED = Path(__file__).with_name("predicted.json")
PAGE = ROOT / "benchmarks" / "README.md"
MARKERS = re.compile(r"(<!-- programs:begin -->\n).*?(<!-- programs:end -->)", re.DOTALL)
HEADS = (
    "| program | peak predicted | measured | % | reserved predicted | measured | % | requests equal from the first |"
)


def block(rows: list[dict[str, Any]]) -> str:
    """The table in MiB, the worst first, at its end what was not predicted and why; and a sentence of sums."""
    both = [row for row in rows if "allocated" in row and "peak" in row["measured"] and row["status"] == "fits"]
    both.sort(key=lambda row: -abs(off(row, "allocated", "peak")))
    lines = [HEADS, "|---" * HEADS.count(" | ") + "|---|"]
    for row in both:
        found = row["measured"]
        sizes = [row["allocated"], found["peak"], row["reserved"], found["reserved"]]
        peak, peak_measured, reserved, reserved_measured = (f"{size / 2**20:,.1f}" for size in sizes)
        lines.append(
            f"| {row['program']} | {peak} | {peak_measured} | {off(row, 'allocated', 'peak'):+.2f} | {reserved} | "
            f"{reserved_measured} | {off(row, 'reserved', 'reserved'):+.2f} | "
            f"{found['equal']:,} of {found['requests']:,} |"
        )
    for row in rows:
        if row not in both:
            why = (row.get("error") or row["status"]).splitlines()[0].replace("|", "\\|")[:120]
            peak = f"{row['measured']['peak'] / 2**20:,.1f}" if "peak" in row.get("measured", {}) else ""
            lines.append(f"| {row['program']} | not predicted: {why} | {peak} | | | | | |")
    told = []
    for name, predicted, measured in (("peak", "allocated", "peak"), ("reserved", "reserved", "reserved")):
        errors = [abs(off(row, predicted, measured)) for row in both]
        told.append(f"{name}: median {statistics.median(errors):.2f} %, worst {max(errors):.2f} %")
    return "\n".join([*lines, "", f"MiB, {len(both)} programs. Off by, {'; '.join(told)}."]) + "\n"


def off(row: dict[str, Any], predicted: str, measured: str) -> float:
    """Percent that the prediction is above what was measured."""
    return 100 * (row[predicted] / row["measured"][measured] - 1)


def main() -> None:
    """Write the table into the page."""
    put(MARKERS, block(json.loads(PREDICTED.read_text(encoding="utf-8"))))


def put(markers: re.Pattern[str], made: str) -> None:
    """Write a table into the page, between its markers."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(markers.sub(lambda found: found[1] + made + found[2], page), encoding="utf-8")


if __name__ == "__main__":
    main()
