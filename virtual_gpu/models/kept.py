"""What a checkpointed block keeps all the same, so as not to compute it again: PyTorch's selective checkpointing.

A result is named by what makes it: "attention", or a layer's sizes as in "4096x14336" (in × out, of all matrices of a
block that have them). ":12" behind it: in the last twelve of the model's blocks, whose results go first in backward, so
that no other twelve take less at any moment. "@cpu" behind the name: it waits in the CPU's RAM, in the blocks that do
not keep it on the card. A script says it so too (`plan.files.keeping`). What a byte that is kept saves is the inner
dimension of its product: 2·m·n·k FLOPs for m·n numbers.

PyTorch's policies have a name for the CPU, MUST_CPU_OFFLOAD, which torch.compile alone carries out: run eagerly, such a
result is computed again (torch/utils/checkpoint.py, _CachingTorchDispatchMode, 2.13). So a mode of our own lies beneath
PyTorch's, and is asked for what that does not keep.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..errors import WrongValue
from ..language import tr
from .adapters import linear_layers, sides

ATTENTION, CPU = "attention", "@cpu"
_NAME = re.compile(rf"({ATTENTION}|[1-9]\d{{0,8}}x[1-9]\d{{0,8}})({CPU})?(?::([1-9]\d{{0,4}}))?")
Watch = Callable[[str, int, bool, Any, Sequence[Any], Mapping[str, Any]], Any]
Leave = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


def kept_results(value: Any) -> tuple[str, ...]:
    """The names, checked; WrongValue otherwise."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in values):
        raise WrongValue(
            tr(
                ko=f"kept_results={value!r:.200}: 'attention'이나 '4096x14336'(입력 × 출력)의 목록이어야 한다. 블록 "
                "가운데 마지막 열둘만이면 뒤에 ':12'를, CPU의 RAM에 두려면 '@cpu'를 붙인다.",
                en=f"kept_results={value!r:.200}: a list of 'attention' and '4096x14336' (in × out); ':12' behind it "
                "means in the last twelve of the blocks, '@cpu' in the CPU's RAM.",
            )
        )
    names = [_NAME.fullmatch(one).group(1, 2) for one in values]
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


def counts(kept: Sequence[str]) -> tuple[int, int]:
    """How many results stay on the card, and how many wait in the CPU's RAM."""
    away = sum(CPU in one for one in kept)
    return len(kept) - away, away


def moves(kept: Sequence[str]) -> bool:
    """Whether any of it waits in the CPU's RAM."""
    return counts(kept)[1] > 0


def of_blocks(kept: Sequence[str], blocks: int) -> list[frozenset[str]]:
    """For each of the model's blocks, the names of what it keeps; with "@cpu" what it keeps in the CPU's RAM."""
    parts = [_NAME.fullmatch(one).groups() for one in kept]
    there = [{n + (cpu or "") for n, cpu, most in parts if most is None or block >= blocks - int(most)}
             for block in range(blocks)]  # fmt: skip
    return [frozenset(one for one in names if one.removesuffix(CPU) == one or one.removesuffix(CPU) not in names)
            for names in there]  # fmt: skip


def name_of(inputs: int, outputs: int) -> str:
    """The name of what a linear layer of these sizes makes."""
    return f"{inputs}x{outputs}"


