"""The ledger of what one of N ranks holds: from sharded modules, in closed form, and as the ZeRO paper has it.

Three roads to the same number. `shard_ledger` runs PyTorch's engines (`fake_rank`) and counts storages; `closed_form`
computes the same bytes from the shapes of the parameters, at once; `paper_bytes` is the paper's formula, which knows no
padding. A test holds the first two equal to the byte.
"""

from __future__ import annotations

import copy
import functools
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from typing import Any

from ..drawing.labels import html_table, kind_label
from ..errors import WrongValue
from ..language import tr
from ..models.adapters import LORA_RANK
from ..models.build import build_model
from ..models.configs import load_config, resolve_model_id
from ..models.depth import from_shallow
from ..remembered import remembered
from ..trace.trace import Trace
from ..units import GB, choose
from .adapters import Adapters, adapters_of, shapes_of
from .fake_rank import accelerate_groups, body_of, is_tied, run_rank
from .layout import CONVENTIONS, Convention, Layout

# GPT-2's shape in the sizes of the ZeRO paper (arXiv 1910.02054), table 1: layers, hidden size, heads. The paper gives
# no shapes; the last is the 1T model of Narayanan et al. (arXiv 2104.04473), table 1.
PAPER_MODELS = {"ZeRO-7.5B": (36, 4096, 32), "ZeRO-128B": (70, 12288, 96), "ZeRO-1T": (128, 25600, 160)}


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds of the model, in bytes by kind.

    gathered: whole parameters that stay beside the own shard. buckets: DDP's, a second copy of the gradients.
    """

    rank: int
    parameters: int
    gathered: int
    gradients: int
    master: int
    momentum: int
    variance: int
    buckets: int = 0

    @property
    def optimizer(self) -> int:
        """fp32 copy (where there is one), momentum and variance."""
        return self.master + self.momentum + self.variance

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.parameters + self.gathered + self.gradients + self.buckets + self.optimizer


KINDS = tuple(one.name for one in fields(RankMemory))[1:]


@dataclass
class ShardLedger:
    """What the ranks hold, counted in PyTorch's engines. In a notebook it is a table in decimal GB.

    ranks: rank → `RankMemory`. sent: collective → elements of parameters and gradients in one step, with padding (DDP's
    all-reduce, which does not run on fake tensors, by rule). method: "run" (every layer), or "depth": what two
    shallow runs did was found to go on, trace by trace and number by number (`models.depth.from_shallow`).
    """

    model: str
    parameters: int
    layout: Layout
    precision: str
    ranks: dict[int, RankMemory]
    sent: Counter
    method: str
    adapters: Adapters | None = None

    @property
    def paper(self) -> int:
        """Bytes a rank by the paper's formula, which trains every parameter."""
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
        text = f"{self.model}, {self.layout}: {self.largest.total / GB:.2f} GB"
        return f"{text} ({self.adapters.method})" if self.adapters else f"{text} (ZeRO: {self.paper / GB:.2f} GB)"

    def _repr_html_(self) -> str:
        if self.adapters:
            kinds = [kind for kind in KINDS if any(self._row(kind))]
            rows = [[kind_label(kind), *(f"{n / GB:,.3f}" for n in self._row(kind))] for kind in kinds]
            rows.append([tr(ko="합", en="total"), *(f"{n / GB:,.3f}" for n in self._row("total"))])
            return html_table(["GB", *(f"rank {rank}" for rank in self.ranks)], rows)
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
    return by_kind | {"gathered": 0.0, "buckets": 0.0}


def paper_bytes(parameters: float, layout: Layout, precision: str = "mixed") -> float:
    """Bytes a rank by the paper's formula, all kinds together."""
    return sum(paper_by_kind(parameters, layout, CONVENTIONS[precision]).values())


