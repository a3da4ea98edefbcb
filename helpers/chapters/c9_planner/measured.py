"""What others measured on real cards beside what the virtual GPU says, as `make truth` left it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from helpers.environment import COURSE
from helpers.rows import LeftRows, Rows, table
from virtual_gpu.language import tr
from virtual_gpu.units import GiB, human_bytes

JUDGED = COURSE / "benchmarks" / "judged.json"
OURS = COURSE / "benchmarks" / "records" / "nvidia-h100-80gb-hbm3-2026-11-23.json"
PROGRAMS = COURSE / "benchmarks" / "programs" / "predicted.json"  # others' programs on the same card
LADDER = "torchtune levers"  # the recipe of that table
SINGLE = "Liger-Kernel"  # the source that measures one operation or loss at a time, no training
Found = tuple[float, str, float]  # predicted over measured, less 1; of what; bytes measured


def published(path: Path = JUDGED) -> list[dict[str, Any]]:
    """The published measurements that were predicted and count."""
    judged = json.loads(path.read_text(encoding="utf-8"))
    return [row for row in judged["rows"] if row["counts"] and row["outcome"] == "run" and row["measured"]]


def kinds() -> dict[str, str]:
    """What others measured, the nearest to "does it fit?" first: `kind` → how it is called."""
    return {
        "highest": tr(ko="예약이나 카드 전체의 최대", en="peak of what is reserved, or of the card"),
        "moment": tr(ko="예약의 평균이나 한때", en="reserved on average, or at a moment"),
        "tensors": tr(ko="텐서", en="tensors"),
        "single": tr(ko="연산이나 손실 하나의 텐서", en="tensors of one operation or loss"),
    }


def kind(source: str, metric: str) -> str:
    """Which of `kinds` a published measurement is."""
    if source.rpartition("/")[2] == SINGLE:
        return "single"
    if not any(word in metric for word in ("reserved", "NVML", "nvidia-smi")):
        return "tensors"
    return "highest" if any(word in metric for word in ("max", "peak")) else "moment"


def how_short(margin: float = 0.05) -> LeftRows:
    """Everything that was measured, a row for each kind: how far off, and what a margin of so much does not cover."""
    ours = [row for row in json.loads(OURS.read_text(encoding="utf-8"))["rows"] if row["status"] == "ok"]
    programs = json.loads(PROGRAMS.read_text(encoding="utf-8"))
    settings, theirs = tr(ko="H100, 우리 설정", en="H100, our settings"), tr(ko="남의 프로그램", en="others' programs")
    peak, reserved = tr(ko="텐서의 최대", en="peak of tensors"), tr(ko="예약", en="reserved")
    groups: dict[str, list[Found]] = {
        f"{settings}: {peak}": [_ours(row, "peak_bytes") for row in ours],
        f"{settings}: {reserved}": [_ours(row, "reserved_bytes") for row in ours],
        f"H100, {theirs}: {reserved}": [
            (row["reserved"] / row["measured"]["reserved"] - 1, row["program"], row["measured"]["reserved"])
            for row in programs
            if row["status"] == "fits" and "reserved" in row["measured"]
        ],
    }
    published_by = tr(ko="남들이 공개한 것", en="published by others")
    labels = {name: f"{published_by}: {label}" for name, label in kinds().items()}
    groups |= {label: [] for label in labels.values()}
    for row in published():
        found = (error(row), row["source"].rpartition("/")[2], row["measured"])
        groups[labels[kind(row["source"], row["metric"])]].append(found)
    heads = [
        "",
        tr(ko="측정한 수", en="rows"),
        tr(ko="오차의 평균 (부호 없이)", en="mean error, unsigned"),
        tr(ko="가장 모자란 것 (잰 크기)", en="shortest (measured)"),
        tr(ko=f"여유 {margin:.0%}로도 모자란 것", en=f"short even with a margin of {margin:.0%}"),
    ]
    return LeftRows(heads, [[name, *_how_short(found, margin)] for name, found in groups.items()])


def played_t4() -> Rows:
    """A row for each training of an H100 with no more memory than a T4: how it ended, what was reserved."""
    said = {True: tr(ko="들어간다", en="fits"), False: "OOM"}
    record = json.loads(OURS.read_text(encoding="utf-8"))["rows"]
    rows = [
        {
            "title": row["title"].removeprefix("as a T4: "),
            "predicted": said[row["predicted"]["fits"]],
            "measured": said[row["measured"]["fits"]],
        }
        | {
            f"{side}_reserved": human_bytes(row[side]["reserved_bytes"]) if row[side]["fits"] else None
            for side in ("predicted", "measured")
        }
        for row in record
        if row["kind"] == "t4"
    ]
    columns = {
        "title": (tr(ko="T4만큼만 쓰게 한 H100", en="an H100 with a T4's memory"), ""),
        "predicted": (tr(ko="예측", en="predicted"), ""),
        "measured": (tr(ko="카드", en="card"), ""),
        "predicted_reserved": (tr(ko="예약의 예측", en="reserved, predicted"), ""),
        "measured_reserved": (tr(ko="잰 예약", en="reserved, measured"), ""),
    }
    return table(rows, columns)


def lever_by_lever(path: Path = JUDGED) -> Rows:
    """torchtune's table of one lever on top of the other: what a card had, and what its program has on the virtual."""
    rows = [row for row in published(path) if row["recipe"] == LADDER]
    heads = ["", "A100", tr(ko="가상 GPU", en="virtual GPU"), tr(ko="오차", en="error")]
    return Rows(
        heads,
        [
            [
                row["id"].partition("/")[2],
                f"{row['measured'] / GiB:.1f} GiB",  # as finely as it was published
                human_bytes(row["predicted"]),
                f"{error(row):+.2%}".replace("-", "−"),
            ]
            for row in rows
        ],
    )


def _how_short(found: list[Found], margin: float) -> list[str]:
    low, lowest, nbytes = min(found)
    short = Counter(name for off, name, _ in found if (1 + margin) * (1 + off) < 1)
    named = ", ".join(name if times == 1 else f"{name} × {times}" for name, times in short.most_common())
    return [
        str(len(found)),
        f"{mean(abs(off) for off, *_ in found):.2%}",
        f"{low:+.2%}".replace("-", "−") + f" {lowest} ({human_bytes(nbytes)})",
        f"{short.total()}" + (f": {named}" if named else ""),
    ]


def _ours(row: dict[str, Any], kind: str) -> Found:
    measured = row["measured"][kind]
    return row["predicted"][kind] / measured - 1, row["title"].partition(",")[0], measured


def card_name(said: str) -> str:
    """A card as its source names it, without maker and remarks; "" where the source does not say."""
    return (
        ""
        if said == "?" or said.startswith("not stated")
        else said.removeprefix("NVIDIA ").removeprefix("GeForce ").partition(" (")[0]
    )


def error(row: dict[str, Any]) -> float:
    """Predicted over measured, less 1; of a prediction that is a range, from its nearest end."""
    nearest = row["predicted"]
    if row["low"] is not None and row["high"] is not None:
        nearest = min(max(row["measured"], row["low"]), row["high"])
    return nearest / row["measured"] - 1