def context_fn(
    kept: Sequence[str],
    blocks: int,
    model: nn.Module,
    watch: Watch | None = None,
    leave: Leave | None = None,
) -> Callable[[], tuple[Any, Any]]:
    """What `torch.utils.checkpoint.checkpoint` asks for each block that it runs, so that the block keeps its results.

    blocks: of the model; they come in turn, so of any that follow each other as many keep a result as should. watch:
    computes each result that blocks could keep: told its name, the how-manieth of it in the block, whether it is
    computed again, the operation and its operands. leave: sends
    a tensor to the CPU and gives what brings it back (`models.offloaded`). WrongValue for a name that no linear layer
    of the model has, and where a result could not be kept without other gradients.
    """
    there = [ATTENTION, *dict.fromkeys(name_of(*sides(layer)) for layer in linear_layers(model).values())]
    names = [_NAME.fullmatch(one)[1] for one in kept]
    unknown = [name for name in names if name not in there]
    if unknown:
        raise WrongValue(
            tr(
                ko=f"kept_results: {unknown[0]}인 선형층이 이 모델에 없다. 있는 것: {', '.join(there)}",
                en=f"kept_results: the model has no linear layer {unknown[0]}. There are: {', '.join(there)}",
            )
        )
    if {*names} - {ATTENTION} and clamps(model.config):
        raise WrongValue(
            tr(
                ko="kept_results: 이 모델은 층의 결과를 제자리에서 고쳐(clip_qkv) 남길 수 없다.",
                en="kept_results: this model changes what its layers give in place (clip_qkv), so it cannot be kept.",
            )
        )
    turns = itertools.cycle(of_blocks(kept, blocks))
    if watch is None and not moves(kept):
        return lambda: create_selective_checkpoint_contexts(functools.partial(_policy, next(turns)))

    def contexts() -> tuple[Any, Any]:
        names, waiting = next(turns), []
        selective = create_selective_checkpoint_contexts(functools.partial(_policy, names))
        first, again = (_Results(names, waiting, watch, leave, one) for one in (False, True))
        return _beneath(first, selective[0]), _beneath(again, selective[1])

    return contexts


@contextlib.contextmanager
def _beneath(ours: TorchDispatchMode, selective: TorchDispatchMode) -> Iterator[None]:
    """Both modes; ours is asked for what PyTorch's does not keep."""
    with ours, selective:
        yield


class _Results(TorchDispatchMode):
    """Sends to the CPU what waits there, in the order in which it is made, and brings it back in the same."""

    def __init__(
        self, names: frozenset[str], waiting: list[Any], watch: Watch | None, leave: Leave | None, again: bool
    ) -> None:
        super().__init__()
        self.names, self.waiting, self.watch, self.leave, self.again = names, waiting, watch, leave, again
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, operands=(), more=None):
        more = more or {}
        name = result_name(operation, operands, more)
        moved = name is not None and name + CPU in self.names
        if moved and self.again:
            return tree_map(lambda one: one() if callable(one) else one, self.waiting.pop(0))
        if name is None or self.watch is None:
            out = operation(*operands, **more)
        else:
            out = self.watch(name, self.places[name], self.again, operation, operands, more)
            self.places[name] += 1
        if moved:
            self.waiting.append(tree_map_only(torch.Tensor, self.leave, out))
        return out


def clamps(config: Any) -> bool:
    """OLMo's and DBRX's: what a kept result is changed to in place would be computed with once more."""
    return any(getattr(part, "clip_qkv", None) for part in (config, getattr(config, "attn_config", None)))


def _policy(names: frozenset[str], context: Any, operation: Any, *operands: Any, **more: Any) -> CheckpointPolicy:
    name = result_name(operation, operands, more)
    return CheckpointPolicy.MUST_SAVE if name in names else CheckpointPolicy.PREFER_RECOMPUTE


def result_name(operation: Any, operands: Sequence[Any], more: Mapping[str, Any]) -> str | None:
    """The name of what an operation makes; None where blocks cannot keep it."""
    if operation in _PRODUCTS:
        return name_of(*operands[-1].shape)
    if _attends(operation):  # with dropout, the numbers that it would draw are drawn by the next dropout
        return None if _drops(operation, operands, more) else ATTENTION
    if str(operation) == "bitsandbytes.gemm_4bit.default":  # of a card; virtual layers have a product of their own
        return name_of(*operands[2][::-1])
    return None


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@functools.cache
def _attends(operation: Any) -> bool:
    """Whether it is one of sdpa's kernels that make no matrix of length × length."""
    return str(operation).startswith("aten._scaled_dot_product")


def _drops(operation: Any, operands: Sequence[Any], more: Mapping[str, Any]) -> bool:
    """Whether an attention has dropout."""
    place = [argument.name for argument in operation._schema.arguments].index("dropout_p")
    return bool(operands[place] if place < len(operands) else more.get("dropout_p", 0.0))
