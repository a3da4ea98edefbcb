"""Rows of results under heads in the reader's language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from virtual_gpu.language import tr

from ...rows import Rows
from ...rows import table as rows_table


def _columns() -> dict[str, tuple[str, str]]:
    """Key → head, and how a number of that column is written."""
    return {
        "setting": (tr(ko="설정", en="setting"), ""),
        "distribution": (tr(ko="분포", en="numbers"), ""),
        "method": (tr(ko="방법", en="method"), ""),
        "block_size": (tr(ko="블록 크기", en="block size"), ","),
        "threshold": (tr(ko="문턱", en="threshold"), ""),
        "wasted": (tr(ko="낭비된 코드", en="codes wasted"), ""),
        "error": (tr(ko="상대 오차", en="relative error"), ".1%"),
        "transposed": (tr(ko="전치했을 때", en="transposed"), ".1%"),
        "others": (tr(ko="나머지의 상대 오차", en="error of the others"), ".1%"),
        "largest": (tr(ko="가장 큰 오차", en="largest error"), ".2f"),
        "bits_each": (tr(ko="파라미터당 비트", en="bits a parameter"), ".2f"),
        "loss": (tr(ko="손실", en="loss"), ".2f"),
        "capitals": (tr(ko="맞힌 수도", en="capitals"), ""),
        "zeros": (tr(ko="0이 된 값", en="became 0"), ".1%"),
        "update": (tr(ko="가장 큰 갱신", en="largest update"), ",.2f"),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Rows of results, each with the same keys, under the heads of `_columns`."""
    return rows_table(rows, _columns())
