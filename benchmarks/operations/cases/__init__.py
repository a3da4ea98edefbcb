"""Single operations as training of language models uses them, and PyTorch's own samples of nearly all of them.

A case is a name and a function that makes the inputs and gives back what is to be recorded. Nothing in it depends on
random contents of the GPU: what a shape depends on is made on the CPU from a seed. So the same case runs on a card and
under `virtual_gpu.cuda`. Cases and their names are what the records hold: a new one is added, an old one stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from . import (
    attention,
    elementwise,
    indexing,
    layers,
    linalg,
    modules,
    optimizers,
    parts,
    products,
    quantized,
    reductions,
)
from .run import Case
from .samples import samples

FAMILIES: dict[str, Callable[[], Iterator[tuple]]] = {
    "attention": attention.attention,
    "attention_forced": attention.forced,
    "products": products.products,
    "cold_products": products.cold_products,
    "low_precision": products.low_precision,
    "embedding": layers.embeddings,
    "norms": layers.norms,
    "losses": layers.losses,
    "elementwise": elementwise.elementwise,
    "reductions": reductions.reductions,
    "sorting": reductions.sorting,
    "indexing": indexing.indexing,
    "joining": indexing.joining,
    "convolutions": modules.convolutions,
    "recurrent": modules.recurrences,
    "optimizers": optimizers.optimizers,
    "scaling": optimizers.scaling,
    "checkpoints": parts.checkpoints,
    "linalg": linalg.linalg,
    "bitsandbytes": quantized.bitsandbytes,
    "copies": parts.copies,
    "model_parts": parts.model_parts,
}


def by_hand() -> Iterator[Case]:
    """All cases that are written here; names are unique."""
    for family, cases in FAMILIES.items():
        for name, *make in cases():
            yield f"{family}: {name}", functools.partial(*make)


PARTS = {"hand": by_hand, "samples": samples}
