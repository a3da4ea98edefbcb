"""The host's RAM that a plan's files need: while `train.py` loads the model, and in the step.

In the step that is parameters, gradients and optimizer state, where they wait on the CPU (`states_in_ram`), and the
checkpoints, where they wait on the CPU: pinned, which PyTorch rounds up to powers of two. A
block is free for the next only when its copy is done, and the CPU runs ahead of the card: counted as up to twice that.
Of a paged optimizer it is what finds no room on the card, at most all of its pages.

Read off how transformers 5 loads (core_model_loading.py): files of weights are mapped, and their pages kill nothing.
On the CPU a tensor in the files' type stays such a page; in another type it is a copy in RAM. Straight to a card
(`device_map`) only the tensors that four threads convert at once are in RAM. Checked against runs of the files
(tests/test_host.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..cards import Range
from ..host.machines import PROCESS, Machine, machine
from ..language import tr
from ..models.build import build_model
from ..models.configs import cached_by_model, checkpoint_dtype, load_config
from ..room import FITS, TIGHT, TOO_MUCH
from ..shards.adapters import Adapters, shapes_of
from ..shards.ledger import ConfigKey
from ..units import human_bytes
from .files.settings import loads_second, weights_dtype

if TYPE_CHECKING:
    from .plans import Plan
    from .recipes import Recipe
    from .request import Request
    from .search import Plans

_NOTHING = Range(0, 0)
_THREADS = 4  # transformers' GLOBAL_WORKERS, at most


@dataclass(frozen=True)
class HostNeed:
    """Bytes of RAM on the machine of all the plan's GPUs. loading: of tensors at the peak of loading, after which
    nothing of them stays. mapped: pages of the files. processes: one for each GPU, or one where layers are spread.
    checkpoints: pinned, of one micro-batch on each. state: a paged optimizer's, on all of them. training: parameters,
    gradients and optimizer state that wait there (`cpu_offload`). saving: the whole model of a plan that is split,
    gathered in one process's RAM while all that is there."""

    loading: Range
    mapped: int
    processes: int
    checkpoints: int = 0
    state: Range = _NOTHING
    training: int = 0
    saving: int = 0

    @property
    def needed(self) -> Range:
        """With the processes themselves: the most of the whole run."""
        low = max(self.loading.low, self.training + self.checkpoints + self.state.low + self.saving)
        high = max(self.loading.high, self.training + 2 * self.checkpoints + self.state.high + self.saving)
        return Range(low + self.processes * PROCESS.low, high + self.processes * PROCESS.high)

    def verdict(self, room: Machine) -> str:
        """FITS whatever the unknowns are, TIGHT where they decide, or TOO_MUCH."""
        if self.needed.low > room.free.high:
            return TOO_MUCH
        return FITS if self.needed.high <= room.free.low else TIGHT

    def line(self, name: str | None) -> str:
        """One line: what is needed, and where a machine is named, of how much."""
        loading, low = human_bytes(self.loading.high), human_bytes(self.needed.low)
        high = human_bytes(self.needed.high)
        more = ""
        if self.training:
            states = human_bytes(self.training)
            more = tr(
                ko=f", 스텝에 파라미터·그레이디언트·옵티마이저 상태 {states}",
                en=f", parameters, gradients and optimizer state {states} in a step",
            )
        if self.checkpoints:
            pinned = f"{human_bytes(self.checkpoints)}~{human_bytes(2 * self.checkpoints)}"
            more += tr(ko=f", 스텝에 체크포인트 {pinned}", en=f", checkpoints {pinned} in a step")
        if self.state.high:
            pages = f"{human_bytes(self.state.low)}~{human_bytes(self.state.high)}"
            more += tr(ko=f", 옵티마이저 상태의 페이지 {pages}", en=f", pages of optimizer state {pages}")
        if self.saving:
            saved, added = human_bytes(self.saving), bool(more)
            more += tr(ko=f", 저장할 때 {saved}", en=f", {saved}") + tr(
                ko=" 더" if added else "", en=f"{' more' if added else ''} to save"
            )
        text = tr(
            ko=f"호스트 RAM: 불러올 때 텐서 {loading}{more}, 프로세스까지 {low}~{high}",
            en=f"host RAM: tensors {loading} while loading{more}, with the process {low} to {high}",
        )
        if name is None:
            return text
        room = machine(name)
        told = {
            FITS: tr(ko="들어간다", en="fits"),
            TIGHT: tr(ko="빠듯하다", en="tight"),
            TOO_MUCH: tr(ko="모자란다", en="too much"),
        }[self.verdict(room)]
        free = human_bytes(room.free.low)
        return text + tr(ko=f". {room.name}의 {free}에 {told}", en=f"; {told}: {room.name} has {free} for it")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "loading_bytes": [self.loading.low, self.loading.high],
            "mapped_bytes": self.mapped,
            "checkpoints_bytes": self.checkpoints,
            "state_bytes": [self.state.low, self.state.high],
            "training_bytes": self.training,
            "saving_bytes": self.saving,
            "processes": self.processes,
            "needed_bytes": [self.needed.low, self.needed.high],
        }


