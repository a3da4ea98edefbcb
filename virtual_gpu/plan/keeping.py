"""An activation budget: which results the blocks of a checkpointed plan keep in the memory that it leaves.

What is kept is not computed again. A byte of one result saves more FLOPs than a byte of another, so they are kept in
that order, as far as the limit goes, and the first that no longer fits in as many blocks as it does. Were every byte
that is kept one more at the peak, that would be the best choice but for what one block of that result saves (the
linear relaxation of a knapsack); the allocator's rests may cost another. Every plan that is returned was measured.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch

from ..models.adapters import linear_layers, sides
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config
from ..models.depth import text_config
from ..models.kept import ATTENTION, name_of
from ..step.flops import training_flops
from .measure import measure, setting_of
from .plans import Plan, Recipe, Request

TRIES = 4  # at a number of blocks; each is a run of the whole depth


@dataclass(frozen=True)
class Result:
    """A result that blocks can keep: its bytes, and the FLOPs that it saves, in all blocks for one sample."""

    name: str
    nbytes: int
    flops: int

    @property
    def worth(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.nbytes


def results_of(request: Request, recipe: Recipe) -> list[Result]:
    """What blocks compute a second time and could keep, what saves most a byte first."""
    flops = {(): _flops(request, recipe, ())}
    found = []
    for name, numbers in _numbers(request.model).items():
        saved = flops[()] - _flops(request, recipe, (name,))
        if saved > 0:
            width = 4 if recipe.precision == "fp32" else 2
            found.append(Result(name, numbers * request.length * width, saved))
    return sorted(found, key=lambda one: (-one.worth, one.nbytes))


def _flops(request: Request, recipe: Recipe, kept: tuple[str, ...]) -> int:
    one = replace(recipe, checkpointing=True, kept=kept)
    return training_flops(setting_of(request, one, 1, 1)).total


@cached_by_model
def _numbers(model: str) -> dict[str, int]:
    """What can be kept by name → numbers of a token, in all blocks."""
    config = load_config(model)
    text = text_config(config)
    found: dict[str, int] = {}
    for layer in linear_layers(build_model(config, torch.float16)).values():
        name = name_of(*sides(layer))
        found[name] = found.get(name, 0) + sides(layer)[1]
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {ATTENTION: text.num_hidden_layers * text.num_attention_heads * width} | found


@dataclass(frozen=True)
class _Between:
    """A plan that fits, and the one that keeps one result more and does not; None where that would be the last."""

    fits: Plan
    exceeds: Plan | None

    @property
    def share(self) -> float:
        """Of the blocks, in which the next result has room, if what it takes grows with them."""
        fits, exceeds = self.fits, self.exceeds
        return fits.left_bytes / max(exceeds.needed_bytes - fits.needed_bytes, 1) if exceeds else 0.0

    @property
    def flops(self) -> float:
        """Of the plan that keeps it in this share of the blocks."""
        return self.fits.flops + (self.share * (self.exceeds.flops - self.fits.flops) if self.exceeds else 0)


def keep_what_fits(request: Request, recipe: Recipe) -> Plan | None:
    """The plan of the smallest micro-batch, where a byte saves most, that keeps as much as fits; None where nothing.

    recipe: with checkpointing, of one GPU or under DDP. A fused head is tried where blocks cannot keep all without: in
    the room of the logits they can keep more than making those again costs.
    """
    found = [_in_all_blocks(request, recipe)]
    if request.can_fuse_head and not (found[0] and found[0].exceeds is None):
        with contextlib.suppress(RuntimeError, ValueError, TypeError):  # of TRL's head with this model
            found.append(_in_all_blocks(request, replace(recipe, fused_lm_head=True)))
    best = min(filter(None, found), key=lambda one: one.flops, default=None)
    plan = best and ((best.exceeds and _in_some_blocks(best)) or best.fits)
    return plan if plan and plan.recipe.kept else None


def _in_all_blocks(request: Request, recipe: Recipe) -> _Between | None:
    """Up to which result all blocks can keep theirs; None where the recipe does not fit without any."""
    results = results_of(request, recipe)
    measured: dict[int, Plan] = {}

    def first(count: int) -> Plan:
        if count not in measured:
            kept = tuple(one.name for one in results[:count])
            measured[count] = measure(request, replace(recipe, kept=kept), 1, request.per_gpu)
        return measured[count]

    left, count = first(0).left_bytes, 0
    while count < len(results) and (left := left - results[count].nbytes) >= 0:
        count += 1
    while count >= 0 and not first(count).fits:
        count -= 1
    while 0 <= count < len(results) and first(count + 1).fits:
        count += 1
    return None if count < 0 else _Between(first(count), first(count + 1) if count < len(results) else None)


def _in_some_blocks(between: _Between) -> Plan | None:
    """The plan in between, of which one result is kept in as many blocks as fit; None where in none."""
    fits, request = between.fits, between.fits.request
    (name,) = {*between.exceeds.recipe.kept} - {*fits.recipe.kept}
    blocks = text_config(load_config(request.model)).num_hidden_layers
    each = max(between.exceeds.needed_bytes - fits.needed_bytes, 1) / blocks
    count = min(int(between.share * blocks), blocks - 1)
    for _ in range(TRIES):
        if count < 1:
            return None
        recipe = replace(fits.recipe, kept=(*fits.recipe.kept, f"{name}:{count}"))
        plan = measure(request, recipe, 1, request.per_gpu)
        if plan.fits:
            return plan
        count -= math.ceil(-plan.left_bytes / each)
    return None
