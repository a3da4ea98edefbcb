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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..cards import GPUSpec
from ..counting.gpu import as_gpu
from ..drawing import svg
from ..drawing.budget import budget_table, draw_budget
from ..drawing.frames import frame_of
from ..errors import NotSupported
from ..language import tr
from ..models.adapters import linear_layers, sides
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config
from ..models.depth import text_config
from ..models.kept import ATTENTION, CPU, clamps, name_of, of_blocks
from ..real import GPU
from ..trace.edits import with_ddp
from ..trace.trace import Trace
from ..trace.twice import Mark, Twice
from ..units import boolean, human_bytes, positive_int
from .flops import training_flops
from .optimizers import needs_cuda
from .predict import card_of, predicted_run, spec_like, virtual_run
from .setting import Setting
from .watched import ResultsWatch

if TYPE_CHECKING:
    import pandas


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


@dataclass(frozen=True)
class Measured:
    """A choice as it was run: bytes of the tensors' peak, and what it takes of a card (see `Need`); FLOPs of a step."""

    peak_bytes: int
    needed_bytes: int
    extra_flops: int


class Budget:
    """The choices of a setting, from all recomputed to all kept, those that no later one betters: `points`.

    measured: choice → `Measured`, of those that were run with PyTorch's selective checkpointing (`measure`).
    """

    def __init__(
        self,
        setting: Setting,
        spec: GPUSpec,
        run: Callable[[tuple[str, ...]], Trace],
        twice: Twice,
        flops: Mapping[str, int],
        moving: float,
        among: str = "",
    ):
        """run: the trace of a choice, run. flops: a result's name → what a micro-batch computes of it a second time.

        among: behind the card's name, how many of them there are and what they share.
        """
        self.setting, self.spec, self.twice, self.among, self._run = setting, spec, twice, among, run
        self.measured: dict[tuple[str, ...], Measured] = {}
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

    def trace(self, kept: Sequence[str]) -> Trace:
        """The trace of that choice, before it goes through the allocator."""
        return self.twice.edited(*self._rows(kept))

    def needed(self, kept: Sequence[str]) -> int:
        """What that choice takes of a card with the allocator's rests, in bytes (see `Need`)."""
        return _needed(self.trace(kept))

    def measure(self, kept: Sequence[str]) -> Measured:
        """That choice run as PyTorch's selective checkpointing has it, on a virtual GPU without a limit."""
        setting, trace = replace(self.setting, kept_results=tuple(kept)), self._run(tuple(kept))
        flops = training_flops(setting).total * setting.gradient_accumulation_steps
        found = Measured(trace.peak_bytes, _needed(trace), flops - self.least_flops)
        self.measured[tuple(kept)] = found
        return found

    def measure_evenly(self, count: int) -> None:
        """Run so many points, evenly along the curve, both ends among them."""
        count, last = min(count, len(self.points)), len(self.points) - 1
        for place in sorted({round(k * last / max(count - 1, 1)) for k in range(count)}):
            self.measure(self.points[place].kept)

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

    def beyond_best(self, point: Point) -> float:
        """The most, as a share of the step's work, that another choice with this peak could save."""
        return max(1 - (self.least_flops + point.bound) / (self.least_flops + point.extra_work), 0.0)

    @property
    def corners(self) -> list[Point]:
        """The points from which on another result is kept, which all blocks do at the next; the last of all too."""
        counts = [sum(not one.endswith(CPU) for one in point.kept) for point in self.points]
        firsts = {count: place for place, count in reversed([*enumerate(counts)])}.values()
        return [self.points[place] for place in sorted({*firsts, len(counts) - 1})]

    def _bound_at(self, moment: int, peak_bytes: float) -> float:
        twice, output = self.twice, self.twice.made >= 0
        there = output & (twice.gone <= moment) & (moment < twice.again)
        passing = ~output & (twice.again <= moment) & (moment < twice.done)
        room = float(peak_bytes - (self._live[moment] - twice.nbytes[passing].sum()))
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

    # -- shown ---------------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """One line that names it."""
        return f"{self.setting.title} · {self.spec.name}{self.among}"

    def chart(self) -> svg.Drawing:
        """The curve as a picture."""
        return draw_budget(self)

    def to_frame(self) -> pandas.DataFrame:
        """The points as rows, the least peak first: bytes, FLOPs of a step; of those that were run what they took."""
        return frame_of(self._row(point) for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """The results and the points as plain JSON values."""
        numbers = {"least_flops": self.least_flops, "capacity_bytes": self.spec.capacity_bytes}
        results = [asdict(one) | {"moving": None if math.isinf(one.moving) else one.moving} for one in self.results]
        return numbers | {"results": results, "points": [self._row(point) for point in self.points]}

    def _row(self, point: Point) -> dict[str, Any]:
        run = self.measured.get(point.kept)
        more = {"beyond_best": self.beyond_best(point)}
        more |= {f"measured_{name}": getattr(run, name, None) for name in ("peak_bytes", "needed_bytes", "extra_flops")}
        return asdict(point) | {"kept": list(point.kept)} | more

    @property
    def distance_bytes(self) -> int:
        """By how much a peak that was run is off what was predicted of it, at most."""
        found = {kept: int((self._live + self.twice.change(*self._rows(kept))).max()) for kept in self.measured}
        return max((abs(run.peak_bytes - found[kept]) for kept, run in self.measured.items()), default=0)

    def __repr__(self) -> str:
        ends, least = (self.points[0], self.points[-1]), self.least_flops
        first, last = (f"{human_bytes(one.peak_bytes)}, +{one.extra_work / least:.1%}" for one in ends)
        worst, runs = max(map(self.beyond_best, self.points)), len(self.measured)
        ko, en = "꼭 같다", "exactly as predicted"
        if off := self.distance_bytes:
            ko, en = f"{off:,}바이트까지 다르다", f"off the prediction by {off:,} bytes at most"
        return tr(
            ko=f"선택 {len(self.points)}가지, {first}에서 {last}까지. 다르게 골라 더 줄일 수 있는 연산은 많아야 "
            f"{worst:.1%}다(선형 완화). {runs}가지를 실행해 재니 예측과 {ko}.",
            en=f"{len(self.points)} choices, {first} to {last}; at most {worst:.1%} could be saved by others (linear "
            f"relaxation); {runs} of them were run, {en}.",
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(f'{self.title}: {self!r}')}</p>\n{budget_table(self)}\n{self.chart().svg()}"


def _needed(trace: Trace) -> int:
    trace, allocator = trace.through()
    return card_of(trace.timeline(), allocator.peak_reserved_bytes)


def activation_budget(setting: Setting, gpu: GPU | GPUSpec | str, moves: bool = True, measured: int = 4) -> Budget:
    """The budget of a setting on a card. moves: a result may wait in the CPU's RAM where that takes less by the rates.

    measured: so many points are run, evenly along the curve, both ends among them. NotSupported but for SFT.
    """
    count, moves, gpu = positive_int(measured, "measured"), boolean(moves, "moves"), as_gpu(gpu)
    spec = gpu.spec if gpu.is_virtual else spec_like(gpu)
    setting.check_length(load_config(setting.model_id))
    known = moves and gpu.is_virtual  # of a real one the link is not known
    budget = budget_of(setting, spec, flops_while_moving(spec, setting.precision) if known else math.inf)
    budget.measure_evenly(count)
    return budget


def check_counted(objective: str, optimizer: str, optim_args: str = "") -> None:
    """NotSupported for what no budget is counted of: but SFT nothing, nor beside an optimizer by its library's code."""
    if objective != "sft":
        raise NotSupported(
            tr(
                ko=f"objective={objective!r}: 블록이 무엇을 남길지는 아직 세지 않는다. 'sft'는 된다.",
                en=f"objective={objective!r}: what blocks could keep is not counted. objective='sft' can be.",
            )
        )
    if needs_cuda(optimizer, optim_args):
        raise NotSupported(
            tr(
                ko=f"optimizer={optimizer!r}: 블록이 무엇을 남길지는 이 옵티마이저와 함께는 세지 않는다.",
                en=f"optimizer={optimizer!r}: what blocks could keep is not counted beside it.",
            )
        )


def budget_of(setting: Setting, spec: GPUSpec, moving: float = math.inf, ddp: bool = False, among: str = "") -> Budget:
    """The budget of a setting under checkpointing on cards with these kernels.

    moving: FLOPs that a byte is worth which goes to the CPU and comes back (`flops_while_moving`); inf: none goes. ddp:
    as one of several ranks, with DistributedDataParallel's buckets. among: see `Budget`. NotSupported but for SFT.
    """
    check_counted(setting.objective, setting.optimizer, setting.optim_args)
    setting = replace(setting, gradient_checkpointing=True, kept_results=(), use_reentrant=False)
    keys: dict[Mark, int] = {}
    config = load_config(setting.model_id)
    how = functools.partial(virtual_run, watching=lambda gpu: ResultsWatch(gpu, keys))
    watched = predicted_run(setting, config, spec, how, "twice")
    of_rank = with_ddp if ddp else lambda trace: trace
    marks = {key: mark for mark, key in keys.items()}
    twice = Twice.of(of_rank(watched.trace), marks, text_config(config).num_hidden_layers)

    def run(kept: tuple[str, ...]) -> Trace:
        return of_rank(predicted_run(replace(setting, kept_results=kept), config, spec).trace)

    return Budget(setting, spec, run, twice, watched.twice, moving, among)


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
