"""The ledger of what one of N ranks holds: from sharded modules, in closed form, and as the ZeRO paper has it.

Three roads to the same number. `shard_ledger` runs PyTorch's engines (`fake_rank`) and counts storages; `closed_form`
computes the same bytes from the shapes of the parameters, at once; `paper_bytes` is the paper's formula, which knows no
padding. A test holds the first two equal to the byte.
"""

from __future__ import annotations

import copy
import functools
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from typing import Any

import numpy as np

from ..drawing.labels import html_table, kind_label
from ..language import tr
from ..models.build import build_model
from ..models.configs import load_config, resolve_model_id
from ..models.depth import text_config, with_depth
from ..units import GB, choose
from .fake_rank import is_tied, run_rank
from .layout import CONVENTIONS, Convention, Layout

# GPT-2's shape in the sizes of the ZeRO paper (arXiv 1910.02054), table 1: layers, hidden size, heads. The paper gives
# no shapes; the last is the 1T model of Narayanan et al. (arXiv 2104.04473), table 1.
PAPER_MODELS = {"ZeRO-7.5B": (36, 4096, 32), "ZeRO-128B": (70, 12288, 96), "ZeRO-1T": (128, 25600, 160)}
DEPTHS = (1, 2, 3)


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds of the model, in bytes by kind. gathered: whole parameters that stay beside the own shard."""

    rank: int
    parameters: int
    gathered: int
    gradients: int
    master: int
    momentum: int
    variance: int

    @property
    def optimizer(self) -> int:
        """fp32 copy (where there is one), momentum and variance."""
        return self.master + self.momentum + self.variance

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.parameters + self.gathered + self.gradients + self.optimizer


KINDS = tuple(field.name for field in fields(RankMemory))[1:]


@dataclass
class ShardLedger:
    """What the ranks hold, counted in PyTorch's engines. In a notebook it is a table in decimal GB.

    ranks: rank → `RankMemory`. sent: collective → elements of parameters and gradients in one step, with padding (DDP's
    all-reduce, which does not run on fake tensors, by rule). method: "run" (every layer), or "depth": 1, 2 and 3 layers
    were run, found linear to the byte, and continued.
    """

    model: str
    parameters: int
    layout: Layout
    precision: str
    ranks: dict[int, RankMemory]
    sent: Counter
    method: str

    @property
    def paper(self) -> int:
        """Bytes a rank by the paper's formula."""
        return paper_bytes(self.parameters / self.layout.tensor_parallel, self.layout, self.precision)

    @property
    def largest(self) -> RankMemory:
        """The rank that holds most, of those that were looked at."""
        return max(self.ranks.values(), key=lambda memory: memory.total)

    @property
    def travelled(self) -> int:
        """Elements that each rank sends in a step: an all-reduce counts twice (ZeRO, section 7.1)."""
        return sum(number * (2 if name == "allreduce" else 1) for name, number in self.sent.items())

    def __repr__(self) -> str:
        return f"{self.model}, {self.layout}: {self.largest.total / GB:.2f} GB (ZeRO: {self.paper / GB:.2f} GB)"

    def _repr_html_(self) -> str:
        layout, convention = self.layout, CONVENTIONS[self.precision]
        paper = paper_by_kind(self.parameters / layout.tensor_parallel, layout, convention)
        heads = ["GB", tr(ko="논문의 식", en="paper")]
        heads += [f"rank {rank}" for rank in self.ranks]
        kinds = [kind for kind in KINDS if paper[kind] or any(getattr(m, kind) for m in self.ranks.values())]
        rows = [[kind_label(kind), *(f"{n / GB:,.3f}" for n in (paper[kind], *self._row(kind)))] for kind in kinds]
        total = [paper_bytes(self.parameters / layout.tensor_parallel, layout, self.precision), *self._row("total")]
        rows.append([tr(ko="합", en="total"), *(f"{n / GB:,.3f}" for n in total)])
        return html_table(heads, rows)

    def _row(self, kind: str) -> list[int]:
        return [getattr(memory, kind) for memory in self.ranks.values()]


