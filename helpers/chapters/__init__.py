"""The chapters, one folder each: its machinery, its pictures, its panel and its exercises together."""

from __future__ import annotations

import importlib

from virtual_gpu.language import tr
from virtual_gpu.units import choose

from ..self_check import Case, Exercise

CHAPTERS = {
    1: "c1_numbers",
    2: "c2_quantization",
    3: "c3_memory",
    4: "c4_accumulation",
    5: "c5_checkpointing",
    6: "c6_distributed",
    7: "c7_split",
    8: "c8_lora",
    9: "c9_planner",
    10: "c10_clinic",
    11: "c11_outside",
    12: "c12_two_models",
    13: "c13_images",
}


_opened: dict[str, Exercise] = {}


def exercise(number: str) -> Exercise:
    """The exercise with that number ("3-1"); ValueError names the ones there are."""
    return _open(number, "EXERCISES", tr(ko="연습 문제", en="exercise"))


def case(number: str) -> Case:
    """The case with that number ("3-A"); ValueError names the ones there are."""
    return _open(number, "CASES", tr(ko="사건", en="case"))


def _open(number: str, kind: str, what: str) -> Exercise:
    # Its own chapter is imported alone, which takes a second less; all of them only to say which there are.
    home = str(number).partition("-")[0]
    known = of_chapter(int(home), kind) if home in map(str, CHAPTERS) else {}
    if not isinstance(number, str) or number not in known:
        known = {name: make for chapter in CHAPTERS for name, make in of_chapter(chapter, kind).items()}
        number = choose(number, known, what)
    if number not in _opened:
        _opened[number] = known[number]()
    return _opened[number]


def of_chapter(chapter: int, kind: str = "EXERCISES") -> dict:
    """number → a function that makes it, for the chapter's EXERCISES or CASES."""
    return getattr(importlib.import_module(f".{CHAPTERS[chapter]}.exercises", __name__), kind, {})
