"""Chapter 8: a few numbers under heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from virtual_gpu.drawing.labels import html_table


class Table(list):
    """Rows of anything that prints, under heads."""

    def __init__(self, heads: str, rows: Iterable[Iterable[Any]]):
        super().__init__([str(value) for value in row] for row in rows)
        self.heads = [head.strip() for head in heads.split(",")]

    def _repr_html_(self) -> str:
        return html_table(self.heads, list(self))

    def __repr__(self) -> str:
        return "\n".join(" | ".join(row) for row in [self.heads, *self])
