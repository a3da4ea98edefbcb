"""What one of N ranks needs for a whole training step: its share of the model, and all that ZeRO does not share.

Activations are each rank's own. FSDP2 besides gathers the group that is being computed, prefetches the next one, and
needs buffers to send from. All of it comes from one run of a rank on the virtual GPU (`fake_rank`), whose trace is then
edited (`trace.edits`): optimizer state, DDP's buckets, an accumulation, another number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..allocator import round_size
from ..cards import CATALOG, GPUSpec, card
from ..errors import NotSupported, WrongValue
from ..language import tr
from ..models.adapters import LORA_RANK
from ..models.configs import cached_by_model, resolve_model_id
from ..models.depth import from_shallow, kind_of_batch, text_config
from ..models.kept import is_uniform
from ..models.kept import kept_results as kept_results_of
from ..models.offloaded import Moved, require_offload
from ..remembered import remembered
from ..trace.edits import accumulating as accumulating_trace
from ..trace.edits import held_from_the_start, resized, scaled, with_ddp
from ..trace.timeline import CATEGORIES
from ..trace.trace import Trace
from ..trace.twice import Mark, Twice
from ..units import boolean, choose, positive_int
from .adapters import Adapters, adapters_of, shapes_of
from .fake_rank import run_rank
from .generated import Generated, generated_of
from .layout import CONVENTIONS, Layout
from .ledger import (
    ConfigKey,
    RankMemory,
    closed_form,
    closed_form_adapters,
    config_of,
    dealt_elements,
    elements_sent,
    local_shapes,
    owned_elements,
    padded_elements,
)
from .mesh import check_mesh
from .nccl import nccl_bytes
from .rank_peak import RankStep, capacity_of
from .second_model import Pairs, check_objective, pairs_of

REFERENCE = 64  # data-parallel ranks of the run that stands for other numbers of them
PADDING = 0.002


class RankNeed(NamedTuple):
    """What a rank takes of a card, in bytes: a `RankStep`'s numbers without its trace.

    card: without NCCL's buffers. sent: of parameters and gradients; sent_activations: for tensor parallelism;
    sent_to_copies: of gradients to the other copies of the model; sent_to_next: of sent_activations what goes from one
    GPU to one other. Of GRPO rollout: what is reserved while an engine is handed the weights, and at_generation its
    tensors by category; sent_once: what is gathered for that, once a generation.
    """

    card: int
    tensors: int
    at_peak: dict[str, int]
    sent: int
    offloaded: int
    pinned: int
    sent_activations: int
    sent_to_copies: int = 0
    sent_to_next: int = 0
    rollout: int = 0
    at_generation: Mapping[str, int] = MappingProxyType({})
    sent_once: int = 0


@cached_by_model
def rank_need(model: str, ranks: int, stage: int, **settings: Any) -> RankNeed:
    """What `rank_step` counts with these arguments, and the least capacity in which the caching allocator manages."""
    step = rank_step(model, ranks, stage, **settings)
    copies, to_next = step.sent_to_copies, step.sent_activation_bytes["all_to_all_single"]
    sent = step.parameters_and_gradients_sent - copies
    offloaded, activations = (step.offloaded_bytes, step.pinned_bytes), step.activations_sent
    return RankNeed(
        step.card_bytes, step.total, dict(step.at_peak), sent, *offloaded, activations, copies, to_next, *_of_sync(step)
    )


def _of_sync(step: RankStep) -> tuple[int, dict[str, int], int]:
    """A `RankNeed`'s last three."""
    if step.handing_over is None:
        return 0, {}, 0
    whole = step.memory.gathered // 2 if step.generated.has_second else 0
    return step.rollout_bytes, _peak(step.handing_over, whole)[0], step.sent_once_bytes


