"""An activation budget in the planner: what the blocks of a checkpointed plan keep in the memory that it leaves.

The curve of `step.budget`, as far as the limit goes. Every plan that is returned was measured.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..cards import GPUSpec
from ..errors import NotSupported
from ..language import tr
from ..models.configs import cached_by_model
from ..shards.rank_step import rank_step
from ..step.budget import Budget, Result, budget_of, flops_while_moving
from ..step.predict import like_any
from ..step.setting import Setting
from ..trace.trace import Trace
from .measure import measure, of_rank, setting_of
from .plans import Plan
from .recipes import CANNOT_RUN, Recipe, not_together
from .request import Request
from .worth import fits_with_ram

PROBES = 8  # of the points of a curve
TRIES = 3  # of the points of a curve, the last that has room first; each is a run


def results_of(request: Request, recipe: Recipe) -> list[Result]:
    """What blocks compute a second time and could keep, of one sample: what saves most a byte first."""
    return _results(setting_of(request, replace(recipe, kept=()), 1, 1), request.spec.compute_capability)


@cached_by_model
def _results(setting: Setting, compute_capability: tuple[int, int]) -> list[Result]:
    return budget_of(setting, like_any(compute_capability)).results


def why_not_kept(request: Request, recipe: Recipe) -> str:
    """Why it is not counted what blocks could keep under this recipe; empty where it is."""
    if request.objective != "sft":
        name = request.objective.upper()
        return tr(ko=f"{name}에서는 아직 세지 않는다", en=f"not counted of {name}")
    if recipe.cpu_offload or recipe.spread or recipe != recipe.whole_layers:
        return not_together()
    return ""


def curve_of(plan: Plan, measured: int = 4) -> Budget:
    """What the blocks of a plan could keep, recompute or send to the CPU: the whole curve, so many points of it run.

    NotSupported where that is not counted (`why_not_kept`).
    """
    if why := why_not_kept(plan.request, plan.recipe):
        raise NotSupported(
            tr(
                ko=f"{plan.title}: 블록이 무엇을 남길지를 세지 않는다. {why}.",
                en=f"{plan.title}: what its blocks could keep is not counted: {why}.",
            )
        )
    budget = _way_of(plan.request, plan.recipe, plan.micro_batch, plan.accumulation).budget(plan.request.spec)
    budget.measure_evenly(measured)
    return budget


def keep_what_fits(request: Request, recipe: Recipe) -> Plan | None:
    """The plan of the smallest micro-batch, where a byte saves most, that keeps as much as fits; None where nothing.

    recipe: with checkpointing, of which `why_not_kept` says nothing; its checkpoints may wait on the CPU. A fused head
    is tried where blocks cannot keep all without: in the room of the logits they can keep more than making those again
    costs.
    """
    found = {recipe: _of(request, recipe)}
    if request.can_fuse_head and not found[recipe].all_fits:
        fused = replace(recipe, fused_lm_head=True)
        with contextlib.suppress(*CANNOT_RUN):  # of TRL's head with this model
            found[fused] = _of(request, fused)
    least = min(one.relaxed for one in found.values())
    ways = [(work, one, kept) for one, choices in found.items() for kept, work in choices.ways]
    for work, one, kept in sorted(ways, key=lambda way: way[0]):
        plan = measure(request, replace(one, kept=kept), 1, request.per_gpu) if kept else None
        if plan is not None and fits_with_ram(plan):
            return replace(plan, beyond_best=max(1 - least / work, 0.0))
    return None


class _Way(NamedTuple):
    """What a budget is made of. rank: `rank_step`'s arguments where ZeRO splits it, but what blocks keep, sorted."""

    setting: Setting
    moving: float
    among: str
    ddp: bool
    rank: tuple[tuple[str, Any], ...]

    @property
    def model_id(self) -> str:
        return self.setting.model_id

    def budget(self, spec: GPUSpec) -> Budget:
        if not self.rank:
            return budget_of(self.setting, spec, self.moving, self.ddp, self.among)
        given = dict(self.rank) | {"gradient_checkpointing": True, "kept_results": ()}
        step = rank_step(**given, watched=True)

        def run(kept: tuple[str, ...]) -> Trace:
            return rank_step(**given | {"kept_results": kept}).trace

        setting = replace(self.setting, gradient_checkpointing=True)
        return Budget(setting, spec, run, step.twice, step.flops_twice, self.moving, self.among)


def _way_of(request: Request, recipe: Recipe, micro_batch: int, accumulation: int) -> _Way:
    recipe, request = replace(recipe, kept=()), request.of(recipe)
    setting = setting_of(request, recipe, micro_batch, accumulation)
    rank = of_rank(request, recipe, micro_batch, accumulation) if recipe.stage else {}
    moving = flops_while_moving(request.spec, setting.precision)
    ddp = request.gpus > 1 and not recipe.stage
    how = [f" × {request.gpus}", "DDP" if ddp else f"ZeRO-{recipe.stage}", *recipe.mesh] if request.gpus > 1 else []
    return _Way(setting, moving, " · ".join(how), ddp, tuple(sorted(rank.items())))


def _of(request: Request, recipe: Recipe) -> _Choices:
    way = _way_of(request, recipe, 1, request.per_gpu)
    return _choices(way, request.spec.compute_capability, request.of(recipe).limit_bytes)


@dataclass(frozen=True)
class _Choices:
    """The last points of a curve that fit: (choice, work of a step), and the least that any could be, in FLOPs.

    all_fits: the last of them keeps everything.
    """

    ways: tuple[tuple[tuple[str, ...], float], ...]
    relaxed: float
    all_fits: bool


@cached_by_model
def _choices(way: _Way, compute_capability: tuple[int, int], limit: int) -> _Choices:
    budget = way.budget(like_any(compute_capability))
    points = [point for point in budget.points if point.peak_bytes <= limit]

    def fits(count: int) -> bool:
        return budget.needed(points[count - 1].kept) <= limit

    # What the allocator loses does not grow evenly: from the last on in strides, then in between.
    stride = len(points) // PROBES + 1
    low = next((count for count in range(len(points), 0, -stride) if fits(count)), 0)
    high = min(low + stride, len(points) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    last = points[max(low - TRIES, 0) : low]
    relaxed = budget.least_flops + budget.bound(limit)
    ways = tuple((point.kept, budget.least_flops + point.extra_work) for point in last)
    return _Choices(ways, relaxed, low == len(budget.points))
