"""The search: every recipe with the largest micro-batch that fits, and the smallest change that makes room.

Nothing is estimated by rules of thumb. What is not run is what another run has decided already:

- weights, gradients and optimizer state are held whatever the micro-batch and with or without checkpointing: where they
  alone exceed the limit, nothing with the same method, precision and optimizer is run any more;
- memory grows with the micro-batch (when gradients are accumulated): the largest that fits is found by halving;
- where the whole batch fits at once, checkpointing would only add work.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..cards import CATALOG
from ..language import tr
from ..step.splits import equal_splits
from ..units import human_bytes
from .measure import held, hopeless, measure
from .pictures import Losers, draw_plans, plans_html
from .plans import (
    METHODS,
    MOST_GPUS,
    Plan,
    Recipe,
    Request,
    has_bf16,
    left_out,
    make_request,
    method_label,
    recipes_of,
)


@dataclass
class Plans:
    """The plans that fit, best first; those that lost, each at its smallest; and what was not tried, with the reason.

    In a notebook it is a table.
    """

    request: Request
    plans: list[Plan]
    losers: list[Plan]
    refused: dict[Recipe, Plan] = field(repr=False)  # recipe → the next larger micro-batch, which did not fit
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def best(self) -> Plan | None:
        """The first of the ranking; None where nothing fits."""
        return self.plans[0] if self.plans else None

    @functools.cached_property
    def closest(self) -> Plan:
        """What needs least memory of all."""
        return cheapest(self.request)

    @functools.cached_property
    def changes(self) -> list[Change]:
        """When nothing fits: for each thing that could be changed alone, the smallest change that makes room."""
        return [] if self.plans else smallest_changes(self.request)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def verdict(self) -> str:
        """One line: how many fit, or what is missing."""
        limit = human_bytes(self.request.limit_bytes)
        if self.plans:
            return tr(
                ko=f"{self.request.title}: {len(self)}가지가 들어간다 (여유를 뺀 한도 {limit})",
                en=f"{self.request.title}: {len(self)} plans fit ({limit} with the margin)",
            )
        need = human_bytes(self.closest.needed_bytes)
        missing = human_bytes(self.closest.needed_bytes - self.request.limit_bytes)
        return tr(
            ko=f"{self.request.title}: 들어가는 것이 없다. 가장 적게 쓰는 {self.closest.title}도 {need}가 필요해 "
            f"{missing} 모자란다",
            en=f"{self.request.title}: nothing fits. {self.closest.title} needs least, {need}: {missing} are missing",
        )

    def why(self) -> Any:
        """Why every loser loses: what did not fit, what was not run, what is not tried."""
        return Losers(self)

    def chart(self) -> Any:
        """Every recipe at its peak, by kind, under the GPU's capacity."""
        return draw_plans(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        request = asdict(self.request) | {"limit_bytes": self.request.limit_bytes}
        return {
            "request": request,
            "fits": bool(self.plans),
            "plans": [plan.to_dict() for plan in self.plans],
            "losers": [plan.to_dict() for plan in self.losers],
            "left_out": [{"what": what, "why": why} for what, why in self.skipped],
            "changes": [{"what": c.what, "value": c.value, "plan": c.plan.to_dict()} for c in self.changes],
        }

    def __repr__(self) -> str:
        lines = [self.verdict, *(f"{i}. {plan!r}" for i, plan in enumerate(self.plans, 1))]
        return "\n".join([*lines, *map(str, self.changes)])

    def _repr_html_(self) -> str:
        return plans_html(self)


def plan_training(model: Any, gpu: str = "T4", gpus: int = 1, **request: Any) -> Plans:
    """Ranked plans that train `model` on `gpus` of that GPU with the target batch.

    model: a bundled name, a hub id, a folder, or a transformers configuration. length: tokens. batch: samples of one
    optimizer step, all GPUs together. methods: of "full", "lora", "qlora". precision, optimizer: None lets the planner
    choose. margin: the share of the peak that must stay free beside it. lora_rank, lora_targets: see `add_adapters`.
    Each way to train comes once, with the largest micro-batch that fits. ValueError in the reader's language.
    """
    return _search(make_request(model, gpu, gpus, **request))


def _search(request: Request) -> Plans:
    plans, losers, refused, skipped = [], [], {}, left_out(request)
    for recipe in recipes_of(request):
        if sum(held(request, recipe).values()) > request.limit_bytes:
            losers.append(hopeless(request, recipe))
            continue
        for checkpointing in (False, True):
            one = replace(recipe, checkpointing=checkpointing)
            fit, miss = _largest(request, one)
            if fit is None:
                losers.append(miss)
                continue
            plans.append(fit)
            if miss is not None:
                refused[one] = miss
            elif not checkpointing:
                text = tr(ko="배치가 한 번에 들어가니 연산만 늘어난다", en="the batch fits at once: it only adds work")
                skipped.append((replace(recipe, checkpointing=True).title, text))
                break
    plans.sort(key=lambda plan: plan.key)
    losers.sort(key=lambda plan: plan.needed_bytes)
    return Plans(request, plans, losers, refused, skipped)


def _largest(request: Request, recipe: Recipe) -> tuple[Plan | None, Plan | None]:
    """(the largest micro-batch that fits, the next larger one, which does not); None where there is none."""
    (whole, once), *rest = equal_splits(request.per_gpu)
    at_once = measure(request, recipe, whole, once)
    if at_once.fits:
        return at_once, None
    if not rest:
        return None, at_once
    ways = rest[::-1]  # the smallest micro-batch first
    plans = {len(ways): at_once}
    low, high = -1, len(ways)  # ways[low] fits, ways[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        plans[middle] = measure(request, recipe, *ways[middle])
        low, high = (middle, high) if plans[middle].fits else (low, middle)
    return plans.get(low), plans[high] if low >= 0 else min(plans.values(), key=lambda plan: plan.needed_bytes)


# -- when nothing fits -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One thing changed, and a plan that fits then. what: "methods", "gpu", "gpus", "length" or "batch"."""

    what: str
    value: Any
    plan: Plan

    def __str__(self) -> str:
        label = {
            "methods": tr(ko="방법을 더 허용한다", en="allow the method"),
            "gpu": tr(ko="GPU를 바꾼다", en="another GPU"),
            "gpus": tr(ko="GPU를 늘린다", en="more GPUs"),
            "length": tr(ko="길이를 줄인다", en="a shorter length"),
        }[self.what]
        value = method_label(self.value) if self.what == "methods" else f"{self.value}"
        batch = self.plan.request.batch
        more = tr(ko=f", 배치 {batch}", en=f", batch {batch}") if self.what == "gpus" else ""
        return f"{label}: {value}{more} → {self.plan!r}"


def cheapest(request: Request) -> Plan:
    """The plan of a request that needs least memory: of its recipes with checkpointing at the smallest micro-batch."""
    best = None
    recipes = recipes_of(request)
    for recipe in sorted(recipes, key=lambda recipe: sum(held(request, recipe).values())):
        if best is not None and sum(held(request, recipe).values()) >= best.needed_bytes:
            break  # this one and those after it hold more before anything is computed
        one = replace(recipe, checkpointing=True)
        plans = [measure(request, one, 1, request.per_gpu)]
        if request.per_gpu > 1 and not plans[0].fits:
            plans.append(measure(request, one, request.per_gpu, 1))  # nothing is accumulated
        best = min([*plans, *([best] if best else [])], key=lambda plan: plan.needed_bytes)
    return best


def _room(request: Request) -> Plan | None:
    """The cheapest plan, if it fits; nothing is run where the states alone exceed the limit."""
    if min(sum(held(request, recipe).values()) for recipe in recipes_of(request)) > request.limit_bytes:
        return None
    plan = cheapest(request)
    return plan if plan.fits else None


def smallest_changes(request: Request) -> list[Change]:
    """For each of methods, GPU, number of GPUs and length: the smallest change of it alone that makes room."""
    changes = []
    for method in [method for method in METHODS if method not in request.methods]:
        if plan := _room(replace(request, methods=(method,))):
            changes.append(Change("methods", method, plan))
            break
    needs_bf16 = "bf16" in (request.precision or "")
    for spec in sorted(CATALOG.values(), key=lambda spec: spec.capacity_bytes):
        if spec.capacity_bytes <= request.spec.capacity_bytes or (needs_bf16 and not has_bf16(spec)):
            continue
        if plan := _room(replace(request, gpu=spec.name)):
            changes.append(Change("gpu", spec.name, plan))
            break
    gpus = request.gpus * 2
    while gpus <= MOST_GPUS:
        more = replace(request, gpus=gpus, batch=-(-request.batch // gpus) * gpus)
        if not any(recipe.stage for recipe in recipes_of(more)):
            break  # every GPU holds the whole model: more of them do not help
        if plan := _room(more):
            changes.append(Change("gpus", gpus, plan))
            break
        gpus *= 2
    if plan := _longest(request):
        changes.append(Change("length", plan.request.length, plan))
    return changes


def _longest(request: Request) -> Plan | None:
    """The cheapest plan at the longest length (a multiple of 64) with which something fits; None where none does."""
    step = 64 if request.length > 64 else 1
    low, high, best = 0, -(-request.length // step), None
    if min(sum(held(request, recipe).values()) for recipe in recipes_of(request)) > request.limit_bytes:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        plan = _room(replace(request, length=middle * step))
        low, high, best = (middle, high, plan) if plan else (low, middle, best)
    return best