def rank_step(
    model: str,
    ranks: int,
    stage: int = 3,
    *,
    tensor_parallel: int = 1,
    replicas: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
    precision: str = "mixed",
    batch_size: int = 1,
    sequence_length: int = 1024,
    gradient_checkpointing: bool = False,
    gpu: str = "H100",
    exact: bool = True,
    accumulating: bool = False,
    whole_gradients: bool = False,
    gradient_as_bucket_view: bool = False,
    peft: str | None = None,
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] = "attention",
    modules_to_save: Sequence[str] = (),
    trained_dtype: str = "",
    as_accelerate: bool | None = None,
    repeat_kv: bool = False,
    fused_lm_head: bool = False,
    offload_checkpoints: bool = False,
    kept_results: Sequence[str] = (),
    watched: bool = False,
    objective: str = "sft",
    reference: str = "same",
    completion_length: int = 0,
    rollout: int = 0,
    beta: float = 0.0,
    iterations: int = 1,
    padded: bool = False,
    fp32_shards: bool | None = None,
) -> RankStep:
    """The peak of a training step (forward and backward, optimizer state present) on one of `ranks` ranks.

    batch_size and sequence_length are one rank's micro-batch (with tensor parallelism: its group's). exact: run at this
    number of ranks. Otherwise a run with 64 data-parallel ranks stands for it, with the shards of `closed_form`, unless
    there are so many ranks that padding adds over 0.2 %. The optimizer step's temporaries are not counted (a fused one
    has none). accumulating: the gradients of earlier micro-batches lie there from the beginning; with whole_gradients
    not each rank's share of them but all (`run_rank`).
    gradient_as_bucket_view: DDP's argument; by default its buckets are a second copy of the gradients. peft: "lora" or
    "qlora" at stages 2 and 3, as accelerate runs them: frozen weights in the 16 bits that the GPU has, or 4-bit ones
    stored in those; fp32 adapters (`add_adapters`' rank, targets and modules_to_save), or as trained_dtype says
    (`Setting`). It is always run at this number of ranks.
    as_accelerate: FSDP2's groups as accelerate makes them, of which the last stays gathered (`Layout`). repeat_kv: see
    `models.attention.kv_repeated`; fused_lm_head: `models.fused_head`; offload_checkpoints (with checkpointing):
    `models.offloaded`; kept_results (with checkpointing, of SFT): `models.kept`. watched: it is also said what of it
    could be kept. objective: "dpo" is a step of TRL's DPOTrainer under accelerate, at stages 2 and 3: batch_size
    counts pairs, the head is fused, and the reference is a second model ("same") or its log probabilities are made
    first ("precomputed"); adapters are switched off for it (`second_model`). "grpo" is one of its GRPOTrainer, with
    completions from a vLLM engine (`generated`): batch_size counts completions, sequence_length is a prompt with one,
    of which completion_length tokens (0: half) are generated, rollout of them at once (0: a micro-batch), and learned
    from in so many iterations; beta over 0: with a reference, whole as DPO's is. padded: a micro-batch's sequences
    differ in length, as TRL's do here, so that attention has a mask. fp32_shards: see `Convention.fp32_shards`; at
    stages 2 and 3 of all weights, and always run at this number of ranks. Both this and as_accelerate are set for TRL's
    trainers where they are None. replicas: copies of the model, without adapters or TRL's objectives (`Layout`).
    sequence_parallel: the GPUs of a layer share the tokens too (`shards.sequence`). context_parallel: so many GPUs
    share each text, of sequence_length tokens (`shards.context`), at stage 3. WrongValue for what these are not counted
    with (`check_mesh`).
    """
    config, spec = config_of(model), card(gpu).needs_cuda()
    check_objective(objective, stage, tensor_parallel)
    of_trl = objective != "sft"
    as_accelerate = of_trl if as_accelerate is None else boolean(as_accelerate, "as_accelerate") or objective == "dpo"
    fp32_shards = of_trl if fp32_shards is None else boolean(fp32_shards, "fp32_shards") or objective == "dpo"
    sequence_parallel = boolean(sequence_parallel, "sequence_parallel") and tensor_parallel > 1
    layout = Layout(ranks, stage, tensor_parallel, as_accelerate, replicas, sequence_parallel, context_parallel)
    pairs = pairs_of(objective, reference, peft)
    layout.check_model(config)
    precision = choose(precision, CONVENTIONS, tr(ko="정밀도", en="precision"))
    positive_int(batch_size, "batch_size")
    generated = generated_of(
        objective, batch_size, positive_int(sequence_length, "sequence_length"), completion_length, rollout, beta,
        iterations, peft,
    )  # fmt: skip
    gradient_checkpointing = boolean(gradient_checkpointing, "gradient_checkpointing")
    exact = boolean(exact, "exact")
    if boolean(offload_checkpoints, "offload_checkpoints"):
        require_offload()
        if not gradient_checkpointing:
            raise WrongValue(
                tr(
                    ko="offload_checkpoints=True: gradient_checkpointing=True일 때만 뜻이 있다.",
                    en="offload_checkpoints=True: says something only with gradient_checkpointing=True.",
                )
            )
    _check_length(model, config, positive_int(sequence_length, "sequence_length"))
    adapters = adapters_of(peft, lora_rank, lora_targets, precision, layout, spec, modules_to_save, trained_dtype)
    fused_lm_head, padded = boolean(fused_lm_head, "fused_lm_head") or of_trl, boolean(padded, "padded")
    check_mesh(
        config, layout, length=sequence_length, precision=precision, spec=spec, adapters=adapters is not None,
        objective=objective, fused_lm_head=fused_lm_head, padded=padded,
    )  # fmt: skip
    rank = _fullest(model, layout)
    fp32_shards &= stage >= 2 and not adapters
    second = pairs.on_the_card if pairs else generated is not None and generated.has_second
    if adapters:
        memory = closed_form_adapters(model, layout, adapters, rank)
    else:
        memory = closed_form(
            model, layout, precision, rank, gradient_as_bucket_view=gradient_as_bucket_view, second=second,
            fp32_shards=fp32_shards,
        )  # fmt: skip
    sharded = stage >= 2
    run_as = layout if sharded else Layout(tensor_parallel, 0, tensor_parallel)
    if sharded and not exact and not adapters and not fp32_shards:  # what is cast of a shard hangs on it
        reference = replace(layout, ranks=tensor_parallel * replicas * REFERENCE)
        ratio = padded_elements(model, layout) / padded_elements(model, reference)
        run_as = reference if ratio < 1 + PADDING else layout
    like = replace(CATALOG["T4"], compute_capability=spec.compute_capability)  # its size says nothing here

    waits = boolean(whole_gradients, "whole_gradients") and accumulating and sharded
    kept, watched = kept_results_of(kept_results), boolean(watched, "watched")
    if kept or watched:
        _check_kept("kept_results" if kept else "watched", objective, layout, gradient_checkpointing)

    def run(pairs: Pairs | None, generated: Generated | None) -> _Traced:
        return _trace(
            ConfigKey.of(config), run_as, precision, batch_size, sequence_length, gradient_checkpointing, like,
            adapters, repeat_kv, fused_lm_head, offload_checkpoints, pairs, generated, padded, fp32_shards,
            waits and not (generated and generated.moment != "step"), kept, watched,
        )  # fmt: skip

    traced = run(pairs, generated)
    trace = traced.trace
    if run_as != layout and sharded:
        at_reference = closed_form(model, run_as, precision)
        trace = _on_ranks(trace, memory, at_reference)
    if accumulating and not waits:
        trace = accumulating_trace(trace)
    if layout.has_ddp:
        trace = with_ddp(trace, gradient_as_bucket_view=gradient_as_bucket_view)
    convention = CONVENTIONS[precision].fp32_shards if fp32_shards else CONVENTIONS[precision]
    if adapters:
        states = [
            each for each in shapes_of(ConfigKey.of(config), adapters).state(layout.ranks, rank) for _ in range(2)
        ]
    else:
        kinds = (convention.master, convention.momentum, convention.variance)
        states = [n * each for n in owned_elements(model, layout, rank) for each in kinds if each]
    trace = held_from_the_start(trace, states, "optimizer")
    whole = memory.gathered // 2 if second else 0  # at stage 2, from the first micro-batch or scoring on
    if pairs and (first := pairs.first(layout)):
        before = run(replace(pairs, moment=first), None).trace
        trace, whole = max((trace, whole), (before, 0), key=lambda moment: capacity_of(moment[0]))
    handing_over, sent_once = None, 0
    if generated:
        sync = run(None, generated.at("sync"))
        handing_over = sync.trace
        sent_once = sum(sync.sent_bytes.values()) + _scored(model, layout, precision, generated, adapters)
        if run_as != layout:
            handing_over = _on_ranks(handing_over, memory, at_reference)
        handing_over = held_from_the_start(handing_over, states, "optimizer")
        moments = [(trace, whole), (handing_over, whole)]
        if second:
            scoring = run(None, generated.at("scoring")).trace
            moments.append((scoring if stage == 2 else held_from_the_start(scoring, states, "optimizer"), 0))
        trace, whole = max(moments, key=lambda moment: capacity_of(moment[0]))
    twice = Twice.of(trace, traced.marks, text_config(config).num_hidden_layers) if watched else None
    trace, allocator = (twice.trace if twice else trace).through()
    at_peak, phase = _peak(trace, whole)
    tokens = batch_size * sequence_length * (2 if pairs else 1)
    return RankStep(
        resolve_model_id(model), layout, precision, batch_size, sequence_length, gradient_checkpointing,
        memory, at_peak, phase,
        traced.sent if adapters else elements_sent(model, layout, pairs is not None and pairs.on_the_card),
        Counter() if adapters else traced.sent, Counter() if adapters else traced.sent_bytes,
        spec.name, spec.capacity_bytes, nccl_bytes(layout),
        allocator.peak_reserved_bytes, trace, adapters,
        traced.offloaded.nbytes(tokens), traced.offloaded.pinned(tokens), pairs, generated, handing_over, sent_once,
        twice, traced.flops_twice,
    )  # fmt: skip


