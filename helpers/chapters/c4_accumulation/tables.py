"""Rows of results under heads in the reader's language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from virtual_gpu.drawing.labels import category_label
from virtual_gpu.language import tr

from ...rows import Rows
from ...rows import table as rows_table


def table(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Rows of results, each with the same keys, under the heads of `_columns`; a "kind" of memory by its label."""
    labelled = [{**row, "kind": category_label(row["kind"])} if "kind" in row else row for row in rows]
    return rows_table(labelled, _columns())


def _columns() -> dict[str, tuple[str, str]]:
    """Key → head, and how a number of that column is written."""
    return {
        "split": (tr(ko="나누는 방법", en="split"), ""),
        "steps": (tr(ko="옵티마이저 스텝", en="optimizer steps"), ","),
        "first": (tr(ko="처음 손실", en="first loss"), ".3f"),
        "last": (tr(ko="마지막 손실", en="last loss"), ".3f"),
        "count": ("B", ""),
        "error": (tr(ko="벗어난 정도", en="error"), ".2f"),
        "times_root": (tr(ko="벗어난 정도 × √B", en="error × √B"), ".1f"),
        "kind": (tr(ko="종류", en="kind"), ""),
        "tflop": (tr(ko="한 스텝의 연산 (TFLOP)", en="TFLOP a step"), ".3f"),
        "milliseconds": (tr(ko="한 스텝 (ms)", en="step (ms)"), ".1f"),
        "samples": (tr(ko="초당 샘플", en="samples a second"), ".0f"),
        "fits": (tr(ko="들어가는 가장 큰 마이크로 배치", en="largest micro-batch that fits"), ""),
        "accumulation": (tr(ko="누적 횟수", en="accumulation steps"), ""),
    }
