"""Which card each part of a model lies on where its layers are spread over several: transformers' `device_map`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import NotSupported
from ..language import tr
from .build import build_model


def device_map(config: Any, layers: Sequence[int]) -> dict[str, int]:
    """Part of the model → its card: the embedding on the first, what follows the layers on the last.

    layers: how many each card gets, in their order. What is tied to the embedding lies beside it. NotSupported for a
    model without a list of as many layers.
    """
    model = build_model(config, torch.float16)
    blocks, stack = _blocks_of(model)
    cards = [card for card, number in enumerate(layers) for _ in range(number)]
    if len(stack) != len(cards):
        raise NotSupported(f"device_map: {len(stack)} layers, {len(cards)} dealt")
    last, found, passed = len(layers) - 1, {}, False
    tied = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    for name, module in _parts(model, blocks):
        if name == blocks:
            found |= {f"{blocks}.{number}": card for number, card in enumerate(cards)}
            passed = True
        elif any(id(parameter) in tied for parameter in module.parameters()):
            found[name] = 0  # an embedding, and the head that is tied to it
        else:
            found[name] = last if passed else 0
    return found


def _blocks_of(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """(the name of the list of a model's layers, the list): the longest one."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
    if not lists:
        raise NotSupported(
            tr(
                ko="device_map: 이 모델에는 층의 목록이 없다.",
                en="device_map: this model has no list of layers.",
            )
        )
    return max(lists, key=lambda one: len(one[1]))


def _parts(model: torch.nn.Module, blocks: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The parts of a model of which each lies on one card: its children, but for what the layers are in."""
    for name, module in model.named_modules():
        above = name.rpartition(".")[0]
        around = not above or blocks.startswith(f"{above}.") or blocks == above
        if name and around and above != blocks and not blocks.startswith(f"{name}."):
            yield name, module