def _check_kept(name: str, objective: str, layout: Layout, checkpointing: bool) -> None:
    """NotSupported where it is not counted what blocks keep; WrongValue where none computes anything twice."""
    if not checkpointing:
        raise WrongValue(
            tr(
                ko=f"{name}: gradient_checkpointing=True일 때만 뜻이 있다.",
                en=f"{name}: says something only with gradient_checkpointing=True.",
            )
        )
    if objective != "sft" or layout.stage < 2 or layout.tensor_parallel > 1 or layout.context_parallel > 1:
        raise NotSupported(
            tr(
                ko="블록이 무엇을 남길지는 SFT의 ZeRO-2와 3에서만, 층과 글을 나누지 않을 때만 센다.",
                en="what blocks keep is counted of SFT at ZeRO-2 and 3, where neither layers nor texts are split.",
            )
        )


def _scored(model: str, layout: Layout, precision: str, generated: Generated, adapters: Adapters | None) -> int:
    """Bytes that are gathered for a generation's scores, a micro-batch at a time: at stage 2 they are there anyway."""
    if layout.stage == 2 or layout.ranks == 1:
        return 0
    of = generated.completions
    if adapters:
        gathered = shapes_of(ConfigKey.of(config_of(model)), adapters).gathered(layout.ranks, adapters.dtype.itemsize)
        return (1 + (of.beta > 0)) * of.steps * gathered
    gathered = padded_elements(model, layout) * CONVENTIONS[precision].computes.itemsize
    return (1 + generated.has_second) * of.steps * gathered


