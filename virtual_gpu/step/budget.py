"""An activation budget: what checkpointed blocks compute twice, and what keeping it takes, from one set of traces.

A run under checkpointing is watched: which blocks of the allocator are the results that blocks could keep, the first
time and the second. Each choice of them is an edit of that trace (`trace.twice`), so the whole curve, from nothing kept
to everything, costs one run. Who wants to know keeps what saves most FLOPs for a byte, as far as a limit goes. A result
that is not kept is computed again, or waits in the CPU's RAM where that takes less, by the published rates of the card
and its link: a bound on both, not a time of either.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..cards import GPUSpec
from ..counting.gpu import VirtualGPU
from ..errors import NotSupported
from ..language import tr
from ..models.adapters import linear_layers, sides
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config
from ..models.depth import text_config
from ..models.kept import ATTENTION, CPU, clamps, name_of, of_blocks
from ..trace.edits import with_ddp
from ..trace.trace import Trace
from ..trace.twice import MARKS, Mark, Twice
from .flops import flops_of, training_flops
from .optimizers import needs_cuda
from .predict import Run, card_of, predicted_run, virtual_run
from .setting import Setting


class _Watch:
    """Marks what the results that blocks could keep take of the allocator, and adds up what is computed again."""

    def __init__(self, gpu: VirtualGPU, keys: dict[Mark, int]):
        self.gpu, self.keys = gpu, keys
        self.recorder = None
        self.marked: dict[int, int] = {}  # an allocation of the meter → its mark's key
        self.flops: Counter[str] = Counter()

    def __call__(
        self, name: str, place: int, again: bool, operation: Any, operands: Sequence[Any], more: Mapping[str, Any]
    ) -> Any:
        meter, storages = self.gpu.meter, self.gpu.mode.storages
        self.recorder = meter.recorder
        before = meter.allocations
        out = operation(*operands, **more)
        self.gpu.mode.releases.settle()
        tensors = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        blocks = [storages[key][1] for one in tensors if (key := one.untyped_storage()._cdata) in storages]
        for number, block in enumerate(dict.fromkeys(blocks)):
            self._mark(block, Mark(name, place, number, again))
        live = meter.live_blocks()
        moments = [block for block in range(before + 1, meter.allocations + 1) if block not in live]
        for number, block in enumerate(moments):
            self._mark(block, Mark(name, place, -1 - number, again))
        if again:
            self.flops[name] += flops_of(operation, operands, more, out)
        return out

    def _mark(self, block: int, mark: Mark) -> None:
        self.marked[block] = self.keys.setdefault(mark, len(self.keys))

    def told(self, run: Run) -> Run:
        """The run with its trace marked, and the FLOPs that a micro-batch computes again."""
        trace, turns = run.trace, run.trace.names.count("backward")
        category = trace.category.copy()
        allocations = np.flatnonzero(trace.allocates)
        for block, entry in zip(self.recorder.births() if self.recorder else (), allocations.tolist(), strict=False):
            if block in self.marked:
                category[entry] = MARKS + self.marked[block]
        twice = {name: flops // turns for name, flops in self.flops.items()}
        return run._replace(trace=replace(trace, category=category[trace.born], held=None), twice=twice)


@dataclass(frozen=True)
class Result:
    """What blocks can keep: its bytes in all of them, of a micro-batch, and the FLOPs that it saves in a step.

    moving: FLOPs that the card could do while the bytes of a step go to the CPU and come back; inf where its rates are
    not published. evenly: all blocks have the same of it, so that any number of them can keep it.
    """

    name: str
    nbytes: int
    flops: int
    moving: float
    evenly: bool

    @property
    def work(self) -> float:
        """What it takes not to keep it: the cheaper of computing it again and of moving it."""
        return min(self.flops, self.moving)

    @property
    def worth(self) -> float:
        """FLOPs a byte, as PyTorch counts FLOPs: of attention those that a causal mask lets a kernel skip as well."""
        return self.work / self.nbytes


@dataclass(frozen=True)
class Point:
    """A choice, and what it takes: bytes of the tensors' peak, before the allocator's rests, and of an optimizer step.

    kept: as `Setting.kept_results` has it. extra_flops: what is computed a second time. sent_bytes: what goes to the
    CPU, and comes back. extra_work: extra_flops, and those that the card could do while these bytes go and come.
    bound: the least extra_work of any choice with this peak (the linear relaxation, see `Budget.bound`).
    """

    kept: tuple[str, ...]
    peak_bytes: int
    extra_flops: int
    sent_bytes: int
    extra_work: float
    bound: float


class Budget:
    """The choices of a setting, from all recomputed to all kept, those that no later one betters: `points`."""

    def __init__(self, setting: Setting, twice: Twice, flops: Mapping[str, int], moving: float):
        self.setting, self.twice = setting, twice
        steps = setting.gradient_accumulation_steps
        self.flops = training_flops(setting).total * steps
        bare = replace(setting, gradient_checkpointing=False, fused_lm_head=False, offload_checkpoints=False)
        self.least_flops = training_flops(bare).total * steps
        self._moving = moving * steps
        output, turns = twice.made >= 0, twice.trace.names.count("backward")
        found = []
        for k, name in enumerate(twice.names):
            rows = output & (twice.name == k)
            nbytes = int(twice.nbytes[rows].sum()) // turns
            evenly = bool((twice.block[rows] >= 0).all())
            if name in _own(setting.model_id) and flops[name]:
                found.append(Result(name, nbytes, flops[name] * steps, nbytes * self._moving, evenly))
        self.results = sorted(found, key=lambda one: (-one.worth, one.nbytes))

    # -- a choice ------------------------------------------------------------------------------------------------------

    def _rows(self, kept: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Which rows of `twice` are kept on the card, and which come back from the CPU."""
        twice, blocks = self.twice, of_blocks(kept, self.twice.blocks)
        there = np.array([[name + cpu in names for names in blocks] for cpu in ("", CPU) for name in twice.names])
        there = there.reshape(2, len(twice.names), twice.blocks)
        return there[0, twice.name, twice.block], there[1, twice.name, twice.block]

    def needed(self, kept: Sequence[str]) -> int:
        """What that choice takes of a card with the allocator's rests, in bytes (see `Need`)."""
        trace, allocator = self.twice.edited(*self._rows(kept)).through()
        return card_of(trace.timeline(), allocator.peak_reserved_bytes)

    def trace(self, kept: Sequence[str]) -> Trace:
        """The trace of that choice, before it goes through the allocator."""
        return self.twice.edited(*self._rows(kept))

    # -- the curve -----------------------------------------------------------------------------------------------------

    def _choices(self) -> list[tuple[tuple[str, ...], float, int, int]]:
        """(choice, its extra work, extra FLOPs, bytes to the CPU), each with a block's result more than the last."""
        blocks, found = self.twice.blocks, []
        steps = self.setting.gradient_accumulation_steps

        def add(whole: int, some: int) -> None:
            kept = [one.name for one in self.results[:whole]]
            rest = [(one, 1.0) for one in self.results[whole:]]
            if some:
                one = self.results[whole]
                kept.append(f"{one.name}:{some}")
                rest[0] = one, 1 - some / blocks
            flops, sent = self._fixed, 0
            for one, share in rest:
                if one.moving < one.flops:
                    kept.append(one.name + CPU)
                    sent += round(share * one.nbytes) * steps
                else:
                    flops += round(share * one.flops)
            found.append((tuple(kept), flops + sent * self._moving / steps if sent else flops, flops, sent))

        for whole, result in enumerate(self.results):
            for some in range(blocks if result.evenly else 1):
                add(whole, some)
        add(len(self.results), 0)
        return found

    @property
    def _fixed(self) -> int:
        """What is computed twice whatever is kept: adapters, the loss of a fused head, a first block's gradient."""
        return self.flops - sum(one.flops for one in self.results) - self.least_flops

    @functools.cached_property
    def _peaks(self) -> list[tuple[tuple, int, int]]:
        """(choice, the tensors' peak, its moment) of those that no later one betters."""
        live, best = self.twice.live(), []
        for choice in reversed(self._choices()):
            held = live + self.twice.change(*self._rows(choice[0]))
            moment = int(held.argmax())
            if not best or held[moment] < best[-1][1]:
                best.append((choice, int(held[moment]), moment))
        return best[::-1]

    @functools.cached_property
    def points(self) -> list[Point]:
        """The curve: the least peak first."""
        return [
            Point(kept, peak, flops, sent, work, self.bound(peak)) for (kept, work, flops, sent), peak, _ in self._peaks
        ]

    def bound(self, peak_bytes: float) -> float:
        """Extra work under which no choice with this peak lies, in whatever blocks, and in parts of them; inf: none.

        At any moment what is kept has to fit beside the rest. Of one moment that is a knapsack, whose linear relaxation
        is exact: what saves most for a byte that lies there then goes first. The largest of all moments counts at which
        a point of the curve has its peak.
        """
        return self._fixed + max(self._bound_at(moment, peak_bytes) for moment in {m for *_, m in self._peaks})

    def _bound_at(self, moment: int, peak_bytes: float) -> float:
        twice, output = self.twice, self.twice.made >= 0
        there = output & (twice.gone <= moment) & (moment < twice.again)
        passing = ~output & (twice.again <= moment) & (moment < twice.done)
        room = peak_bytes - (self._live[moment] - twice.nbytes[passing].sum())
        if room < 0:
            return math.inf
        left = []  # (work, bytes) of what lies there at that moment
        for result in self.results:
            rows = there & (twice.name == twice.names.index(result.name))
            share = len(np.unique(twice.block[rows])) / twice.blocks if result.evenly else 1
            if rows.any():
                left.append((result.work * share, int(twice.nbytes[rows].sum())))
        work = 0.0
        for most, nbytes in sorted(left, key=lambda one: -one[0] / one[1]):
            part = min(room / nbytes, 1)
            room -= part * nbytes
            work += (1 - part) * most
        return work

    @functools.cached_property
    def _live(self) -> np.ndarray:
        return self.twice.live()


