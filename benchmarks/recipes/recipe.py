"""What a recipe is: the program behind the figures of one source, run on the virtual card from a row's settings.

A module of this package holds `RECIPES`, a tuple of `Recipe`. A recipe reads what a row says (settings, metric, gpu),
never its id, and is run on rows that it has not seen. What it cannot run it refuses with the reason.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from virtual_gpu.cards import card
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.errors import UnknownName

# One measurement, in the format of benchmarks/measured/README.md. settings, model, gpu, note and path are always there.
Row = Mapping[str, Any]


class Refused(Exception):
    """This row cannot be run; the text says why."""


class NotStated(Refused, LookupError, AttributeError):
    """The row lacks what the program needs."""


class Stated(dict):
    """What a row says: `NotStated` for what it does not say, also as an attribute (`hasattr` is False)."""

    def __missing__(self, name: str) -> Any:
        raise NotStated(f"the row does not state {name!r}")

    def __getattr__(self, name: str) -> Any:
        return self[name]


# What a setting may be: a whole number above 0, any number, anything (it changes nothing here), or one of these values.
SIZE, NUMBER, ANY = "a whole number above 0", "a number", "anything"
Allowed = str | Collection[Any]


@dataclass(frozen=True)
class Prediction:
    """What the virtual card says of a row.

    nbytes: in the row's metric; None where the metric is no number of bytes. low, high: where it is a range (a context
    that is known from messages, say). died: the program ran out of memory. note: what a reader should know. agrees: of
    a row without bytes, whether it is as the row says. measured: bytes of a row that states them in words. given: the
    row is what the recipe starts from: shown, and counted nowhere.
    """

    nbytes: int | None
    low: int | None = None
    high: int | None = None
    died: bool = False
    agrees: bool | None = None
    measured: int | None = None
    given: bool = False
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """The program of one source.

    name: of the recipe, in tables. what, what_ko: which program, in words, for README.md and README.ko.md. handles:
    whether it is for this row. predict: a row → bytes or a `Prediction`; raises `Refused`, and torch.OutOfMemoryError
    where the program dies on the card. fitted, fitted_ko: what is fitted, in words ("" for nothing); fitted_on: on
    which rows (ids), which are shown and counted nowhere. packages: the libraries that the program needs beside the
    running ones, as pip takes them; the row is run in an environment of their own. peers: what other predictors
    published for the row, name → bytes. fast: whether the row is cheap enough for `make test` (a second or so).
    settings: every setting that the program takes, or whose only value it has, name → what it may be; a row that states
    another setting, or another value, is refused. None: the program sees to that itself.
    """

    name: str
    what: str
    handles: Callable[[Row], bool]
    predict: Callable[[Row], int | Prediction]
    fitted: str = ""
    fitted_on: frozenset[str] = frozenset()
    packages: Callable[[Row], tuple[str, ...]] = lambda row: ()
    peers: Callable[[Row], Mapping[str, int]] = lambda row: {}
    fast: Callable[[Row], bool] = lambda row: False
    what_ko: str = ""
    fitted_ko: str = ""
    settings: Mapping[str, Allowed] | None = None

    def of(self, row: Row) -> Row:
        """The row as `predict` takes it: what it does not say is `NotStated`, whole numbers in words are numbers.

        Refused for a setting, or a value of one, that the program does not know.
        """
        settings = Stated({name: _number(value) for name, value in row["settings"].items()})
        for name, value in settings.items() if self.settings is not None else ():
            if name not in self.settings:
                raise Refused(f"what the setting {name}={value!r:.60} changes is not known here")
            if not _is(value, self.settings[name]):
                allowed = self.settings[name]
                known = allowed if isinstance(allowed, str) else ", ".join(map(repr, list(allowed)[:6]))
                raise Refused(f"the setting {name}={value!r:.60}: the program here takes {known}")
        return Stated({**row, "settings": settings})


def _number(value: Any) -> Any:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is(value: Any, allowed: Allowed) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if allowed == SIZE:
        return whole and 0 < value < 2**31
    if allowed == NUMBER:
        return whole or (isinstance(value, float) and math.isfinite(value))
    return allowed == ANY or value in list(allowed)


def from_source(*names: str, kinds: tuple[str, ...] = ("measurement",)) -> Callable[[Row], bool]:
    """Whether a row is of one of these sources and kinds."""
    return lambda row: row["source"] in names and row["kind"] in kinds


@cache
def recipes() -> tuple[Recipe, ...]:
    """Every recipe of this package."""
    package = importlib.import_module("benchmarks.recipes")
    found = []
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        found += getattr(importlib.import_module(f"benchmarks.recipes.{module.name}"), "RECIPES", ())
    return tuple(found)


# Cards that are measured and not in the catalogue, as another card of their chip with another number of
# multiprocessors (114: NVIDIA H100 PCIe data sheet; 66: 8,448 cores at 128 each, geforce.com), which a sum's buffers
# hang on (rules/reductions.py).
_VARIANTS = {"H100 PCIe": ("H100", 114), "RTX 4070 Ti SUPER": ("RTX 4080", 66)}
_FORM = re.compile(r"[- ](SXM\d?|PCIE?|\d+ ?GB)\b", re.IGNORECASE)  # what a chip is called besides: "A800-SXM4-80GB"
_SIZE = re.compile(r"(\d+) ?GB\b")


def gpu_of(row: Row, default: str = "A100-80GB", **options: Any) -> VirtualGPU:
    """A new virtual card as the row names it ("NVIDIA H100 80GB HBM3"); `default` where the row states none.

    Refused for a name that the catalogue does not know: which one it is meant to be must not be guessed.
    """
    name = str(row.get("gpu") or "")
    if not name or name.lower().startswith("not stated"):
        return VirtualGPU(card(default), **options)
    bare = name.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()
    if bare in _VARIANTS:
        like, multiprocessors = _VARIANTS[bare]
        spec = replace(card(like), name=bare, device_name=name, multiprocessors=multiprocessors)
        return VirtualGPU(spec, **options)
    for candidate in (name, bare, _FORM.sub("", bare)):
        try:
            spec = card(candidate)
        except UnknownName:
            continue
        stated = _SIZE.search(bare)
        if not stated or abs(int(stated[1]) * 2**30 / spec.memory_bytes - 1) < 0.1:
            return VirtualGPU(spec, **options)
    raise Refused(f"the card {name!r} is not in virtual_gpu/cards.json")
