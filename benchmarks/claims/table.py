"""python -m benchmarks.claims.table: benchmarks/README.md's table of levers and trainers beside what a card took.

Made of `beside.json`, which `python -m benchmarks.claims.compare CARD VIRTUAL --json FILE` wrote.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.programs.table import put

BESIDE = Path(__file__).with_name("beside.json")
MARKERS = re.compile(r"(<!-- claims:begin -->\n).*?(<!-- claims:end -->)", re.DOTALL)
HEADS = "| program | peak, H100 | here | reserved, H100 | here | requests, H100 | here | equal from the first |"


def block(rows: list[dict[str, Any]]) -> str:
    """The table in bytes, the worst first, and how many are equal."""
    rows = sorted(
        rows, key=lambda row: (-max(abs(off(row["peak"])), abs(off(row["reserved"]))), row["case"], row["row"])
    )
    lines = [HEADS, "|---" * 8 + "|"]
    for row in rows:
        sides = [_pair(row[name]) for name in ("peak", "reserved")]
        asked = " | ".join(f"{count:,}" for count in row.get("requests", ())) or " | | "
        lines.append(f"| {row['case']}: {row['row'].replace('|', '/')} | {' | '.join(sides)} | {asked} |")
    exact = {name: sum(row[name][0] == row[name][1] for row in rows) for name in ("peak", "reserved")}
    kept = [row["requests"] for row in rows if "requests" in row]
    whole = sum(len(set(counts)) == 1 for counts in kept)
    said = f"Of {len(rows)} programs the peak is the card's to the byte in {exact['peak']}, the reserved bytes in "
    return "\n".join([*lines, "", f"{said}{exact['reserved']}; of {len(kept)} every request in {whole}."]) + "\n"


def off(pair: list[int]) -> float:
    """What is predicted over what was measured, less 1."""
    return pair[1] / pair[0] - 1 if pair[0] else 0.0


def _pair(pair: list[int]) -> str:
    measured, predicted = pair
    small = abs(off(pair)) < 1e-5
    apart = f"{predicted - measured:+,} bytes" if small else f"{off(pair):+.3%}"
    return f"{measured:,} | " + ("equal" if measured == predicted else apart)


def main() -> None:
    """Write the table into the page."""
    put(MARKERS, block(json.loads(BESIDE.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