def budget_of(setting: Setting, spec: GPUSpec, moving: float = math.inf, ddp: bool = False) -> Budget:
    """The budget of a setting under checkpointing on cards with these kernels.

    moving: FLOPs that a byte is worth which goes to the CPU and comes back (`flops_while_moving`); inf: none goes. ddp:
    as one of several ranks, with DistributedDataParallel's buckets. NotSupported for pairs.
    """
    if setting.pairs:
        raise NotSupported(
            tr(
                ko="objective='dpo': 블록이 무엇을 남길지는 아직 세지 않는다. 'sft'는 된다.",
                en="objective='dpo': what blocks could keep is not counted. objective='sft' can be.",
            )
        )
    if needs_cuda(setting.optimizer, setting.optim_args):
        raise NotSupported(
            tr(
                ko=f"optimizer={setting.optimizer!r}: 블록이 무엇을 남길지는 이 옵티마이저와 함께는 세지 않는다.",
                en=f"optimizer={setting.optimizer!r}: what blocks could keep is not counted beside it.",
            )
        )
    setting = replace(setting, gradient_checkpointing=True, kept_results=())
    keys: dict[Mark, int] = {}
    config = load_config(setting.model_id)
    how = functools.partial(virtual_run, watching=lambda gpu: _Watch(gpu, keys))
    run = predicted_run(setting, config, spec, how, "twice")
    trace = with_ddp(run.trace) if ddp else run.trace
    twice = Twice.of(trace, {key: mark for mark, key in keys.items()}, text_config(config).num_hidden_layers)
    return Budget(setting, twice, run.twice, moving)


def flops_while_moving(spec: GPUSpec, precision: str) -> float:
    """What the card could compute, at its published rate, while a byte goes to the CPU and comes back; inf if unknown.

    Both copies are on the stream that computes (see `models.offloaded`).
    """
    rate = spec.bf16_tflops if "bf16" in precision else spec.fp16_tflops
    link = spec.link_bytes_per_s
    return 2 * rate * 1e12 / link if rate and link else math.inf


@cached_by_model
def _own(model: str) -> frozenset[str]:
    """The names of what the model itself could keep: an adapter's costs next to nothing to compute again."""
    model = build_model(load_config(model), torch.float16)
    layers = () if clamps(model.config) else linear_layers(model).values()
    return frozenset((ATTENTION, *(name_of(*sides(layer)) for layer in layers)))