def paper_by_kind(parameters: float, layout: Layout, convention: Convention) -> dict[str, float]:
    """kind → bytes a rank for Ψ parameters over N = layout.data_parallel ranks (ZeRO, sections 5.1 to 5.3).

    Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the parameters too: for "mixed" 16Ψ,
    4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N.
    """
    n = layout.data_parallel
    share = {"master": 1, "momentum": 1, "variance": 1, "gradients": 2, "parameters": 3}
    by_kind = {
        kind: parameters * getattr(convention, kind) / (n if layout.stage >= stage else 1)
        for kind, stage in share.items()
    }
    return by_kind | {"gathered": 0.0}


def paper_bytes(parameters: float, layout: Layout, precision: str = "mixed") -> float:
    """Bytes a rank by the paper's formula, all kinds together."""
    return sum(paper_by_kind(parameters, layout, CONVENTIONS[precision]).values())


def closed_form(model: str, layout: Layout, precision: str = "mixed", rank: int = 0) -> RankMemory:
    """What rank `rank` holds, from the parameters' shapes alone.

    FSDP2 cuts dim 0 of each tensor into pieces of ceil(dim 0 / N) rows. Parameters and gradients are padded to that on
    every rank; the optimizer state is made for the rows that a rank really has, which may be none.
    ZeroRedundancyOptimizer deals out whole tensors, the largest first, each to the rank that has least.
    """
    config, convention = config_of(model), CONVENTIONS[choose(precision, CONVENTIONS, tr(ko="정밀도", en="precision"))]
    layout.check_model(config)
    shapes = local_shapes(model, layout.tensor_parallel)
    n, whole = layout.data_parallel, sum(rows * rest * count for (rows, rest), count in shapes.items())
    mine = rank // layout.tensor_parallel
    padded, owned, gathered = whole, whole, 0
    if layout.stage == 1:
        owned = dealt_elements(shapes, n)[mine]
    if layout.stage >= 2:
        padded = sum(-(-rows // n) * rest * count for (rows, rest), count in shapes.items())
        owned = sum(_rows_of(rows, n, mine) * rest * count for (rows, rest), count in shapes.items())
        gathered = padded * n if layout.stage == 2 else 0  # FSDP2 keeps its own shard beside the gathered parameters
    return RankMemory(
        rank,
        padded * convention.parameters,
        gathered * convention.parameters,
        padded * convention.gradients,
        owned * convention.master,
        owned * convention.momentum,
        owned * convention.variance,
    )


def elements_sent(model: str, layout: Layout) -> Counter:
    """collective → elements passed to it in one step, by rule: parameters alone, without tensor parallelism's own."""
    shapes = local_shapes(model, layout.tensor_parallel)
    if layout.data_parallel == 1:
        return Counter()
    whole = sum(rows * rest * count for (rows, rest), count in shapes.items())
    padded = padded_elements(model, layout)
    return Counter(
        [
            {"allreduce": whole},
            {"allreduce": whole, "broadcast": whole},
            {"allgather_base": padded, "reduce_scatter_base": padded},
            {"allgather_base": 2 * padded, "reduce_scatter_base": padded},
        ][layout.stage]
    )


def padded_elements(model: str, layout: Layout) -> int:
    """The parameters of one data-parallel group with FSDP2's padding: every dim 0 a multiple of its ranks."""
    shapes, n = local_shapes(model, layout.tensor_parallel), layout.data_parallel
    return n * sum(-(-rows // n) * rest * count for (rows, rest), count in shapes.items())


def dealt_elements(shapes: Counter, n: int) -> list[int]:
    """Elements that each of n ranks gets when whole tensors are dealt out, the largest first, to whoever has least."""
    ranks = [(0, rank) for rank in range(n)]
    for (rows, rest), count in sorted(shapes.items(), key=lambda item: -item[0][0] * item[0][1]):
        for _ in range(count):
            held, rank = heapq.heappop(ranks)
            heapq.heappush(ranks, (held + rows * rest, rank))
    return [held for held, _ in sorted(ranks, key=lambda item: item[1])]


def _rows_of(rows: int, n: int, rank: int) -> int:
    piece = -(-rows // n)
    return min(max(rows - rank * piece, 0), piece)


@functools.cache
def config_of(model: str) -> Any:
    """The config of a bundled architecture, of a hub id, or of one of the ZeRO paper's sizes."""
    sizes = {name.lower(): name for name in PAPER_MODELS}
    if str(model).lower() not in sizes:
        return load_config(model)
    config = copy.deepcopy(load_config("gpt2"))
    config.n_layer, config.n_embd, config.n_head = PAPER_MODELS[sizes[model.lower()]]
    return config


@functools.cache
def local_shapes(model: str, tensor_parallel: int = 1) -> Counter:
    """(rows, elements in a row) → how many parameters have this shape on the first tensor-parallel rank.

    Two and three layers are built, without values, and continued to the full depth.
    """
    config = config_of(model)
    if text_config(config).num_hidden_layers <= 3:
        return _shapes(config, tensor_parallel)
    two, three = (_shapes(with_depth(config, layers), tensor_parallel) for layers in (2, 3))
    more = text_config(config).num_hidden_layers - 2
    return Counter({shape: two[shape] + more * (three[shape] - two[shape]) for shape in three})


def _shapes(config: Any, degree: int) -> Counter:
    model = build_model(config, CONVENTIONS["mixed"].dtype)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    split = {}  # id of a parameter -> the dim that tensor parallelism cuts
    for name, module in model.base_model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)
        if style in ("colwise", "rowwise"):
            split[id(module.weight)] = 0 if style == "colwise" else 1
            if style == "colwise" and module.bias is not None:
                split[id(module.bias)] = 0
    if not is_tied(model):
        split |= {id(model.get_input_embeddings().weight): 1, id(model.get_output_embeddings().weight): 0}
    counts: Counter = Counter()
    for parameter in model.parameters():
        shape = list(parameter.shape)
        if degree > 1 and id(parameter) in split:
            shape[split[id(parameter)]] = -(-shape[split[id(parameter)]] // degree)
        counts[shape[0], int(np.prod(shape[1:], dtype=np.int64))] += 1
    return counts


def count_elements(model: str) -> int:
    """Ψ: the number of parameters, tied ones once."""
    return sum(rows * rest * count for (rows, rest), count in local_shapes(model).items())


def shard_ledger(
    model: str,
    ranks: int,
    stage: int = 3,
    *,
    tensor_parallel: int = 1,
    precision: str = "mixed",
    look_at: Iterable[int] | None = None,
) -> ShardLedger:
    """Shard the model by PyTorch's own engine on a few of `ranks` ranks, train a step, and count what each one holds.

    model: a bundled architecture, a hub id, or "ZeRO-7.5B", "ZeRO-128B", "ZeRO-1T". precision: "mixed" (16 bytes a
    parameter, the paper's), "bf16" (8), "fp32" (16). look_at: the ranks; by default the first, the middle and the last.
    """
    config, model = config_of(model), resolve_model_id(model)
    layout = Layout(ranks, stage, tensor_parallel)
    precision = choose(precision, CONVENTIONS, tr(ko="정밀도", en="precision"))
    layout.check_model(config)
    if look_at is None:
        look_at = (0, ranks // 2, ranks - 1)
    found, sent, method = {}, Counter(), "run"
    for rank in dict.fromkeys(look_at):
        held, sent, method = _run_by_depth(config, layout, CONVENTIONS[precision], rank)
        found[rank] = RankMemory(rank, **held)
    if layout.stage <= 1 and layout.data_parallel > 1:
        sent += Counter(allreduce=elements_sent(model, layout)["allreduce"])
    return ShardLedger(model, count_elements(model), layout, precision, found, sent, method)


def _run_by_depth(config: Any, layout: Layout, convention: Convention, rank: int) -> tuple[dict, Counter, str]:
    depth = text_config(config).num_hidden_layers
    if layout.stage == 1:  # how whole tensors fall is not linear in depth
        run = run_rank(config, layout, convention, rank, batch_size=None)
        return run.held, run.sent, "run"
    if depth > max(DEPTHS):
        runs = [run_rank(with_depth(config, layers), layout, convention, rank) for layers in DEPTHS]
        held = _continue([run.held for run in runs], depth)
        sent = _continue([run.sent for run in runs], depth)
        if held is not None and sent is not None:
            return held, Counter(sent), "depth"
    run = run_rank(config, layout, convention, rank)
    return run.held, run.sent, "run"


def _continue(numbers: list[dict[str, int]], depth: int) -> dict[str, int] | None:
    """The numbers at `depth` layers from those at 1, 2 and 3; None where they do not lie on a line."""
    one, two, three = numbers
    if any(two[kind] - one[kind] != three[kind] - two[kind] for kind in three):
        return None
    return {kind: one[kind] + (depth - 1) * (two[kind] - one[kind]) for kind in three}
