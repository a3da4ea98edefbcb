"""The lines of a script that switch checkpointing on, and say what blocks keep all the same.

As `models.kept` has it, in which it is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...models.configs import load_config
from ...models.depth import text_config
from ...models.kept import ATTENTION, CPU, moves, of_blocks

if TYPE_CHECKING:
    from ..plans import Plan

_CHECKPOINTING = """if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.23
    model.activation_checkpointing_enable({arguments})
else:
    model.gradient_checkpointing_enable({arguments})
"""
_FOUR_BIT_PRODUCT = """    if "gemm_4bit" in str(operation):  # bitsandbytes': the input, packed weights, (out, in)
        return tuple(operands[2])[::-1]
"""
_KEEPING = """kept = {kept}  # by each block
{moved}if model.config.get_text_config().num_hidden_layers != len(kept):
    raise SystemExit("The plan was made for another model: what its blocks keep does not fit this one.")
products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
turns = itertools.cycle({turns})


def name_of(operation, operands):
    \"""A result's name: "attention", or its layer's sizes; None of what no block keeps.\"""
    if str(operation).startswith("aten._scaled_dot_product"):
        return "attention"
{four_bits}    return tuple(operands[-1].shape) if operation in products else None

{moving}
def contexts():
    \"""Of the next block: its results that are not computed again.\"""
    {names} = next(turns)

    def policy(context, operation, *operands, **_):
        keeps = name_of(operation, operands) in names
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    {contexts}


"""
_SELECTIVE = "create_selective_checkpoint_contexts(policy)"
# PyTorch's policy of that name, MUST_CPU_OFFLOAD, is carried out by torch.compile alone (2.13).
_MOVING = """
def leave(tensor):
    \"""Copy it to the CPU's RAM, and give what copies it back.\"""
    device, there = tensor.device, torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    there.copy_(tensor, non_blocking=True)
    return lambda: there.to(device, non_blocking=True)


class Moving(TorchDispatchMode):
    \"""Beneath PyTorch's own mode: what leaves comes back in the same order.\"""

    def __init__(self, names, waiting, again):
        super().__init__()
        self.names, self.waiting, self.again = names, waiting, again

    def __torch_dispatch__(self, operation, types, operands=(), more=None):
        moved = name_of(operation, operands) in self.names
        if moved and self.again:
            return tree_map(lambda one: one() if callable(one) else one, self.waiting.pop(0))
        out = operation(*operands, **(more or {}))
        if moved:
            self.waiting.append(tree_map_only(torch.Tensor, leave, out))
        return out


@contextlib.contextmanager
def beneath(moving, selective):
    with moving, selective:
        yield

"""
_BOTH = f"""waiting, selective = [], {_SELECTIVE}
    moving = (Moving(away, waiting, again) for again in (False, True))
    return tuple(map(beneath, moving, selective))"""


def checkpointing(plan: Plan) -> str:
    """The lines that switch gradient checkpointing on, and say what blocks keep all the same; empty without."""
    if not plan.recipe.checkpointing:
        return ""
    arguments = '{"use_reentrant": False}' + (", offload=not args.cpu" if plan.recipe.offload else "")
    if not plan.recipe.kept:
        return _CHECKPOINTING.format(arguments=arguments)
    blocks = of_blocks(plan.recipe.kept, text_config(load_config(plan.request.model)).num_hidden_layers)
    away = moves(plan.recipe.kept)
    moved = _list([{one.removesuffix(CPU) for one in names if one.endswith(CPU)} for names in blocks])
    lines = _KEEPING.format(
        kept=_list([{one for one in names if not one.endswith(CPU)} for names in blocks]),
        moved=f"moved = {moved}  # to the CPU's RAM\n" if away else "",
        turns="zip(kept, moved)" if away else "kept",
        four_bits=_FOUR_BIT_PRODUCT if plan.recipe.method == "qlora" else "",
        moving=_MOVING if away else "",
        names="names, away" if away else "names",
        contexts=_BOTH if away else f"return {_SELECTIVE}",
    )
    return lines + _CHECKPOINTING.format(arguments=arguments.replace("}", ', "context_fn": contexts}'))


def _list(blocks: Iterable[set[str]]) -> str:
    """The names of each block as the script has them, those that follow each other alike but once."""
    groups = ((names, len([*equal])) for names, equal in itertools.groupby(blocks))
    return " + ".join(
        f"[{{{', '.join(map(_name, sorted(names)))}}}] * {count}" if names else f"[()] * {count}"
        for names, count in groups
    )


def _name(name: str) -> str:
    return f'"{name}"' if name == ATTENTION else f"({name.replace('x', ', ')})"


def of_keeping(plan: Plan) -> dict[str, str]:
    """The lines that import what `checkpointing` needs where blocks keep results: Python's, and PyTorch's."""
    if not plan.recipe.kept:
        return {"of_keeping": "", "of_checkpoint": ""}
    python, of_torch = "import itertools\n", ""
    if moves(plan.recipe.kept):
        python = "import contextlib\n" + python
        of_torch = "from torch.utils._python_dispatch import TorchDispatchMode\n"
        of_torch += "from torch.utils._pytree import tree_map, tree_map_only\n"
    names = "CheckpointPolicy, create_selective_checkpoint_contexts"
    return {"of_keeping": python, "of_checkpoint": f"{of_torch}from torch.utils.checkpoint import {names}\n"}
