"""What a checkpointed block keeps all the same, so as not to compute it again: PyTorch's selective checkpointing.

A result is named by what makes it: "attention", or a layer's sizes as in "4096x14336" (in × out, of all matrices of a
block that have them). ":12" behind it: in the first twelve of the model's blocks. A script says it so too
(`plan.files.settings`). What a byte that is kept saves is the inner dimension of its product: 2·m·n·k FLOPs for m·n
numbers.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..errors import WrongValue
from ..language import tr
from .adapters import linear_layers, sides

ATTENTION = "attention"
_NAME = re.compile(rf"({ATTENTION}|[1-9]\d{{0,8}}x[1-9]\d{{0,8}})(?::([1-9]\d{{0,4}}))?")


def kept_results(value: Any) -> tuple[str, ...]:
    """The names, checked; WrongValue otherwise."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in values):
        raise WrongValue(
            tr(
                ko=f"kept_results={value!r:.200}: 'attention'이나 '4096x14336'(입력 × 출력)의 목록이어야 한다. 블록 "
                "가운데 열둘만이면 뒤에 ':12'를 붙인다.",
                en=f"kept_results={value!r:.200}: a list of 'attention' and '4096x14336' (in × out); ':12' behind it "
                "means in twelve of the blocks.",
            )
        )
    names = [_NAME.fullmatch(one)[1] for one in values]
    if len(set(names)) < len(names):
        raise WrongValue(
            tr(
                ko=f"kept_results={value!r:.200}: 한 이름이 두 번 있다.",
                en=f"kept_results={value!r:.200}: a name stands there twice.",
            )
        )
    return tuple(values)


def is_uniform(kept: Sequence[str]) -> bool:
    """Whether every block keeps the same."""
    return not any(":" in one for one in kept)


def of_blocks(kept: Sequence[str], blocks: int) -> list[frozenset[str]]:
    """For each of the model's blocks, the names of what it keeps."""
    parts = [_NAME.fullmatch(one).groups() for one in kept]
    return [frozenset(n for n, most in parts if most is None or block < int(most)) for block in range(blocks)]


def name_of(inputs: int, outputs: int) -> str:
    """The name of what a linear layer of these sizes makes."""
    return f"{inputs}x{outputs}"


def context_fn(
    kept: Sequence[str], blocks: int, model: nn.Module, seen: Counter[str] | None = None
) -> Callable[[], tuple[Any, Any]]:
    """What `torch.utils.checkpoint.checkpoint` asks for each block that it runs, so that the block keeps its results.

    blocks: of the model; they come in turn, so of any that follow each other as many keep a result as should. seen: the
    bytes of all that blocks could keep are added to it, by name. WrongValue for a name that no linear layer of the
    model has, and where a result could not be kept without other gradients.
    """
    there = [ATTENTION, *dict.fromkeys(name_of(*sides(layer)) for layer in linear_layers(model).values())]
    unknown = [name for name in (one.partition(":")[0] for one in kept) if name not in there]
    if unknown:
        raise WrongValue(
            tr(
                ko=f"kept_results: {unknown[0]}인 선형층이 이 모델에 없다. 있는 것: {', '.join(there)}",
                en=f"kept_results: the model has no linear layer {unknown[0]}. There are: {', '.join(there)}",
            )
        )
    if any(one.partition(":")[0] != ATTENTION for one in kept) and _clamps(model.config):
        raise WrongValue(
            tr(
                ko="kept_results: 이 모델은 층의 결과를 제자리에서 고쳐(clip_qkv) 남길 수 없다.",
                en="kept_results: this model changes what its layers give in place (clip_qkv), so it cannot be kept.",
            )
        )
    turns = itertools.cycle(of_blocks(kept, blocks))
    return lambda: create_selective_checkpoint_contexts(functools.partial(_policy, next(turns), seen))


def _clamps(config: Any) -> bool:
    """OLMo's and DBRX's: what a kept result is changed to in place would be computed with once more."""
    return any(getattr(part, "clip_qkv", None) for part in (config, getattr(config, "attn_config", None)))


def _policy(
    names: frozenset[str], seen: Counter[str] | None, context: Any, operation: Any, *operands: Any, **more: Any
) -> CheckpointPolicy:
    name = numbers = None
    if operation in _PRODUCTS:
        name, numbers = name_of(*operands[-1].shape), operands[-2].shape[0] * operands[-1].shape[1]
        width = operands[-2].itemsize
    elif _attends(operation):
        query, _, value = operands[:3]
        name, numbers, width = ATTENTION, query.numel() // query.shape[-1] * value.shape[-1], query.itemsize
        if (name in names or seen is not None) and _drops(operation, operands, more):
            name = None  # the numbers that it would draw are drawn by the next dropout
    elif str(operation) == "bitsandbytes.gemm_4bit.default":  # of a card; virtual layers have a product of their own
        out, inputs = operands[2]
        name, numbers, width = name_of(inputs, out), operands[0].numel() // inputs * out, operands[0].itemsize
    if name is not None and seen is not None:
        seen[name] += numbers * width
    return CheckpointPolicy.MUST_SAVE if name in names else CheckpointPolicy.PREFER_RECOMPUTE


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@functools.cache
def _attends(operation: Any) -> bool:
    """Whether it is one of sdpa's kernels that make no matrix of length × length."""
    return str(operation).startswith("aten._scaled_dot_product")


def _drops(operation: Any, operands: Sequence[Any], more: Mapping[str, Any]) -> bool:
    """Whether an attention has dropout."""
    place = [argument.name for argument in operation._schema.arguments].index("dropout_p")
    return bool(operands[place] if place < len(operands) else more.get("dropout_p", 0.0))
