"""Rows of text under heads: a table in a notebook, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> Rows:
    """Rows of results, each a mapping with the same keys.

    columns: key → (its head in the reader's language, how a number of that column is written); a key that is not there
    is its own head.
    """
    heads = [columns.get(key, (key, ""))[0] for key in rows[0]]
    return Rows(heads, [[_written(value, columns.get(key, ("", ""))[1]) for key, value in row.items()] for row in rows])


def _written(value: Any, how: str) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return "–" if value is None else str(value)
    return format(value, how)
