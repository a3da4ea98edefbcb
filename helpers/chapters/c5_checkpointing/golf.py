"""Chapter 5's golf: which results of nine blocks to keep, so that few bytes are held and little is computed again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from virtual_gpu.units import MiB

from ...small_model import Block
from .steps import StepTable, compare_steps

RESULTS = ("query_key_value", "attention", "projection", "up", "down")  # of a block, in their order
BLOCKS, MOST_HELD = 9, 6 * MiB
_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
Keep = Callable[[int, str], bool]


def play(keeps: dict[str, Keep]) -> StepTable:
    """The chapter's nine blocks as they are ("plain"), and checkpointed with the results that each `keep` keeps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Block(width=64, heads=4) for _ in range(BLOCKS)])
        x = torch.randn(8, 64, 64)

    def kept(keep: Keep) -> torch.Tensor:
        y = x
        for number, block in enumerate(blocks):
            y = checkpoint(block, y, use_reentrant=False, context_fn=partial(_contexts, keep, number))
        return y.square().mean()

    return compare_steps(
        blocks,
        plain=lambda: blocks(x).square().mean(),
        **{name: lambda keep=keep: kept(keep) for name, keep in keeps.items()},
    )


def _contexts(keep: Keep, block: int) -> tuple[Any, Any]:
    """Selective checkpointing's contexts for one block: forward and recomputation meet its results in one order."""
    met = {False: iter(RESULTS), True: iter(RESULTS)}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = operation in _PRODUCTS and keep(block, next(met[context.is_recompute]))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@lru_cache(maxsize=1)
def record() -> float:
    """The least extra FLOPs, as a share, within MOST_HELD, whatever the number of blocks that keep each result.

    What a result holds and saves is measured with it kept in every block; bytes and FLOPs of blocks add up.
    """
    keeps = {name: lambda block, result, name=name: result == name for name in RESULTS}
    table = play({"none": lambda block, result: False, **keeps})
    none = table["none"]
    held = [(table[name].held_bytes - none.held_bytes) / BLOCKS for name in RESULTS]
    saved = [(none.flops - table[name].flops) / BLOCKS for name in RESULTS]
    worth = [number for number, flops in enumerate(saved) if flops]
    best = 0.0
    for counts in itertools.product(range(BLOCKS + 1), repeat=len(worth)):
        if none.held_bytes + sum(n * held[i] for n, i in zip(counts, worth, strict=True)) <= MOST_HELD:
            best = max(best, sum(n * saved[i] for n, i in zip(counts, worth, strict=True)))
    return (none.flops - best) / table["plain"].flops - 1
