"""What others measured on real cards beside what the virtual GPU says, as `make truth` left it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import mean, median
from typing import Any

from helpers.environment import COURSE
from helpers.rows import LeftRows, table
from helpers.rows import Rows as TableRows
from virtual_gpu.drawing.labels import html_table
from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

JUDGED = COURSE / "benchmarks" / "judged.json"
OURS = COURSE / "benchmarks" / "records" / "nvidia-h100-80gb-hbm3-2026-11-23.json"
PROGRAMS = COURSE / "benchmarks" / "programs" / "predicted.json"  # others' programs on the same card


class Measured:
    """Published measurements that were predicted: a line for each source and card; `of(source)` has them one by one."""

    def __init__(self, path: Path = JUDGED):
        judged = json.loads(path.read_text(encoding="utf-8"))
        self.date: str = judged["date"]
        self.rows = [row for row in judged["rows"] if row["counts"] and row["outcome"] == "run" and row["measured"]]

    def of(self, source: str, lines: int = 12) -> Rows:
        """The measurements of a source, by how far off they are; WrongValue for one that is not there."""
        rows = [row for row in self.rows if row["source"] == source]
        if not rows:
            names = ", ".join(sorted({row["source"] for row in self.rows}))
            raise WrongValue(tr(ko=f"{source!r}: 없는 출처다. {names}", en=f"{source!r} is none of: {names}"))
        return Rows(sorted(rows, key=lambda row: -abs(error(row))), lines)

    def _summary(self) -> list[list[str]]:
        groups: dict[tuple[str, str], list[float]] = {}
        unstated = tr(ko="밝히지 않음", en="not stated")
        for row in self.rows:
            groups.setdefault((row["source"], card_name(row["gpu"]) or unstated), []).append(error(row))
        return [
            [*names, str(len(errors)), f"{median(map(abs, errors)):.2%}", f"{max(errors, key=abs):+.2%}"]
            for names, errors in sorted(groups.items())
        ]

    def __repr__(self) -> str:
        return "\n".join(" · ".join(line) for line in self._summary())

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="출처", en="source"),
            "GPU",
            tr(ko="측정한 수", en="rows"),
            tr(ko="오차의 중앙값", en="median error"),
            tr(ko="가장 큰 오차", en="worst"),
        ]
        return html_table(heads, self._summary())


class Rows(list):
    """Measurements of one source, the worst first; shown are the first few."""

    def __init__(self, rows: list[dict[str, Any]], lines: int):
        super().__init__(rows)
        self.lines = lines

    def _shown(self) -> list[list[str]]:
        return [
            [
                row["id"].split("/", 1)[-1],
                human_bytes(row["measured"]),
                human_bytes(row["predicted"]) if row["low"] is None else _range(row["low"], row["high"]),
                f"{error(row):+.2%}",
            ]
            for row in self[: self.lines]
        ]

    def __repr__(self) -> str:
        return "\n".join(" · ".join(line) for line in self._shown())

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="무엇", en="what"),
            tr(ko="잰 것", en="measured"),
            tr(ko="예측", en="predicted"),
            tr(ko="차이", en="error"),
        ]
        return html_table(heads, self._shown())


def how_short(margin: float = 0.05) -> LeftRows:
    """Everything that was measured, a row for each kind: how far off, and what a margin of so much does not cover."""
    others = Measured().rows
    ours = [row for row in json.loads(OURS.read_text(encoding="utf-8"))["rows"] if row["status"] == "ok"]
    programs = json.loads(PROGRAMS.read_text(encoding="utf-8"))
    settings, theirs = tr(ko="H100, 우리 설정", en="H100, our settings"), tr(ko="남의 프로그램", en="others' programs")
    peak, reserved = tr(ko="텐서의 최대", en="peak of tensors"), tr(ko="예약", en="reserved")
    published: dict[bool, list[tuple[float, str]]] = {False: [], True: []}
    for row in others:  # what is reserved, or the whole card (NVML), is what decides whether a training fits
        whole = any(word in row["metric"] for word in ("reserved", "NVML"))
        published[whole].append((error(row), row["source"].rpartition("/")[2]))
    groups = {
        tr(ko="남들이 공개한 것: 텐서", en="published by others: tensors"): published[False],
        tr(ko="남들이 공개한 것: 예약이나 카드 전체", en="published by others: reserved, or the card"): published[True],
        f"{settings}: {peak}": [(_off(row, "peak_bytes"), row["title"]) for row in ours],
        f"{settings}: {reserved}": [(_off(row, "reserved_bytes"), row["title"]) for row in ours],
        f"H100, {theirs}: {reserved}": [
            (row["reserved"] / row["measured"]["reserved"] - 1, row["program"])
            for row in programs
            if row["status"] == "fits" and "reserved" in row["measured"]
        ],
    }
    heads = [
        "",
        tr(ko="측정한 수", en="rows"),
        tr(ko="오차의 평균 (부호 없이)", en="mean error, unsigned"),
        tr(ko="가장 모자란 것", en="shortest"),
        tr(ko="가장 넘친 것", en="most over"),
        tr(ko=f"여유 {margin:.0%}로도 모자란 것", en=f"short even with a margin of {margin:.0%}"),
    ]
    return LeftRows(heads, [[name, *_how_short(found, margin)] for name, found in groups.items()])


def played_t4() -> TableRows:
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


def _how_short(found: list[tuple[float, str]], margin: float) -> list[str]:
    (low, lowest), (high, highest) = min(found), max(found)
    short = Counter(name for off, name in found if (1 + margin) * (1 + off) < 1)
    named = ", ".join(name if times == 1 else f"{name} × {times}" for name, times in short.most_common())
    return [
        str(len(found)),
        f"{mean(abs(off) for off, _ in found):.2%}",
        f"{low:+.2%} {lowest}",
        f"{high:+.2%} {highest}",
        f"{short.total()}" + (f": {named}" if named else ""),
    ]


def _off(row: dict[str, Any], kind: str) -> float:
    return row["predicted"][kind] / row["measured"][kind] - 1


def card_name(said: str) -> str:
    """A card as its source names it, without maker and remarks; "" where the source does not say."""
    return (
        ""
        if said == "?" or said.startswith("not stated")
        else said.removeprefix("NVIDIA ").removeprefix("GeForce ").partition(" (")[0]
    )


def _range(low: int, high: int) -> str:
    return human_bytes(low) if low == high else f"{human_bytes(low)}~{human_bytes(high)}"


def error(row: dict[str, Any]) -> float:
    """Predicted over measured, less 1; of a prediction that is a range, from its nearest end."""
    nearest = row["predicted"]
    if row["low"] is not None and row["high"] is not None:
        nearest = min(max(row["measured"], row["low"]), row["high"])
    return nearest / row["measured"] - 1
