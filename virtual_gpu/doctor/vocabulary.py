"""Factoring a size: is it tokens × a known vocabulary × 2 or 4 bytes, as logits are? A hint, never a proof."""

from __future__ import annotations

from dataclasses import dataclass

from ..models.bundled import architectures
from ..units import MiB
from .message import Size

SEGMENT = 2 * MiB  # a message names the segment: from 10 MiB on the tensor rounded up to a multiple of this
LEAST = 32 * MiB
TOKENS = 1024  # batch × length is a multiple of it in most runs; a smaller step fits almost every size by chance
MOST_BY_CHANCE = 0.5  # where more fits than this are expected of any size, one says nothing


@dataclass(frozen=True)
class Product:
    """tokens × vocabulary × width, in bytes; `models`: bundled ones that have this vocabulary."""

    tokens: int
    vocabulary: int
    width: int
    models: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return self.tokens * self.vocabulary * self.width


def vocabularies(text: str) -> tuple[dict[int, tuple[str, ...]], bool]:
    """(size → the bundled models that have it, whether only those that the text names)."""
    known: dict[int, list[str]] = {}
    for name, model in architectures().items():
        if size := model["config"].get("vocab_size"):
            known.setdefault(size, []).append(name.split("/")[-1])
    lower = text.lower()
    named = {size: [name for name in names if name.lower() in lower] for size, names in known.items()}
    chosen = {size: tuple(names) for size, names in named.items() if names}
    return (chosen, True) if chosen else ({size: tuple(names) for size, names in known.items()}, False)


def products(tried: Size, known: dict[int, tuple[str, ...]]) -> tuple[list[Product], float]:
    """(what fits, how many would by chance). Empty where the size is too small or chance alone explains as much."""
    if tried.bytes < LEAST:
        return [], 0.0
    low, high = tried.bytes - tried.slack - SEGMENT, tried.bytes + tried.slack
    found, by_chance = [], 0.0
    for size, names in known.items():
        for width in (2, 4):
            step = size * width * TOKENS
            by_chance += min(1.0, (high - low) / step) if step <= high else 0.0
            tokens = high // step * TOKENS
            if tokens and tokens * size * width > low:
                found.append(Product(tokens, size, width, names))
    return (found, by_chance) if by_chance <= MOST_BY_CHANCE else ([], by_chance)
