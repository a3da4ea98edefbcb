"""Chapter 8: a few numbers under heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...rows import Rows


class Table(Rows):
    """Rows of anything that prints, under heads that one text names, with commas between them."""

    def __init__(self, heads: str, rows: Iterable[Iterable[Any]]):
        super().__init__([head.strip() for head in heads.split(",")], rows)
