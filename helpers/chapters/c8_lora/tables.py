"""Chapter 8: a few numbers under heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from virtual_gpu.step.largest import LargestModels

from ...rows import Rows
from ...watched import telling


class Table(Rows):
    """Rows of anything that prints, under heads that one text names, with commas between them."""

    def __init__(self, heads: str, rows: Iterable[Iterable[Any]]):
        super().__init__([head.strip() for head in heads.split(",")], rows)


def largest_models(*gpus: str, **settings: Any) -> LargestModels:
    """`LargestModels` of these GPUs, which says what it is looking at: it takes the longest of all in the chapter."""
    with telling() as told:
        return LargestModels(gpus, progress=told, **settings)
