"""The chapters, one folder each: its machinery, its pictures, its panel and its exercises together."""

from __future__ import annotations

import importlib

from virtual_gpu.language import tr
from virtual_gpu.units import choose

from ..self_check import Exercise

CHAPTERS = {
    1: "c1_numbers",
    2: "c2_quantization",
    3: "c3_memory",
    4: "c4_accumulation",
    5: "c5_checkpointing",
    6: "c6_distributed",
    7: "c7_lora",
    8: "c8_planner",
}


_opened: dict[str, Exercise] = {}


def exercise(number: str) -> Exercise:
    """The exercise with that number ("3-1"); ValueError names the ones there are."""
    known = {name: make for chapter in CHAPTERS.values() for name, make in _exercises_of(chapter).items()}
    number = choose(number, known, tr(ko="연습 문제", en="exercise"))
    if number not in _opened:
        _opened[number] = known[number]()
    return _opened[number]


def _exercises_of(folder: str) -> dict:
    """number → a function that makes the exercise."""
    return importlib.import_module(f".{folder}.exercises", __name__).EXERCISES
