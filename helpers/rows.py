"""Rows of text under heads: a table in a notebook, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from virtual_gpu.drawing.labels import html_table

from .environment import html_rows


class Rows(list):
    """Rows of what prints, under heads; every cell is text, whatever it holds."""

    def __init__(self, heads: Sequence[str], rows: Iterable[Iterable[Any]]):
        super().__init__([str(value) for value in row] for row in rows)
        self.heads = list(heads)

    def __repr__(self) -> str:
        return "\n".join(" | ".join(row) for row in [self.heads, *self])

    def _repr_html_(self) -> str:
        return html_table(self.heads, list(self))


class LeftRows(Rows):
    """Rows whose cells are sentences: text stands on the left, where a notebook would put it on the right."""

    def _repr_html_(self) -> str:
        return html_rows(tuple(self.heads), [[escape(cell) for cell in row] for row in self])
