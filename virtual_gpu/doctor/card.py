"""Which card a message speaks of: by its name where one stands there, else by the capacity that it prints."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..cards import CATALOG, GPUSpec, Range
from ..units import GiB
from .message import Size


@dataclass(frozen=True)
class Guess:
    """The cards that fit, the likeliest first; empty: none in the catalogue. `name`: what `--gpu` takes."""

    cards: tuple[str, ...]
    name: str


def guess(total: Size | None, text: str = "") -> Guess | None:
    """The cards of the catalogue whose published capacity is this one's, those that the text names before others."""
    if total is None or not GiB <= total.bytes <= 1024 * GiB:
        return None
    fits = [spec for spec in CATALOG.values() if spec.platform == "cuda" and _distance(spec, total) <= total.slack]
    fits.sort(key=lambda spec: (not _named(spec, text), abs(spec.memory_bytes - total.bytes)))
    names = tuple(spec.name for spec in fits)
    return Guess(names, names[0] if names else f"{total.bytes / GiB:.2f}GiB")


def _distance(spec: GPUSpec, total: Size) -> int:
    seen = spec.memory_seen or Range(spec.memory_bytes, spec.memory_bytes)
    return max(0, seen.low - total.bytes, total.bytes - seen.high)


def _named(spec: GPUSpec, text: str) -> bool:
    names = (spec.name, spec.device_name, *spec.also_called)
    return any(re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE) for name in names)