def _on_ranks(trace: Trace, memory: RankMemory, reference: RankMemory) -> Trace:
    """The trace of the reference's ranks with the shards of others; what is gathered is the same."""
    allocates, category = trace.allocates, trace.category
    shards = allocates & (trace.span == 0) & (category == CATEGORIES.index("parameters"))
    trace = scaled(trace, shards, memory.parameters / reference.parameters)
    gradients = allocates & (category == CATEGORIES.index("gradients"))
    return scaled(trace, gradients, memory.gradients / reference.gradients)


def _peak(trace: Trace, whole: int = 0) -> tuple[dict[str, int], str]:
    """The parts at the fullest moment of a phase, and its name. whole: bytes that were gathered before the first."""
    timeline = trace.timeline()
    shards = int(timeline.phases[0].live[0][CATEGORIES.index("parameters")]) - whole
    live = timeline.at_peak()
    parts = {
        "parameters": shards,
        "gathered": live["parameters"] - shards,
        "gradients": live["gradients"],
        "optimizer": live["optimizer"],
        "activations": live["activations"],
        "communication": live["other"],
    }
    return parts, timeline.peak_phase


class _Traced(NamedTuple):
    """A run of a rank: its trace, what it sends, the checkpoints that go to the CPU.

    sent: the elements of tensor or context parallelism's messages, and sent_bytes their bytes (with adapters: all
    bytes). marks: number → what a category of the trace that begins with it says, and flops_twice, of a watched one.
    """

    trace: Trace
    sent: Counter
    sent_bytes: Counter
    offloaded: Moved
    marks: Mapping[int, Mark]
    flops_twice: Counter


