"""The search: every recipe with the largest micro-batch that fits, and the smallest change that makes room.

Every plan that is shown was measured on the virtual GPU. What is not run is what another run has decided already:

- weights, gradients and optimizer state are held whatever the micro-batch and with or without checkpointing: where they
  alone exceed the card, nothing with the same method, precision and optimizer is run any more;
- memory grows with the micro-batch (when gradients are accumulated): the largest that fits and the next larger one,
  which does not, bound all the others;
- where the whole batch fits at once, checkpointing and a fused head would only add work; so would a fused head with
  which no larger micro-batch fits, and it is not run where all that it can save is less than what is missing;
- what activations take of a plan grows with the micro-batch: where the whole batch at once would exceed the card by a
  tenth and more at the same bytes a sample, it is not run;
- weights beside 4-bit ones stay in 16 bits only where they do not fit in fp32;
- DPO's reference leaves the card (its log probabilities are made first) only where the same does not fit beside it
  without checkpointing;
- checkpoints go to the CPU only where a recipe does not fit otherwise, or where what is left is what counts; of QLoRA
  only with the other weights in 16 bits, which is tried first;
- several GPUs compute a layer together (tensor parallelism) only where that is asked for, where the batch is smaller
  than the number of GPUs, or where the same training does not fit otherwise, and no more of them than the fewest that
  make it fit. They split no more of the states than ZeRO-3 does: where those are too much, nothing of it is run;
- several GPUs share a text (context parallelism) only where that is asked for, where the batch is smaller than the
  number of GPUs, or where the same training does not fit with whole texts, and no more of them than make it fit;
- several copies of the model (HSDP) hold more than one over all GPUs: unless they are asked for they are tried only
  where that one fits and leaves what they hold more, and of their numbers the largest that fits;
- a training state goes to the CPU (`on_cpu`) only where that is asked for, or nothing else fits: all of it comes and
  goes in every micro-batch;
- a vLLM engine is put to sleep while the model is trained only where more samples at once fit so;
- what cannot be run at all (a model whose own code does not take 4-bit weights) is left out with the reason.

What the search will most likely come to is begun ahead on the machine's other cores (`forks`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..drawing.frames import frame_of
from ..language import tr
from ..models.configs import load_config
from ..models.depth import text_config
from ..remembered import learn, noting
from ..shards.mesh import context_label, copies_label, tensor_label
from ..units import human_bytes
from .alternatives import Change, cheapest, smallest_changes
from .candidates import left_out, recipes_of
from .engine import ASLEEP, AWAKE
from .forks import Forks, processes
from .frontier import draw_frontier
from .host import holds_loading, holds_step, loadable
from .keeping import keep_what_fits, why_not_kept
from .measure import expected, held, hopeless, measure
from .pictures import Losers, draw_plans, plans_html
from .plans import Plan
from .recipes import CANNOT_RUN, Recipe, method_label
from .request import Request, make_request
from .worth import (
    HEAD_BYTES,
    fits_with_ram,
    heads_of,
    may_fuse,
    may_offload,
    may_tile,
    needed_bytes,
    splits_of,
)

if TYPE_CHECKING:
    import pandas

SCHEMA = 2  # of `Plans.to_dict`: raised when a name goes or changes its meaning. 2: left_bytes is below limit_bytes


@dataclass
class Plans:
    """The plans that fit, best first; those that lost, each at its smallest; and what was not tried, with the reason.

    settled: whether the first will stay it. While a search goes on that may be known long before its end. In a notebook
    it is a table.
    """

    request: Request
    plans: list[Plan]
    losers: list[Plan]
    refused: dict[Recipe, Plan] = field(repr=False)  # recipe → the next larger micro-batch, which did not fit
    skipped: list[tuple[str, str]] = field(default_factory=list)
    settled: bool = True

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
        return [] if self.plans else smallest_changes(self.request, _first)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def verdict(self) -> str:
        """One line: how many fit, or what is missing."""
        limit = human_bytes((self.best or self).request.limit_bytes)
        if self.plans:
            fit = "1 plan fits" if len(self) == 1 else f"{len(self)} plans fit"
            return tr(
                ko=f"{self.request.title}: {len(self)}가지가 들어간다 (필요한 메모리가 판정 한도 {limit}까지)",
                en=f"{self.request.title}: {fit} (up to {limit} needed is sure to fit)",
            )
        need = human_bytes(self.closest.needed_bytes)
        missing = human_bytes(-self.closest.left_bytes)
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

    def frontier(self) -> Any:
        """The measured plans, fitting or not: peak memory over the work of a step; what none betters is joined."""
        return draw_frontier(self)

    def to_frame(self) -> pandas.DataFrame:
        """Every plan as a row, the best first and the losers last; bytes at the peak by kind, FLOPs of a step."""
        rows = (
            {"title": plan.title, "fits": plan.fits}
            | plan.to_dict()
            | {f"{kind}_bytes": nbytes for kind, nbytes in plan.at_peak.items()}
            for plan in (*self.plans, *self.losers)
        )
        nested = ("at_peak", "card_bytes", "host", "engine")
        return frame_of({name: value for name, value in row.items() if name not in nested} for row in rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        request = asdict(self.request) | {"limit_bytes": self.request.limit_bytes}
        return {
            "schema": SCHEMA,
            "request": request,
            "room": self.request.room.to_dict(),
            "rent": asdict(rent) if (rent := self.request.spec.rent) else None,
            "caution": self.request.caution,
            "verdict": self.plans[0].verdict if self.plans else min(self.losers, key=needed_bytes).verdict,
            "fits": bool(self.plans),
            "plans": [plan.to_dict() for plan in self.plans],
            "losers": [plan.to_dict() for plan in self.losers],
            "left_out": [{"what": what, "why": why} for what, why in self.skipped],
            "changes": [{"what": c.what, "value": c.value, "plan": c.plan.to_dict()} for c in self.changes],
        }

    def __repr__(self) -> str:
        lines = [self.verdict, *(f"{i}. {plan!r}" for i, plan in enumerate(self.plans, 1))]
        lines += [f"⚠ {self.request.caution}"] if self.request.caution else []
        return "\n".join([*lines, *map(str, self.changes)])

    def _repr_html_(self) -> str:
        return plans_html(self)


def plan_training(
    model: Any, gpu: str = "T4", gpus: int = 1, *, progress: Callable[[Plans], None] | None = None, **request: Any
) -> Plans:
    """Ranked plans that train `model` on `gpus` of that GPU with the target batch.

    model: a bundled name, a hub id, a folder, or a transformers configuration. gpu: a card (see `cards.card`); "2 x T4"
    says gpus too. length: tokens. batch: samples of one optimizer step, all GPUs together. methods: of "full", "lora",
    "qlora". precision, optimizer: None lets the planner choose. margin: the share of the peak that must stay free
    beside what is unknown. lora_rank, lora_targets, modules_to_save: see `add_adapters`. host: a machine (see
    `host.machines`) that has to hold the loading; a plan that it kills is left out, with the reason. prefer: "fidelity"
    (what changes training least is first), "speed" (the shortest bound on a step) or "margin" (the most memory left;
    each way with the micro-batch that needs least). selective: a way to train that fits under checkpointing alone comes
    once more, with what it leaves free spent on results that are then not computed again (`keeping`); the others may
    wait in the RAM.
    cpu_offload: full fine-tuning also with parameters, gradients and optimizer state in the CPU's RAM (`on_cpu`), on
    one GPU as on several.
    objective: "sft", or "dpo" by TRL's DPOTrainer: then batch counts pairs, and length is a prompt with one answer; or
    "grpo" by TRL's GRPOTrainer: then batch counts completions, of each prompt `generations` (8), and length is a prompt
    with one, of which the model generates completion_length (half) by transformers' `generate`, those of a step at
    once. beta: the weight of its KL term (0), for which there is a reference. iterations: optimizer steps on the same
    completions (1). vllm: a vLLM engine makes them instead, on the same cards ("colocate": beside the training, or
    asleep meanwhile; "asleep": only so); see `engine`.
    optim_args, optim_target_modules: of the optimizer, as TrainingArguments take them.
    tensor_parallel: only full fine-tuning in which so many GPUs compute each layer together (1: only without); None
    tries it where it can matter. sequence_parallel: with it the tokens between the layers' matrices are split too, and
    the logits, where the model and its length allow that. context_parallel: only full fine-tuning in which so many GPUs
    share each text (1: only without); None tries it where it can matter. replicas: only full fine-tuning in which so
    many copies of the model are split over a part of the GPUs each (HSDP; 1: only without); None looks for the most
    that fit, where there are several nodes of 8. device_map: also with the layers spread over the GPUs of one process,
    where a way to train does not fit whole on each: each sample goes through all of them, one after another. "only": so
    alone. pipeline_parallel: only full fine-tuning in so many stages, each with a part of the layers on GPUs of its
    own, through which micro-batches go one behind the other (1F1B); not tried unless it is asked for. expert_parallel:
    only full fine-tuning of a mixture of experts, of which so many GPUs have those of a layer between them; likewise.
    price_per_hour: of one GPU, by which a plan's `price` is the least that a million tokens can cost; None takes the
    card's least published rent. progress: called with what is known so far, whenever that is more, and when it is
    `settled` which plan is first. Each way to train comes once, with the largest micro-batch that fits. WrongValue in
    the reader's language.
    """
    made = make_request(model, gpu, gpus, **request)
    forks, progress = processes() - 1, progress or (lambda plans: None)
    ways = _ways_ahead(made) if forks else []
    if not ways:
        return loadable(_search(made, progress))
    with Forks(functools.partial(_way, made), ways, forks) as ahead:
        return loadable(_search(made, progress, ahead=ahead))


def _first(request: Request) -> Plan | None:
    """The first of the ranking."""
    return _search(request, lambda plans: None, first_only=True).best


@dataclass(frozen=True)
class _Way:
    """A way to train, searched through as one of several that have nothing to do with each other.

    rates: see `_largest`. noted: what was found for it on the way, for the process that asked.
    """

    fit: Plan | None
    miss: Plan | None
    rates: dict[tuple[bool, ...], float]
    noted: dict[tuple, Any]


def _ways_ahead(request: Request) -> list[Recipe]:
    """The recipes that the search of this request will most likely come to, in its order."""
    found = []
    with contextlib.suppress(*CANNOT_RUN):
        for recipe in sorted(recipes_of(request), key=lambda recipe: recipe.change):
            of = request.of(recipe)
            may_fit = sum(held(request, recipe).values()) <= of.room.possible_bytes
            if not may_fit or replace(recipe, rest_in_fp32=True) in found or replace(recipe, reference="same") in found:
                continue  # 16 bits only where fp32 does not fit, and the reference away only where it does not
            if recipe.vllm == ASLEEP and replace(recipe, vllm=AWAKE) in found:
                continue  # that hangs on what fits beside one that is awake
            if recipe.replicas > 1 and request.replicas is None:
                continue  # that hangs on what one copy leaves
            if recipe.context_parallel > 1 and request.context_parallel is None and request.batch >= request.gpus:
                continue  # only where nothing else fits
            less = [one for one in found if one.tensor_parallel < recipe.tensor_parallel]
            if any(one.whole_layers == recipe.whole_layers for one in less):
                continue
            lean = replace(recipe, checkpointing=True)
            ways = [recipe, lean, *(replace(lean, fused_lm_head=True) for _ in range(may_tile(request, recipe)))]
            for one in ways:
                found.append(one)
                fixed, rate = expected(request, one)
                if sum(held(request, one).values()) + fixed + rate * of.per_gpu <= of.limit_bytes:
                    break  # the whole batch at once: the next ones would only add work
    return found


def _way(request: Request, recipe: Recipe) -> _Way:
    rates: dict[tuple[bool, ...], float] = {}
    request = request.of(recipe)
    with noting() as noted:
        fit, miss = _smallest(request, recipe) if request.prefer == "margin" else _largest(request, recipe, rates, 0)
    return _Way(fit, miss, rates, noted)


def _search(
    request: Request,
    progress: Callable[[Plans], None],
    first_only: bool = False,
    ahead: Forks[Recipe, _Way] | None = None,
) -> Plans:
    plans, losers, refused, skipped, errors = [], [], {}, left_out(request), []
    rates: dict[tuple[bool, ...], float] = {}
    recipes = sorted(recipes_of(request), key=lambda recipe: recipe.change)
    now: Recipe | None = None  # what is being tried; None after the last
    plain: Recipe | None = None  # the first of which a plan without checkpointing may still come
    told = False  # that the first is settled

    def settled() -> bool:
        """Whether what comes changes training more than the first of the plans, or computes something twice."""
        if not by_change or not plans:
            return False
        first = min(plans, key=lambda plan: plan.key)
        least = now if first.extra_flops else plain
        return least is None or least.change > first.recipe.change

    def found() -> Plans:
        plans.sort(key=lambda plan: plan.key)
        losers.sort(key=lambda plan: plan.needed_bytes)
        sure = settled() and holds_loading(plans[0])
        return Plans(request, [*plans], [*losers], {**refused}, [*skipped], sure)

    def settles() -> bool:
        """As `settled`, of which whoever waits is told at once."""
        nonlocal told
        if settled() and not told:
            told = True
            progress(found())
        return told

    def asked(one: Recipe, above: int) -> tuple[Plan | None, Plan | None]:
        if ahead is not None and one in ahead:
            way = ahead(one)
            learn(way.noted)
            rates.update(way.rates)
            if not above or (way.fit is not None and way.fit.micro_batch > above):
                return way.fit, way.miss
        of = request.of(one)
        return _smallest(of, one) if spares else _largest(of, one, rates, above)

    def tried(one: Recipe, above: int = 0) -> tuple[Plan | None, Plan | None]:
        fit, miss = asked(one, above)
        if fit is not None:
            plans.append(fit)
        elif not above:
            losers.append(miss)
        if miss is not None and (fit is not None or above):
            refused[one] = miss
        progress(found())
        return fit, miss

    def cannot(one: Recipe, error: Exception, what: str | None = None) -> None:
        said = next(iter(str(error).splitlines()), "")
        what = what or tr(ko="실행할 수 없다", en="cannot be run")
        skipped.append((one.title, f"{what}: {said} ({type(error).__name__})"))

    def keep(one: Recipe) -> None:
        try:
            kept = keep_what_fits(request, one)
        except CANNOT_RUN as error:  # the recipe itself runs
            cannot(one, error, tr(ko="결과를 남기지 못한다", en="its results cannot be kept"))
            return
        if kept is not None:
            plans.append(kept)
            progress(found())

    by_change, spares = request.prefer == "fidelity", request.prefer == "margin"
    for recipe, following in itertools.zip_longest(recipes, recipes[1:]):
        now = plain = recipe
        if settles() and first_only:
            break
        upcast = replace(recipe, rest_in_fp32=True)
        loading = [plan for plan in plans if not plan.recipe.offload and holds_loading(plan)]
        on_the_card = [plan.recipe.at_once for plan in loading]
        if upcast != recipe and not spares and upcast in on_the_card:
            text = tr(ko="fp32로 두어도 들어간다", en="they fit in fp32")
            skipped.append((recipe.title, text))
            continue
        beside = replace(recipe, reference="same")
        if beside != recipe and not spares and beside in [plan.recipe for plan in plans]:
            text = tr(ko="기준 모델을 카드에 두어도 들어간다", en="it fits with the reference on the card")
            skipped.append((recipe.title, text))
            continue
        fitting = [plan.recipe for plan in plans if plan.recipe.change == recipe.change]
        if any(one.tensor_parallel < recipe.tensor_parallel for one in fitting):
            text = tr(
                ko="층을 나누지 않거나 덜 나누어도 들어간다", en="it fits with its layers split less or not at all"
            )
            row = f"{method_label(recipe.method)} · {recipe.precision} · {tensor_label()}", text
            skipped += [row] if row not in skipped else []
            continue
        if recipe.replicas > 1 and request.replicas is None and (text := _why_no_copies(request, recipe, plans)):
            row = f"{method_label(recipe.method)} · {recipe.precision} · {copies_label()}", text
            skipped += [row] if row not in skipped else []
            continue
        if any(one.tensor_parallel == 1 and one.context_parallel < recipe.context_parallel for one in fitting):
            text = tr(
                ko="글을 나누지 않거나 덜 나누어도 들어간다", en="it fits with its texts split less or not at all"
            )
            row = f"{method_label(recipe.method)} · {recipe.precision} · {context_label()}", text
            skipped += [row] if row not in skipped else []
            continue
        wholes = (replace(one, spread=False) for one in (recipe, upcast) if recipe.spread)
        if not spares and any(one in on_the_card for one in wholes):
            text = tr(ko="GPU마다 통째로 두어도 들어간다", en="it fits whole on each GPU")
            skipped.append((recipe.title, text))
            continue
        zero_3 = replace(recipe.whole_layers, stage=3)
        if recipe != recipe.whole_layers and zero_3 in [one.recipe for one in losers if one.at_least]:
            continue
        try:
            if sum(held(request, recipe).values()) > request.of(recipe).room.possible_bytes:
                losers.append(hopeless(request, recipe))
                progress(found())
                continue
            may_keep = request.selective and not spares and not why_not_kept(request, recipe)
            for checkpointing in (False, True):
                one = replace(recipe, checkpointing=checkpointing)
                awake = [] if spares else [plan for plan in plans if plan.recipe == replace(one, vllm=AWAKE) != one]
                if any(plan.accumulation == 1 for plan in awake):
                    text = tr(ko="깨워 두어도 배치가 한 번에 들어간다", en="the batch fits at once with it awake")
                    skipped.append((one.title, text))
                    break
                fit, miss = tried(one, max((plan.micro_batch for plan in awake), default=0))
                measured = [fit or miss]
                if may_fuse(request, one, fit, miss):
                    fused = replace(one, fused_lm_head=True)
                    try:
                        measured += filter(None, tried(fused, fit.micro_batch if fit is not None and not spares else 0))
                    except CANNOT_RUN as error:  # of TRL's head with this model: the recipe itself runs
                        cannot(fused, error)
                fits, least = any(plan.fits for plan in measured), min(measured, key=needed_bytes)
                lean = one  # the way in which blocks may keep results
                if may_offload(least) and (spares or not fits):
                    above = 0
                    for head in heads_of(request, recipe):
                        moved = replace(one, fused_lm_head=head, offload=True)
                        try:
                            there, _ = tried(moved, above)
                        except CANNOT_RUN as error:
                            cannot(moved, error)
                            continue
                        if there is None or spares or not fits_with_ram(there):
                            continue
                        lean = moved
                        if there.accumulation == 1 or request.prefer != "speed":
                            break
                        above = there.micro_batch
                plain = following
                if settles() and first_only:
                    return found()
                if checkpointing and may_keep:
                    keep(lean)
                may_keep &= not fits  # what fits without checkpointing recomputes no block
                if fit is not None and fit.accumulation == 1 and not checkpointing and not spares:
                    text = tr(ko="배치가 한 번에 들어가니 연산만 늘어난다", en="the batch fits at once: only more work")
                    skipped.append((replace(recipe, checkpointing=True).title, text))
                    break
        except CANNOT_RUN as error:
            errors.append(error)
            cannot(recipe, error)
    if errors and not plans and not losers:
        raise errors[0]
    return replace(found(), settled=True)


def _why_no_copies(request: Request, recipe: Recipe, plans: list[Plan]) -> str:
    """Why so many copies of the model are not tried beside the plans that fit; empty where they are."""
    one = replace(recipe, replicas=1)
    if any(replace(plan.recipe.at_once, replicas=1) == one for plan in plans if plan.recipe.replicas > recipe.replicas):
        return tr(ko="모델을 더 여러 벌 두어도 들어간다", en="more copies fit")
    more = sum(held(request, recipe).values()) - sum(held(request, one).values())
    # Of one sample at a time at most what the plan's samples take by their number.
    needs = [
        _states(plan) + (plan.tensors_bytes - _states(plan)) / plan.micro_batch + more
        for plan in plans
        if plan.recipe.at_once == one
    ]
    if min(needs, default=math.inf) <= request.of(recipe).limit_bytes:
        return ""
    return tr(
        ko="여러 벌로 두면 더 드는 학습 상태가, 한 벌을 모든 GPU에 나누고 남는 메모리보다 크다",
        en="what they hold more does not fit in what one copy over all GPUs leaves",
    )


def _largest(
    request: Request, recipe: Recipe, rates: dict[tuple[bool, ...], float], above: int
) -> tuple[Plan | None, Plan | None]:
    """(the largest micro-batch above so many samples that fits, the next larger one, which does not).

    None where there is none, or not run. Of a paged optimizer too it is the largest, though a smaller one evicts less.
    Memory grows with the micro-batch where gradients are accumulated. Which one is measured next is a guess, from the
    bytes a sample in the last plan that is alike (`rates`, by checkpointing, head and whether all weights are trained),
    or from the model's widths where there is none; what is returned is measured. The whole batch at once accumulates
    nothing, so it may fit where a smaller one does not: it is measured unless it is `_too_much_at_once`.
    """
    *ways, whole = [way for way in splits_of(request, recipe) if way[0] > above]  # the smallest first
    plans: dict[int, Plan] = {}
    at_once = None
    alike = recipe.checkpointing, recipe.offload, recipe.fused_lm_head, recipe.method == "full", recipe.spread
    rate, base = rates.get(alike), sum(held(request, recipe).values())
    if rate is None:
        fixed, rate = expected(request, recipe)
        base += fixed
    if base + rate * whole[0] <= request.limit_bytes:
        at_once = measure(request, recipe, *whole)
        if fits_with_ram(at_once):
            return at_once, None
    low, high = -1, len(ways)  # ways[low] fits, ways[high] does not
    while high - low > 1:
        place = _guess(request.limit_bytes, ways, low, high, plans, base, rate)
        plan = plans[place] = measure(request, recipe, *ways[place])
        rates[alike] = (plan.tensors_bytes - _states(plan)) / plan.micro_batch
        low, high = (place, high) if fits_with_ram(plan) else (low, place)
    if at_once is None and not (plans and _too_much_at_once(request, whole[0], [*plans.values()])):
        at_once = measure(request, recipe, *whole)
        if fits_with_ram(at_once):
            return at_once, None
    missed = [plan for plan in (plans.get(high), at_once) if plan is not None]
    if low < 0:
        least = min(missed, key=needed_bytes)
        return (least, None) if least.fits else (None, least)  # what only the RAM does not hold is for `loadable`
    return plans[low], missed[0] if missed and not missed[0].fits else None


def _smallest(request: Request, recipe: Recipe) -> tuple[Plan | None, Plan | None]:
    """(the micro-batch that needs least, None), or (None, it) where that does not fit: who wants memory left over.

    Memory grows with the micro-batch, but for the whole batch at once, of which no gradients wait.
    """
    if not recipe.accumulates or recipe.pipeline_parallel > 1:
        plan = measure(request, recipe, *splits_of(request, recipe)[0])
        return (plan, None) if plan.fits else (None, plan)
    plans = [measure(request, recipe, 1, request.per_gpu)]
    gradients, one = plans[0].at_peak.get("gradients", 0), _of_samples(plans[0])
    if request.per_gpu > 1 and one * (request.per_gpu - 1) <= 1.1 * gradients:  # samples may cost less than gradients
        plans.append(measure(request, recipe, request.per_gpu, 1))
    least = min([*filter(holds_step, plans)] or plans, key=needed_bytes)
    return (least, None) if least.fits else (None, least)


def _too_much_at_once(request: Request, samples: int, plans: list[Plan]) -> bool:
    """Whether so many samples at once would exceed the card by a tenth and more, at the bytes a sample of these plans.

    Without what the gradients take, of which none lies there from before.
    """
    states = min(_states(plan) - plan.at_peak.get("gradients", 0) for plan in plans)
    rate = min(_of_samples(plan) / plan.micro_batch for plan in plans)
    return states + rate * samples > 1.1 * request.limit_bytes


def _of_samples(plan: Plan) -> int:
    """Bytes at the peak that grow with the micro-batch, at least."""
    return max(plan.tensors_bytes - _whatever_the_samples(plan), 0)


def _whatever_the_samples(plan: Plan) -> int:
    """Bytes that may not grow with it: states, autocast's copies, the head's and its gradient, buckets, gathered ones.

    More than there is where not all of it lies there at that moment.
    """
    config = text_config(load_config(plan.request.model))
    head = HEAD_BYTES[plan.recipe.method] * config.vocab_size * config.hidden_size
    copies = expected(plan.request, plan.recipe)[0] + head
    if plan.recipe.spread:  # of the fullest card's own
        copies = plan.at_peak.get("parameters", 0) + head
    return _states(plan) + copies + plan.at_peak.get("other", 0) + plan.at_peak.get("gathered", 0)


def _states(plan: Plan) -> int:
    return sum(plan.at_peak.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "engine"))


def _guess(
    limit: int, ways: list[tuple[int, int]], low: int, high: int, plans: dict[int, Plan], base: int, rate: float
) -> int:
    """The place between low and high of the largest micro-batch that should fit."""
    known = plans.get(low) or plans.get(high)
    if known:
        base, rate = _states(known), (known.tensors_bytes - _states(known)) / known.micro_batch
        base += known.at_peak.get("fragmentation", 0)
    size = (limit - base) / max(rate, 1)
    fitting = [place for place in range(low + 1, high) if ways[place][0] <= size]
    # The guess and its neighbour decide: where the guess fits already, the next one up is asked.
    return max(fitting, default=low + 1)