def closed_form(
    model: str, layout: Layout, precision: str = "mixed", rank: int = 0, *, gradient_as_bucket_view: bool = False,
    second: bool = False, fp32_shards: bool = False,
) -> RankMemory:  # fmt: skip
    """What rank `rank` holds, from the parameters' shapes alone.

    FSDP2 cuts dim 0 of each tensor into pieces of ceil(dim 0 / N) rows. Parameters and gradients are padded to that on
    every rank; the optimizer state is made for the rows that a rank really has, which may be none.
    ZeroRedundancyOptimizer deals out whole tensors, the largest first, each to the rank that has least. DDP (stages 0
    and 1) keeps all gradients a second time, in buckets, but with gradient_as_bucket_view. second: with the
    reference of DPO or GRPO (`second_model`), which counts as parameters, and as gathered where it stays so.
    fp32_shards: see `Convention.fp32_shards`.
    """
    config, convention = config_of(model), CONVENTIONS[choose(precision, CONVENTIONS, tr(ko="정밀도", en="precision"))]
    layout.check_model(config)
    convention = convention.fp32_shards if fp32_shards else convention
    models = 1 + second
    shapes = local_shapes(model, layout.tensor_parallel)
    n, whole = layout.data_parallel, sum(rows * rest * count for (rows, rest), count in shapes.items())
    mine = rank // layout.tensor_parallel % n
    padded, owned, gathered = whole, whole, 0
    if layout.stage == 1:
        owned = dealt_elements(shapes, n)[mine]
    if layout.stage >= 2:
        padded = sum(-(-rows // n) * rest * count for (rows, rest), count in shapes.items())
        owned = sum(_rows_of(rows, n, mine) * rest * count for (rows, rest), count in shapes.items())
        gathered = padded * n if layout.stage == 2 else 0  # FSDP2 keeps its own shard beside the gathered parameters
    return RankMemory(
        rank,
        models * padded * convention.parameters,
        models * gathered * convention.computes.itemsize,
        padded * convention.gradients,
        owned * convention.master,
        owned * convention.momentum,
        owned * convention.variance,
        0 if gradient_as_bucket_view or not layout.has_ddp else whole * convention.gradients,
    )


def closed_form_adapters(model: str, layout: Layout, adapters: Adapters, rank: int = 0) -> RankMemory:
    """What rank `rank` holds of a model with adapters: shards of all parameters, states of the adapters alone."""
    adapters.check(layout)
    shapes, n = shapes_of(ConfigKey.of(config_of(model)), adapters), layout.ranks
    states = sum(shapes.state(n, rank))
    gathered = shapes.gathered(n, adapters.dtype.itemsize) if layout.stage == 2 else 0
    return RankMemory(rank, shapes.held(n), gathered, shapes.gradients(n), 0, states, states)


def elements_sent(model: str, layout: Layout, second: bool = False) -> Counter:
    """collective → elements passed to it in one step, by rule: parameters alone, without tensor parallelism's own.

    second: of a step of DPO with a second model (`second_model`), which is gathered in every one at stage 3. Of several
    copies each rank adds its own share of the gradients up with theirs.
    """
    shapes = local_shapes(model, layout.tensor_parallel)
    if layout.data_parallel == 1:
        return Counter()
    whole = sum(rows * rest * count for (rows, rest), count in shapes.items())
    padded = padded_elements(model, layout)
    again = padded  # gathered a second time, for the backward pass
    if layout.as_accelerate:
        again -= _padded(_last_shapes(ConfigKey.of(config_of(model))), layout.data_parallel)
    sent = [
        {"allreduce": whole},
        {"allreduce": whole, "broadcast": whole},
        {"allgather_base": padded, "reduce_scatter_base": padded},
        {"allgather_base": padded + again + second * padded, "reduce_scatter_base": padded},
    ][layout.stage]
    return Counter(sent | ({"allreduce": padded // layout.data_parallel} if layout.replicas > 1 else {}))


def padded_elements(model: str, layout: Layout) -> int:
    """The parameters of one data-parallel group with FSDP2's padding: every dim 0 a multiple of its ranks."""
    return _padded(local_shapes(model, layout.tensor_parallel), layout.data_parallel)


def _padded(shapes: Counter, n: int) -> int:
    return n * sum(-(-rows // n) * rest * count for (rows, rest), count in shapes.items())


def dealt_shapes(shapes: Counter, n: int) -> list[Counter]:
    """What each of n ranks gets when whole tensors are dealt out, the largest first, to whoever has least."""
    ranks, dealt = [(0, rank) for rank in range(n)], [Counter() for _ in range(n)]
    for (rows, rest), count in sorted(shapes.items(), key=lambda item: -item[0][0] * item[0][1]):
        for _ in range(count):
            held, rank = heapq.heappop(ranks)
            dealt[rank][rows, rest] += 1
            heapq.heappush(ranks, (held + rows * rest, rank))
    return dealt


def dealt_elements(shapes: Counter, n: int) -> list[int]:
    """Elements that each of n ranks gets (`dealt_shapes`)."""
    return [sum(rows * rest * count for (rows, rest), count in mine.items()) for mine in dealt_shapes(shapes, n)]


def owned_elements(model: str, layout: Layout, rank: int = 0) -> list[int]:
    """Elements of each piece for which rank `rank` keeps optimizer state; FSDP2's may have none."""
    shapes, n = local_shapes(model, layout.tensor_parallel), layout.data_parallel
    mine = rank // layout.tensor_parallel % n
    if layout.stage == 1:
        shapes = dealt_shapes(shapes, n)[mine]
    pieces = [(_rows_of(rows, n, mine) if layout.stage >= 2 else rows) * rest for rows, rest in shapes.elements()]
    return [piece for piece in pieces if piece]


def _rows_of(rows: int, n: int, rank: int) -> int:
    piece = -(-rows // n)
    return min(max(rows - rank * piece, 0), piece)


def config_of(model: str) -> Any:
    """The config of a bundled architecture, of a hub id or folder, or of one of the ZeRO paper's sizes."""
    sizes = {name.lower(): name for name in PAPER_MODELS}
    if str(model).lower() not in sizes:
        return load_config(model)
    config = copy.deepcopy(load_config("gpt2"))
    config.n_layer, config.n_embd, config.n_head = PAPER_MODELS[sizes[model.lower()]]
    return config


def local_shapes(model: str, tensor_parallel: int = 1) -> Counter:
    """(rows, elements in a row) → how many parameters have this shape on the first tensor-parallel rank.

    All layers are built, without values: they may differ.
    """
    counts: Counter = Counter()
    for (shape, cut), count in _shapes(ConfigKey.of(config_of(model))).items():
        local = list(shape)
        if tensor_parallel > 1 and cut is not None:
            local[cut] = -(-local[cut] // tensor_parallel)
        counts[local[0], math.prod(local[1:])] += count
    return counts


@dataclass(frozen=True)
class ConfigKey:
    """A config by all that it says: what is remembered of it is found anew when a folder's config.json was edited."""

    kind: type
    said: str
    config: Any = field(compare=False, repr=False)

    @classmethod
    def of(cls, config: Any) -> ConfigKey:
        """The key of a config."""
        return cls(type(config), config.to_json_string(use_diff=False), config)


@remembered
def _shapes(key: ConfigKey) -> Counter:
    """(shape, dim that tensor parallelism cuts or None) → how many parameters are like this, tied ones once."""
    config = key.config
    model = build_model(config, CONVENTIONS["mixed"].dtype)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    cut = {}  # id of a parameter → the dim
    for name, module in body_of(model).named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)
        if style in ("colwise", "rowwise") and hasattr(module, "weight"):
            cut[id(module.weight)] = 0 if style == "colwise" else 1
            if style == "colwise" and module.bias is not None:
                cut[id(module.bias)] = 0
    if not is_tied(model):
        cut |= {id(model.get_input_embeddings().weight): 1, id(model.get_output_embeddings().weight): 0}
    return Counter((tuple(parameter.shape), cut.get(id(parameter))) for parameter in model.parameters())


@remembered
def _last_shapes(key: ConfigKey) -> Counter:
    """(rows, elements in a row) → how many, of the group that accelerate leaves gathered."""
    _, last = accelerate_groups(build_model(key.config, CONVENTIONS["mixed"].dtype), adapters=False)
    found = {id(parameter): parameter for module in last for parameter in module.parameters()}
    return Counter((parameter.shape[0], math.prod(parameter.shape[1:])) for parameter in found.values())


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
    gradient_as_bucket_view: bool = False,
    peft: str | None = None,
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] = "attention",
) -> ShardLedger:
    """Shard the model by PyTorch's own engine on a few of `ranks` ranks, train a step, and count what each one holds.

    model: a bundled architecture, a hub id, or "ZeRO-7.5B", "ZeRO-128B", "ZeRO-1T". precision: "mixed" (16 bytes a
    parameter, the paper's), "bf16" (8), "fp32" (16). look_at: the ranks; by default the first, the middle and the last.
    gradient_as_bucket_view: DDP's argument; by default its buckets are a second copy of the gradients, which the paper
    does not have (stages 0 and 1). peft: "lora" or "qlora", at stages 2 and 3: only the adapters are trained (see
    `add_adapters` for their rank and targets), and `sent` counts bytes.
    """
    config, model = config_of(model), resolve_model_id(model)
    layout = Layout(ranks, stage, tensor_parallel)
    precision = choose(precision, CONVENTIONS, tr(ko="정밀도", en="precision"))
    layout.check_model(config)
    adapters = adapters_of(peft, lora_rank, lora_targets, precision, layout)
    if look_at is None:
        look_at = (0, ranks // 2, ranks - 1)
    elif isinstance(look_at, (str, bytes)) or not isinstance(look_at, Iterable):
        raise WrongValue(
            tr(
                ko=f"look_at={look_at!r:.80}: rank 번호들이어야 한다. 예: (0, 5)",
                en=f"look_at={look_at!r:.80}: must be numbers of ranks, as (0, 5).",
            )
        )
    found, sent, method = {}, Counter(), "run"
    for rank in dict.fromkeys(look_at):
        held, sent, method = _run(ConfigKey.of(config), layout, precision, rank, adapters)
        buckets = 0 if gradient_as_bucket_view or not layout.has_ddp else held["gradients"]
        found[rank] = RankMemory(rank, **held, buckets=buckets)
    if layout.has_ddp:
        sent = sent + Counter(allreduce=elements_sent(model, layout)["allreduce"])
    return ShardLedger(model, count_elements(model), layout, precision, found, Counter(sent), method, adapters)


@functools.lru_cache(maxsize=512)
def _run(
    key: ConfigKey, layout: Layout, precision: str, rank: int, adapters: Adapters | None = None
) -> tuple[dict, Counter, str]:
    """(bytes held by kind, what is sent by collective, "depth" or "run"). They are shared: to read only."""
    config, convention = key.config, CONVENTIONS[precision]
    if layout.stage == 1:  # how whole tensors fall does not grow with the depth
        run = run_rank(config, layout, convention, rank, batch_size=None)
        return run.held, run.sent, "run"

    def numbers(config: Any) -> tuple[Trace, dict[tuple[str, str], int]]:
        run = run_rank(config, layout, convention, rank, adapters=adapters)
        held = {("held", kind): nbytes for kind, nbytes in run.held.items()}
        sent = run.sent_bytes if adapters else run.sent
        return run.trace, held | {("sent", kind): number for kind, number in sent.items()}

    found = from_shallow(config, numbers, names=adapters.module_names if adapters else ())
    method, (_, found) = ("depth", found) if found else ("run", numbers(config))
    parts = {part: {kind: n for (of, kind), n in found.items() if of == part} for part in ("held", "sent")}
    return parts["held"], Counter(parts["sent"]), method
