"""When nothing fits: what needs least, anything that fits at all, and the smallest changes that make room."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..cards import CATALOG
from ..language import tr
from ..models.pages import pages_label
from ..remembered import learn, noting
from ..units import human_bytes
from .candidates import recipes_of, why_not_spread
from .forks import Forks, processes
from .host import host_need
from .measure import held, measure
from .plans import Plan
from .recipes import CANNOT_RUN, METHODS, Recipe, method_label
from .request import Request
from .worth import can_move, ends_of, fits_with_ram, heads_of, may_offload, may_tile, needed_bytes

PAGES = "paged_adamw_8bit"  # tried where nothing else fits: of AdamW's states in 32 bits more would come and go
MORE_GPUS = 1024  # at most: FSDP2 pads every tensor's rows to the number of ranks, of which a small model has fewer
OTHER_UPDATES = ("lion_8bit", "adafactor")  # smaller states, and another training than AdamW's


@dataclass(frozen=True)
class Change:
    """One thing changed, and a plan that fits then.

    what: "methods", "optimizer", "cpu_offload", "device_map", "gpu", "gpus" or "length".
    """

    what: str
    value: Any
    plan: Plan

    def __str__(self) -> str:
        label = {
            "methods": tr(ko="방법을 더 허용한다", en="allow the method"),
            "optimizer": tr(ko="옵티마이저를 바꾼다", en="another optimizer"),
            "cpu_offload": tr(ko="학습 상태를 CPU에 둔다", en="the training state on the CPU"),
            "device_map": tr(ko="층을 GPU들에 나눈다", en="spread the layers over the GPUs"),
            "gpu": tr(ko="GPU를 바꾼다", en="another GPU"),
            "gpus": tr(ko="GPU를 늘린다", en="more GPUs"),
            "length": tr(ko="길이를 줄인다", en="a shorter length"),
        }[self.what]
        value = method_label(self.value) if self.what == "methods" else f"{self.value}"
        if self.what == "cpu_offload":
            ram = human_bytes(host_need(self.plan).needed.low)
            value = tr(ko=f"RAM {ram}부터", en=f"from {ram} of RAM")
        if self.what == "device_map":
            value = "--device-map"
        if self.what == "gpus":
            batch = self.plan.request.batch
            value = tr(ko=f"{self.value}장(배치는 {batch})", en=f"{self.value} (batch {batch})")
        pages = f". {pages_label(self.plan.paged_bytes, self.plan.evicted_bytes)}" if self.plan.paged_bytes else ""
        return f"{label}: {value} → {self.plan!r}{pages}"


def cheapest(request: Request) -> Plan:
    """The plan of a request that needs least memory: of its recipes with checkpointing at the smallest micro-batch.

    A fused head and checkpoints on the CPU are run where nothing fits without, and those only where they could.
    """
    best, errors = None, []
    for states, recipe in _by_states(request, errors):
        if best is not None and states >= best.needed_bytes:
            break  # this one and those after it hold more before anything is computed
        one, plans = replace(recipe, checkpointing=True), []
        least, at_once = ends_of(request.of(recipe), one)
        try:
            plans.append(measure(request, one, *least))
            if at_once and not plans[0].fits:
                plans.append(measure(request, one, *at_once))
        except CANNOT_RUN as error:
            errors.append(error)
            continue
        moved = may_offload(min(plans, key=needed_bytes))
        for head, offload in ((True, False), (False, True), (True, True)):
            if any(plan.fits for plan in plans) or (head and not may_tile(request, one)) or (offload and not moved):
                continue
            with contextlib.suppress(*CANNOT_RUN):  # the recipe itself runs
                more = replace(one, fused_lm_head=head or one.fused_lm_head, offload=offload)
                plans.append(measure(request, more, *least))
                if at_once and not plans[-1].fits:
                    plans.append(measure(request, more, *at_once))
        best = min([*plans, *([best] if best else [])], key=needed_bytes)
    if best is None:
        raise errors[0]
    return best


def _by_states(request: Request, errors: list[Exception]) -> list[tuple[int, Recipe]]:
    """(bytes of the states, recipe), the smallest first; without those that cannot be made, whose errors are noted."""
    found = []
    for recipe in recipes_of(request):
        if recipe.replicas > 1 and request.replicas is None:
            continue  # they take more than one copy
        try:
            found.append((sum(held(request, recipe).values()), recipe))
        except CANNOT_RUN as error:
            errors.append(error)
    return sorted(found, key=lambda pair: pair[0])


def anything_that_fits(request: Request) -> Plan | None:
    """A plan that fits, None where there is none: the leanest are run, of the smallest states first.

    Weights in 16 bits beside 4-bit ones never take more of the card, nor does stage 3 than 2 with tensor parallelism.
    Nor do tensors with checkpoints on the CPU, but the caching allocator may place them worse; a fused head may take
    more.
    """
    sized = _by_states(request, [])
    recipes = [recipe for _, recipe in sized]
    for states, recipe in sized:
        if states > request.of(recipe).limit_bytes:
            continue  # of shards and of spread layers other limits hold
        if recipe.tensor_parallel > 1 and recipe.stage == 2:
            continue
        shared = [one.context_parallel for one in recipes if one.whole_layers == recipe.whole_layers]
        if 1 < recipe.context_parallel < max(shared):
            continue  # a shorter part takes less
        if recipe.rest_in_fp32 and replace(recipe, rest_in_fp32=False) in recipes:
            continue
        if (plan := _leanest(request, recipe)) is not None:
            return plan
    return None


def _leanest(request: Request, recipe: Recipe) -> Plan | None:
    """`_lean` under checkpointing, with a fused head where there is one, and without."""
    heads = (replace(recipe, checkpointing=True, fused_lm_head=head) for head in heads_of(request, recipe)[::-1])
    return next(filter(None, (_lean(request.of(recipe), one) for one in heads)), None)


def _lean(request: Request, recipe: Recipe) -> Plan | None:
    """The recipe as a plan that fits, of one sample at a time or of the whole batch at once, which keeps no gradients.

    First with checkpoints on the CPU, and without where only the allocator's loss was too much.
    """
    for way in filter(None, ends_of(request, recipe)):
        found: list[Plan] = []
        for offload in (True, False) if can_move(recipe) else (False,):
            if found and found[0].tensors_bytes > request.limit_bytes:
                break
            one = replace(recipe, offload=offload)
            with contextlib.suppress(*CANNOT_RUN):  # what cannot be run makes no room
                found.append(measure(request, one, *way))
                if fits_with_ram(found[-1]):
                    return found[-1]
        if not found or found[0].tensors_bytes - found[0].at_peak.get("gradients", 0) > request.limit_bytes:
            return None  # more samples at once only add to the rest
    return None


def smallest_changes(request: Request, first: Callable[[Request], Plan | None]) -> list[Change]:
    """For each of what can be changed (see `Change`): the smallest change of it that makes room.

    A change comes with what the ranking says then: `first` of it. They have nothing to do with each other, so the
    machine's other cores begin them ahead (`forks`).
    """

    def found(what: str) -> tuple[list[Change], dict[tuple, Any]]:
        with noting() as noted:
            return _changes_of(request, what, first), noted

    if not (forks := processes() - 1):
        return [change for what in CHANGED for change in _changes_of(request, what, first)]
    changes = []
    with Forks(found, [*CHANGED], forks) as asked:
        for what in CHANGED:
            of_what, noted = asked(what)
            learn(noted)
            changes += of_what
    return changes


def _changes_of(request: Request, what: str, first: Callable[[Request], Plan | None]) -> list[Change]:
    found = []
    for changed in CHANGED[what](request):
        value = getattr(changed, what)
        plan = first(changed) or anything_that_fits(changed)
        found.append(Change(what, value[0] if what == "methods" else value, plan))
    return found


def _another_method(request: Request) -> Iterator[Request]:
    methods = (replace(request, methods=(method,)) for method in METHODS if method not in request.methods)
    yield from islice(filter(anything_that_fits, methods), 1)


def _another_optimizer(request: Request) -> Iterator[Request]:
    eight = ("adamw_8bit",) if request.optimizer else ()  # else it was among those that were tried
    for name in (*eight, PAGES, *(OTHER_UPDATES if "full" in request.methods else ())):
        one = replace(request, optimizer=name, optim_args="", optim_target_modules="")  # which were of the other
        if request.optimizer != name and anything_that_fits(one):
            yield one


def _states_on_the_cpu(request: Request) -> Iterator[Request]:
    offloaded = replace(request, cpu_offload=True)
    if not request.cpu_offload and any(_leanest(offloaded, one) for one in recipes_of(offloaded) if one.cpu_offload):
        yield offloaded


def _spread(request: Request) -> Iterator[Request]:
    spread = replace(request, device_map=True)
    if not request.device_map and not why_not_spread(spread) and anything_that_fits(replace(spread, device_map="only")):
        yield spread


def _another_gpu(request: Request) -> Iterator[Request]:
    needs_bf16 = "bf16" in (request.precision or "")
    for spec in sorted(CATALOG.values(), key=lambda spec: spec.capacity_bytes):
        larger = spec.capacity_bytes > request.spec.capacity_bytes and spec.platform == "cuda"
        if not larger or (needs_bf16 and not spec.has_bf16):
            continue
        if anything_that_fits(one := replace(request, gpu=spec.name)):
            yield one
            break


def _more_gpus(request: Request) -> Iterator[Request]:
    doublings = range(1, (MORE_GPUS // request.gpus).bit_length())
    more = [_on_gpus(request, request.gpus << times) for times in doublings]
    # Where every GPU holds the whole model more of them do not help, and what is too much on most is so on fewer.
    if more and any(recipe.stage for recipe in recipes_of(more[0])) and anything_that_fits(more[-1]):
        yield next(filter(anything_that_fits, more))


def _a_shorter_length(request: Request) -> Iterator[Request]:
    if longest := _longest(request):
        yield replace(request, length=longest)


# What can be changed (see `Change`) → the request with each smallest change of it that makes room.
CHANGED: dict[str, Callable[[Request], Iterator[Request]]] = {
    "methods": _another_method,
    "optimizer": _another_optimizer,
    "cpu_offload": _states_on_the_cpu,
    "device_map": _spread,
    "gpu": _another_gpu,
    "gpus": _more_gpus,
    "length": _a_shorter_length,
}


def _on_gpus(request: Request, gpus: int) -> Request:
    """The request on so many GPUs, with the next batch that divides among them."""
    whole = math.lcm(gpus, request.generations or 1)  # GRPO's completions of a prompt do not part
    return replace(request, gpus=gpus, batch=-(-request.batch // whole) * whole)


def _longest(request: Request) -> int:
    """The longest length (a multiple of 64 tokens) with which something fits; 0 where none does."""
    step = 64 if request.length > 64 else 1
    least = request.completion_length // step  # of GRPO a prompt is left
    low, high = least, -(-request.length // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if anything_that_fits(replace(request, length=middle * step)) else (low, middle)
    return low * step if low > least else 0
