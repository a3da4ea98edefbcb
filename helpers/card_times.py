"""How long training steps of polyglot-ko-1.3b took on an H100, from the record that lies with the benches."""

from __future__ import annotations

import gzip
import json
from typing import Any

from helpers.environment import COURSE
from helpers.rows import Rows, table
from virtual_gpu.errors import UnknownName
from virtual_gpu.language import tr

RECORD = COURSE / "benchmarks" / "records" / "h100-2026-11-23" / "claims.jsonl.gz"
CASES = ("steps", "adapters")


def h100_steps(*names: str) -> Rows:
    """A row for each of the record's programs of that name: milliseconds of a step, the least and the median of six.

    Length 256 where the name says none; nothing else ran on the card. UnknownName lists the programs that there are.
    """
    found = _seconds()
    if unknown := [name for name in names if name not in found]:
        choices = ", ".join(found)
        raise UnknownName(tr(ko=f"{unknown[0]!r}: 기록에 없다. {choices}", en=f"{unknown[0]!r} is none of: {choices}"))
    rows = [
        {"name": name, "least": found[name][1] * 1e3, "median": found[name][0] * 1e3}
        | ({"per_sample": found[name][1] * 1e3 / found[name][3]} if found[name][3] else {})
        for name in names
    ]
    columns = {
        "name": (tr(ko="H100에서 돌린 것", en="ran on the H100"), ""),
        "least": (tr(ko="스텝 하나의 ms (가장 짧은 것)", en="ms a step, the least"), ".1f"),
        "median": (tr(ko="중앙값", en="median"), ".1f"),
        "per_sample": (tr(ko="샘플 하나의 ms", en="ms a sample"), ".2f"),
    }
    return table(rows, columns)


def _seconds() -> dict[str, list[Any]]:
    """Name → [median, least, most seconds, samples of a step]."""
    with gzip.open(RECORD, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["case"] in CASES and isinstance(row.get("seconds"), list)]
    samples = {row["row"]: row.get("batch", 0) * (4 if "4 x 4" in row["row"] else 1) for row in rows}
    return {row["row"]: [*row["seconds"], samples[row["row"]]] for row in rows if "sdpa" not in row["row"]}
