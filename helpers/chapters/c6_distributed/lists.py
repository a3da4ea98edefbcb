"""Collectives over lists whose r-th tensor is rank r's: what they do, without ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reduce_scatter(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rank r's r-th part of the sum of all."""
    return list(sum(tensors).chunk(len(tensors)))


def all_gather(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All parts one after another, for every rank."""
    return [torch.cat(list(parts)) for _ in parts]