@cached_by_model
def _sizes(model: str) -> tuple[int, int, torch.dtype]:
    """(parameters, those of the largest tensor, their type in the files)."""
    config = load_config(model)
    counts = [parameter.numel() for parameter in build_model(config, torch.float16).parameters()]
    return sum(counts), max(counts), checkpoint_dtype(model, config)


def _quantized(model: str, dtype: torch.dtype) -> int:
    """Bytes of the whole model once its linear layers are 4-bit ones, without adapters."""
    shapes = shapes_of(ConfigKey.of(load_config(model)), Adapters("qlora", dtype=dtype))
    return shapes.held(1) - shapes.gradients(1)


def host_need(plan: Plan) -> HostNeed:
    """What the plan's files need of the host's RAM."""
    recipe, gpus = plan.recipe, 1 if plan.recipe.spread else plan.request.gpus
    total, largest, stored = _sizes(plan.request.model)
    wanted = getattr(torch, weights_dtype(recipe))
    converted = 0 if wanted == stored else _THREADS * largest * wanted.itemsize * gpus
    if recipe.method == "qlora" and recipe.stage:  # each process quantizes its own copy, from which FSDP2 takes shards
        whole = gpus * _quantized(plan.request.model, wanted)
        loading = Range(whole, whole + converted)
    elif recipe.spread or recipe.expert_parallel > 1 or (recipe.method != "full" and not recipe.stage):
        loading = Range(0, converted)
    else:
        copies = 1 if recipe.stage else gpus  # fsdp_cpu_ram_efficient_loading: rank 0 alone reads
        if loads_second(plan):  # beside the first, which FSDP2 takes to the card when the training begins
            copies = 2 * gpus
        copied = 0 if wanted == stored else total * wanted.itemsize * copies
        loading = Range(copied, copied)
    shards, training = _offloaded(plan.request, recipe, plan.accumulation > 1)
    loading = Range(loading.low, loading.high + shards)
    state = Range(gpus * plan.evicted_bytes, gpus * plan.paged_bytes)
    return HostNeed(
        loading, total * stored.itemsize, gpus, gpus * plan.pinned_bytes, state, training, _saving(recipe, total)
    )


def _saving(recipe: Recipe, parameters: int) -> int:
    """What the whole model takes where the files gather it from shards, which rank 0 alone does.

    Of adapters not every kind of files gathers the frozen weights: nothing is said of those.
    """
    gathered = recipe.stage and recipe.method == "full"
    return parameters * getattr(torch, weights_dtype(recipe)).itemsize if gathered else 0


def _offloaded(request: Request, recipe: Recipe, accumulating: bool) -> tuple[int, int]:
    """What waits on the CPU of all GPUs (`on_cpu.InRAM`)."""
    if not recipe.cpu_offload:
        return 0, 0
    from .on_cpu import states_in_ram  # brings all of a program's card

    found = states_in_ram(request.model, request.gpus, getattr(torch, weights_dtype(recipe)), accumulating)
    return request.gpus * found.loading, request.gpus * found.training


def states_beyond(request: Request, recipe: Recipe) -> int:
    """Bytes of RAM that the named machine lacks for a training state on the CPU; 0 where it has them, or none is."""
    if request.host is None or not recipe.cpu_offload:
        return 0
    wanted = _offloaded(request, recipe, accumulating=False)[1] + _saving(recipe, _sizes(request.model)[0])
    wanted += request.gpus * PROCESS.low
    return max(wanted - machine(request.host).free.high, 0)


def holds_step(plan: Plan) -> bool:
    """Whether the request's machine has the RAM for what a step keeps there; True where none is named."""
    name, gpus = plan.request.host, 1 if plan.recipe.spread else plan.request.gpus
    kept = gpus * (plan.pinned_bytes + plan.evicted_bytes)
    kept += _offloaded(plan.request, plan.recipe, plan.accumulation > 1)[1]
    return name is None or not kept or kept + gpus * PROCESS.low <= machine(name).free.high


def holds_loading(plan: Plan) -> bool:
    """Whether the request's machine can load the plan; True where none is named."""
    name = plan.request.host
    return name is None or host_need(plan).verdict(machine(name)) != TOO_MUCH


def loadable(plans: Plans) -> Plans:
    """The plans that the request's machine can load; the others are told of. All stay where none could be loaded."""
    name = plans.request.host
    if name is None:
        return plans
    kept = [plan for plan in plans.plans if holds_loading(plan)]
    if not kept or len(kept) == len(plans.plans):
        return plans
    refused = [(plan.title, host_need(plan).line(name)) for plan in plans.plans if plan not in kept]
    return replace(plans, plans=kept, skipped=[*plans.skipped, *refused])
