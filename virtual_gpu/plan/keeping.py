"""An activation budget: which results the blocks of a checkpointed plan keep in the memory that it leaves.

What is kept is not computed again. A byte of one result saves more FLOPs than a byte of another, so they are kept in
that order, as far as the limit goes, and the first that no longer fits in as many blocks as it does. Were every byte
that is kept one more at the peak, that would be the best choice but for what one block of that result saves (the
linear relaxation of a knapsack); the allocator's rests may cost another. Every plan that is returned was measured.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch

from ..errors import WrongValue
from ..models.adapters import linear_layers, sides
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config
from ..models.depth import linear_in_depth, text_config
from ..models.kept import ATTENTION, name_of
from ..step.flops import bytes_that_blocks_could_keep, training_flops
from .measure import measure, setting_of
from .plans import Plan
from .recipes import CANNOT_RUN, Recipe
from .request import Request

TRIES = 4  # at a number of blocks; each is a run of the whole depth


@dataclass(frozen=True)
class Result:
    """A result that blocks can keep: its bytes, and the FLOPs that it saves, in all blocks for one sample."""

    name: str
    nbytes: int
    flops: int

    @property
    def worth(self) -> float:
        """FLOPs a byte, as PyTorch counts FLOPs: of attention those that a causal mask lets a kernel skip as well."""
        return self.flops / self.nbytes


def results_of(request: Request, recipe: Recipe) -> list[Result]:
    """What blocks compute a second time and could keep, what saves most a byte first."""
    setting = setting_of(request, replace(recipe, checkpointing=True, kept=()), 1, 1)
    adapters = (setting.lora_rank, setting.lora_targets) if setting.peft else None
    nbytes = linear_in_depth(
        load_config(request.model), lambda config: bytes_that_blocks_could_keep(config, request.length, adapters)
    )
    width = 2 if recipe.precision == "fp32" else 1  # counted in half precision
    none, found = _flops(request, recipe, ()), []
    own = _layers(request.model)
    for name, number in nbytes.items():
        if name not in own:  # an adapter's: it costs next to nothing to compute again
            continue
        with contextlib.suppress(WrongValue):  # changed in place
            saved = none - _flops(request, recipe, (name,))
            found += [Result(name, number * width, saved)] if saved > 0 else []
    return sorted(found, key=lambda one: (-one.worth, one.nbytes))


@cached_by_model
def _layers(model: str) -> set[str]:
    """The names of what the model itself could keep."""
    layers = linear_layers(build_model(load_config(model), torch.float16)).values()
    return {ATTENTION, *(name_of(*sides(layer)) for layer in layers)}


def _flops(request: Request, recipe: Recipe, kept: tuple[str, ...]) -> int:
    one = replace(recipe, checkpointing=True, kept=kept)
    return training_flops(setting_of(request, one, 1, 1)).total


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
        with contextlib.suppress(*CANNOT_RUN):  # of TRL's head with this model
            found.append(_in_all_blocks(request, replace(recipe, fused_lm_head=True)))
    best_first = sorted(filter(None, found), key=lambda one: one.flops)
    for between in best_first:
        plan = (between.exceeds and _in_some_blocks(between)) or between.fits
        if plan.recipe.kept:
            return replace(plan, relaxed_flops=int(best_first[0].flops))
    return None


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
    """The plan in between, of which one result is kept in as many blocks as fit; None where in none.

    Not where the blocks differ in it: the first ones, of which it is kept, may not have it.
    """
    fits, exceeds, request = between.fits, between.exceeds, between.fits.request
    (name,) = {*exceeds.recipe.kept} - {*fits.recipe.kept}
    blocks = text_config(load_config(request.model)).num_hidden_layers
    none, one, every = (_flops(request, fits.recipe, kept) for kept in ((), (f"{name}:1",), (name,)))
    if (none - one) * blocks != none - every:
        return None
    low, high, best, steady = 0, blocks, None, True  # in so many it fits, in so many not
    below, above = fits.needed_bytes, exceeds.needed_bytes
    for _ in range(TRIES):
        if high - low < 2:
            break
        slope = (above - below) / (high - low)
        step = int((request.limit_bytes - below) / max(slope, 1)) if steady else (high - low) // 2
        count = min(max(low + step, low + 1), high - 1)
        plan = measure(request, replace(fits.recipe, kept=(*fits.recipe.kept, f"{name}:{count}")), 1, request.per_gpu)
        if not plan.fits:
            high, above = count, plan.needed_bytes
            continue
        each = (plan.needed_bytes - below) / (count - low)
        best, low, below, steady = plan, count, plan.needed_bytes, each >= slope / 2  # else the peak was elsewhere
        if steady and plan.left_bytes < each:
            break  # one more has no room
    return best
