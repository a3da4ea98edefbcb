"""How deep a model is, and shallower or deeper ones of its kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .build import (
    build_model,
    count_parameters,
)


def text_config(config: Any) -> Any:
    """The part of a config that says how deep and how long the language model is: a part where it also sees images."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def with_depth(config: Any, layers: int) -> Any:
    """A copy of the config with that many layers."""
    config = copy.deepcopy(config)
    text = text_config(config)
    for name, value in {
        **{n: kinds[:layers] for n, kinds in _of_layers(text).items()},
        "num_hidden_layers": layers,
    }.items():
        setattr(text, name, value)
    if (getattr(text, "num_kv_shared_layers", None) or 0) >= layers:
        text.num_kv_shared_layers = 0  # there is no earlier layer left to share with
    return config


def shallow_depths(config: Any) -> tuple[tuple[int, int, int], int] | None:
    """The three depths to run instead of the config's, and how many steps after the first it lies.

    Layers that take turns count by whole turns. None where shallow runs are not less work, where layers differ without
    taking turns, or where there are two depths (an encoder-decoder).
    """
    text = text_config(config)
    depth = text.num_hidden_layers
    if getattr(
        text, "num_kv_shared_layers", 0
    ):  # the last layers reuse what earlier ones made: no layer is like another
        return None
    kinds = [*zip(*_of_layers(text).values(), strict=True)] or [()] * depth
    turn = next(n for n in range(1, depth + 1) if depth % n == 0 and kinds == kinds[:n] * (depth // n))
    if depth <= 5 * turn or getattr(config, "is_encoder_decoder", False):
        return None
    return (2 * turn, 3 * turn, 4 * turn), depth // turn - 2


def _of_layers(config: Any) -> dict[str, list]:
    """The lists of a config that are as long as the model is deep: they say something of each layer."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple))}
    return {name: value for name, value in lists.items() if value and len(value) == config.num_hidden_layers}


def grows_evenly(config: Any, depths: Sequence[int], more: int) -> bool:
    """Whether the parameters `more` steps after the first two of these depths are what a straight line says.

    They are not where another kind of layer only comes later (experts after the first dense ones).
    """
    one, two = (_parameters_of(with_depth(config, layers)) for layers in depths[:2])
    return _parameters_of(config) == one + more * (two - one)


_parameters: dict[tuple[type, str], int] = {}  # of a config, all that it says


def _parameters_of(config: Any) -> int:
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _parameters:
        _parameters[key] = count_parameters(build_model(config, torch.float16))
    return _parameters[key]
