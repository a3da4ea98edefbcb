"""A vision tower that others measured on a card, beside what the virtual card says of the same program."""

from __future__ import annotations

import json

from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...environment import COURSE
from ...rows import Rows

JUDGED = COURSE / "benchmarks" / "judged.json"
SOURCE = "huggingface/transformers"


def measured_tower() -> Rows:
    """A row for each way to attend: bytes at the peak as they were measured and as they are predicted here."""
    rows = [row for row in json.loads(JUDGED.read_text(encoding="utf-8"))["rows"] if row["source"] == SOURCE]
    heads = ["", tr(ko="잰 것", en="measured"), tr(ko="예측", en="predicted"), tr(ko="차이", en="off by")]
    cells = []
    for row in sorted(rows, key=lambda row: row["measured"]):
        ran = row["outcome"] == "run"
        off = f"{row['predicted'] / row['measured'] - 1:+.3%}" if ran else ""
        predicted = human_bytes(row["predicted"]) if ran else tr(ko="실행하지 않음", en="not run")
        cells.append([row["id"].split("/")[-1], human_bytes(row["measured"]), predicted, off])
    return Rows(heads, cells)
