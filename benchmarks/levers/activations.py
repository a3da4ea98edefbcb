"""Levers on what is kept for backward: recomputed, moved to the CPU, or computed in pieces."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .losses import causal
from .program import checkpointed

TILES = 8
aten = torch.ops.aten
ATTENTION = (  # which of them a card takes is PyTorch's choice: a Hopper cuDNN's
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
)


def compiled(model: nn.Module) -> None:
    """The model's forward through `torch.compile`, with its backward."""
    model.compile()


def blocks_compiled(model: nn.Module) -> None:
    """Each block through `torch.compile`, as torchtitan does it."""
    for block in blocks(model):
        block.compile()


def budget(part: float) -> Any:
    """PyTorch's own partitioner may keep this part of what it would keep for backward, and recomputes the rest."""
    return functools.partial(functorch.patch, activation_memory_budget=part)


def blocks(model: nn.Module) -> nn.ModuleList:
    return next(part for part in causal(model).base_model.children() if isinstance(part, nn.ModuleList))


def every_second(model: nn.Module) -> None:
    """Blocks with an odd number are not checkpointed."""
    checkpointed(model)
    for number, block in enumerate(blocks(model)):
        block.gradient_checkpointing = number % 2 == 0


def pairs(model: nn.Module) -> None:
    """Two blocks are one checkpoint: only the input of every second block is kept."""
    model.enable_input_require_grads()
    both = blocks(model)
    for first, second in zip(both[::2], both[1::2], strict=True):
        one, two = first.forward, second.forward

        def run(hidden: Any, *args: Any, one: Any = one, two: Any = two, **kwargs: Any) -> Any:
            return checkpoint(lambda x: two(one(x, *args, **kwargs), *args, **kwargs), hidden, use_reentrant=False)

        first.forward = run
        second.forward = lambda hidden, *args, **kwargs: hidden


def selective(model: nn.Module) -> None:
    """PyTorch's selective checkpointing: what matrix products and attention give is kept, the rest recomputed."""
    _keep(model, [aten.mm.default, aten.addmm.default, *ATTENTION])


def only_attention_kept(model: nn.Module) -> None:
    """Selective with one kind of result kept: attention's, which costs the most to compute again at great length."""
    _keep(model, [*ATTENTION])


def products_between_cards_kept(model: nn.Module) -> None:
    """Of layers that cards share: products, attention, and what this card gets of the sums over the cards."""
    _keep(model, [aten.mm.default, *ATTENTION, torch.ops._c10d_functional.reduce_scatter_tensor.default])


def columns_kept(model: nn.Module) -> None:
    """The same but for products whose sum is over the cards: each has one as large as if it were alone.

    What is gathered for a product by columns, as large, is in neither.
    """
    kept = {aten.mm.default, *ATTENTION, torch.ops._c10d_functional.reduce_scatter_tensor.default}

    def policy(_: Any, operation: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        by_rows = operation is aten.mm.default and any(part.is_shard(1) for part in args[0].placements)
        return CheckpointPolicy.MUST_SAVE if operation in kept and not by_rows else CheckpointPolicy.PREFER_RECOMPUTE

    _keep(model, policy)


def _keep(model: nn.Module, kept: Any) -> None:
    """Blocks checkpointed but for these operations' results, or those of which a policy says so."""
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model.enable_input_require_grads()


def offloaded(model: nn.Module) -> None:
    """transformers' own: the inputs of checkpointed blocks, and nothing else, wait in pinned memory."""
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    model.enable_input_require_grads()


def saved_on_cpu(model: nn.Module) -> Any:
    """Everything that is kept for backward moves to the CPU. Unpinned here: the bytes are the same either way."""
    return torch.autograd.graph.save_on_cpu(pin_memory=False)


def trl_offload(model: nn.Module) -> Any:
    """TRL's `activation_offloading=True` (from torchtune): not the weights, not twice, a stream of its own."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    return get_act_offloading_ctx_manager(model, use_pin_memory=False)


def mlps(model: nn.Module) -> list[nn.Module]:
    return [block.mlp for block in blocks(model)]


def tiled_mlp(model: nn.Module) -> None:
    """The MLP a part of the sequence at a time, each part computed again in backward. On top of checkpointed blocks."""
    checkpointed(model)
    for mlp in mlps(model):
        whole = mlp.forward

        def in_tiles(hidden: torch.Tensor, whole: Any = whole) -> torch.Tensor:
            parts = hidden.chunk(TILES, dim=1)
            return torch.cat([checkpoint(whole, part, use_reentrant=False) for part in parts], dim=1)

        mlp.forward = in_tiles


def tiled_mlp_offloaded(model: nn.Module) -> None:
    """Both: blocks' inputs wait in pinned memory, and of an MLP a part is on the card at a time."""
    tiled_mlp(model)
    offloaded(model)


def arctic_tiled_mlp(model: nn.Module) -> None:
    """DeepSpeed's (Arctic long sequence training): a tile's backward runs right after its forward is computed again."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    checkpointed(model)
    for mlp in mlps(model):
        whole = type(mlp).forward
        weights = [weight for weight in mlp.parameters() if weight.requires_grad]

        def in_tiles(hidden: torch.Tensor, mlp: Any = mlp, whole: Any = whole, weights: Any = weights) -> torch.Tensor:
            return TiledMLP.apply(whole, mlp, hidden, TILES, weights)

        mlp.forward = in_tiles
