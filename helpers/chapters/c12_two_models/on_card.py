"""Programs of the chapter on an H100: what `torch.cuda` counted there, and how far the prediction is off."""

from __future__ import annotations

import json
from dataclasses import dataclass

from virtual_gpu.language import tr

from ...environment import COURSE
from ...rows import Rows, table

BESIDE = COURSE / "benchmarks" / "claims" / "beside.json"


@dataclass(frozen=True)
class OnCard:
    """Bytes that one program held at most and that the allocator reserved, each (measured, predicted)."""

    peak: tuple[int, int]
    reserved: tuple[int, int]


def on_h100() -> dict[str, OnCard]:
    """The trainers that ran there, by the names of the chapter's rows."""
    rows = json.loads(BESIDE.read_text(encoding="utf-8"))
    return {
        row["row"]: OnCard(tuple(row["peak"]), tuple(row["reserved"]))
        for row in rows
        if row["case"] == "two-models" and "pairs" not in row["row"]
    }


def beside_h100() -> Rows:
    """A row for each of them."""
    rows = [
        {
            "program": name,
            "peak": f"{one.peak[0]:,}",
            "off": f"{one.peak[1] - one.peak[0]:+,}",
            "reserved": f"{one.reserved[0]:,}",
            "off by": f"{one.reserved[1] / one.reserved[0] - 1:+.2%}",
        }
        for name, one in on_h100().items()
    ]
    columns = {
        "program": (tr(ko="H100에서 돌린 것", en="on an H100"), ""),
        "peak": (tr(ko="잰 최대 (바이트)", en="peak, measured (bytes)"), ""),
        "off": (tr(ko="예측 − 잰 것", en="predicted − measured"), ""),
        "reserved": (tr(ko="잰 예약 (바이트)", en="reserved, measured (bytes)"), ""),
        "off by": (tr(ko="예약의 차이", en="reserved off by"), ""),
    }
    return table(rows, columns)