@remembered
def _trace(
    model: ConfigKey, layout: Layout, precision: str, batch_size: int, sequence_length: int, checkpointing: bool,
    spec: GPUSpec, adapters: Adapters | None = None, repeat_kv: bool = False, fused_lm_head: bool = False,
    offload: bool = False, pairs: Pairs | None = None, generated: Generated | None = None, padded: bool = False,
    fp32_shards: bool = False, whole_gradients: bool = False, kept: tuple[str, ...] = (), watched: bool = False,
) -> _Traced:  # fmt: skip
    """A rank's forward and backward.

    What is as large as a whole second model grows with the depth, by so much a layer: shallow runs have it by its kind,
    and the deep one by its size.
    """
    convention = CONVENTIONS[precision].fp32_shards if fp32_shards else CONVENTIONS[precision]
    rows = batch_size * (2 if pairs else 1)
    tokens = rows * sequence_length
    marks: dict[Mark, int] | None = {} if watched else None

    def run(config: Any) -> tuple[Trace, dict[str, Any]]:
        one = run_rank(
            config, layout, convention, spec=spec,
            batch_size=batch_size, sequence_length=sequence_length, checkpointing=checkpointing, adapters=adapters,
            repeat_kv=repeat_kv, fused_lm_head=fused_lm_head, offload_checkpoints=offload, kept_results=kept,
            marks=marks, pairs=pairs, generated=generated, padded=padded, whole_gradients=whole_gradients, update=False,
        )  # fmt: skip
        sent = one.sent_bytes if adapters else one.sent_activations
        trace = one.trace
        for kind, entries in one.whole_at.items():
            trace = resized(trace, entries, _WHOLE[kind])
        whole = {_WHOLE[kind]: nbytes for kind, nbytes in one.whole.items()}
        nbytes = {("bytes", name): n for name, n in one.sent_activation_bytes.items()}
        twice = {("flops", name): n for name, n in one.twice.items()}
        return trace, {**sent, **nbytes, **twice, **whole, **Moved.of(one.offloaded, tokens, 1).sizes}

    how = model, layout, convention, checkpointing, spec, adapters, repeat_kv, fused_lm_head, offload, padded
    like = "rank", *how, pairs, generated, whole_gradients, kind_of_batch(rows), kept, watched
    # Two layers are too few for what FSDP2 gathers ahead, but with checkpoints at stage 2.
    ahead = layout.stage == 3 or (layout.stage == 2 and not checkpointing)
    names = adapters.module_names if adapters else ()
    shallow = None
    if is_uniform(kept):
        shallow = from_shallow(model.config, run, like, deeper=int(ahead), length=sequence_length, names=names)
    trace, numbers = shallow or run(model.config)
    for mark in {*_WHOLE.values()} & {*numbers}:
        trace = resized(trace, np.flatnonzero(trace.nbytes == mark), round_size(numbers[mark]))
    sizes = {name: n for name, n in numbers.items() if isinstance(name, Fraction)}
    sent = {name: n for name, n in numbers.items() if isinstance(name, str)}
    nbytes, twice = ({name[1]: n for name, n in numbers.items() if isinstance(name, tuple) and name[0] == of}
                     for of in ("bytes", "flops"))  # fmt: skip
    keys = {key: mark for mark, key in (marks or {}).items()}
    return _Traced(trace, Counter(sent), Counter(nbytes), Moved(sizes), keys, Counter(twice))


_WHOLE = {"received": -1, "cast": -2}  # a kind of `RankRun.whole` → what stands for its size, as no block's does


def _fullest(model: str, layout: Layout) -> int:
    """The first rank; where whole tensors are dealt out, the one that holds most."""
    if layout.stage != 1:
        return 0
    dealt = dealt_elements(local_shapes(model), layout.ranks)
    return max(range(layout.ranks), key=dealt.__getitem__)


def _check_length(model: str, config: Any, length: int) -> None:
    limit = getattr(text_config(config), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise WrongValue(
            tr(
                ko=f"길이 {length}: {model}의 최대 길이는 {limit}이다.",
                en=f"length {length}: {model} goes up to {limit}.",
            )
        )


def steps_by_ranks(
    model: str,
    ranks: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    *,
    sequence_length: int = 4096,
    gradient_checkpointing: bool = True,
    **setting: Any,
) -> list[RankStep]:
    """`rank_step` for growing numbers of GPUs, all from one reference run."""
    setting |= {"sequence_length": sequence_length, "gradient_checkpointing": gradient_checkpointing}
    return [rank_step(model, number, exact=False, **setting) for number in ranks]
