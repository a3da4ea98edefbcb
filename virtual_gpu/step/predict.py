"""What a setting needs, from running it on a virtual GPU: in full, or continued from a few layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch

from ..cards import CATALOG, GPUSpec
from ..counting.gpu import VirtualGPU, as_gpu
from ..errors import NoSuchLayer, NotSupported
from ..frames import clear_frames
from ..language import tr
from ..models.attention import REPEATED
from ..models.build import build_on_gpu
from ..models.configs import cached_by_model, checkpoint_dtype, load_config, running
from ..models.depth import from_shallow, kind_of_batch
from ..models.kept import Watch, is_uniform
from ..models.offloaded import Moved
from ..real import GPU, storage_bytes
from ..report import MemoryReport
from ..room import room_on
from ..trace.details import Details
from ..trace.edits import with_ddp
from ..trace.micro_batches import LATER, MICRO_BATCHES, with_micro_batches
from ..trace.timeline import Timeline
from ..trace.trace import Trace
from ..turns import in_turn, refuse_in_a_block
from .pairs import without_dropout
from .rollout import GENERATION, with_generation
from .run import TrainingLog, train
from .setting import OPTIMIZER_STEPS, Setting


@in_turn
def predict_memory(
    setting: Setting | None = None,
    *,
    gpu: GPU | str,
    full: bool = False,
    kept: MutableMapping[Any, Any] | None = None,
    **settings: Any,
) -> MemoryReport:
    """What the experiment needs without a limit, and whether the caching allocator finds room for it on `gpu`.

    gpu: a GPU, or a name of the catalogue. Of a deep model the trace follows from two shallow runs (`trace.depth`),
    where that is proven, and of many micro-batches from a few (`trace.micro_batches`); otherwise, or with `full=True`,
    all of it is run. kept: where the traces are kept for the next time, by all that they depend on: of a card its
    kernels, not its name or capacity.
    """
    setting, gpu = Setting.one(setting, settings), as_gpu(gpu)
    # A real GPU: the catalogue's kernels for its compute capability, its own capacity.
    spec = gpu.spec if gpu.is_virtual else spec_like(gpu)
    config = load_config(setting.model_id)
    setting.check_length(config)
    kernels = spec.compute_capability, spec.multiprocessors, spec.threads_per_multiprocessor
    kept, key = {} if kept is None else kept, (setting, full, kernels, gpu.expandable_segments)
    if key not in kept:
        run = virtual_run(setting, config, spec) if full else predicted_run(setting, config, spec)
        if setting.completions:
            run = run._replace(trace=with_generation(run.trace, setting, spec, full))
        trace, allocator = run.trace.through(expandable_segments=gpu.expandable_segments)
        kept[key] = run._replace(trace=trace), allocator.peak_reserved_bytes
    run, reserved_bytes = kept[key]
    trace, timeline = run.trace, run.trace.timeline()
    log = TrainingLog(timeline.after_first_step_bytes, run.gradients, run.optimizer, run.paged, timeline=timeline)
    report = report_of(setting, gpu, log, run.parameters, predicted=True)
    _tell_of_cpu(report, setting, run.offloaded)
    report.method = run.method
    report.reserved_bytes = reserved_bytes
    if reserved_bytes > gpu.capacity_bytes:  # the cache may still be given back in time
        try:
            report.reserved_bytes = trace.reserved_peak(gpu.capacity_bytes, expandable_segments=gpu.expandable_segments)
        except MemoryError:
            report.fits, report.reserved_bytes = False, None
    return report


@dataclass(frozen=True)
class Need:
    """What an experiment takes of a card, in bytes.

    tensors: their peak. card: the least capacity in which the caching allocator gets through, to 1/128 of the peak.
    states: parameters, gradients and optimizer state. at_peak: category → bytes of the tensors' peak. offloaded: what
    an optimizer step sends to the CPU and gets back. pinned: what a micro-batch of that takes of the RAM. paged: state
    that lies in CUDA's managed memory, beside all these. generation: the tensors' peak while GRPO's completions are
    generated (at_generation: by category), by an engine while it is handed the weights; training: in all other phases.
    rollout: what is reserved meanwhile, where an engine has to find its memory beside it.
    """

    tensors: int
    card: int
    states: dict[str, int]
    at_peak: dict[str, int]
    offloaded: int = 0
    pinned: int = 0
    paged: int = 0
    generation: int = 0
    training: int = 0
    at_generation: Mapping[str, int] = field(default_factory=dict)
    rollout: int = 0


@cached_by_model
def predict_need(setting: Setting, compute_capability: tuple[int, int], ddp: bool = False) -> Need:
    """What the experiment takes on any GPU with this compute capability: they run the same kernels.

    ddp: as one of several ranks, with DistributedDataParallel's buckets.
    """
    report = predict_memory(setting, gpu=VirtualGPU(like_any(compute_capability)))
    states = {
        "parameters": report.parameters_bytes,
        "gradients": report.gradients_bytes,
        "optimizer": report.optimizer_bytes,
    }
    need = Need(0, 0, states, {}, report.offloaded_bytes, report.pinned_bytes, report.paged_bytes)
    return of_trace(need, report.timeline.trace, report.reserved_bytes, ddp)


def of_trace(need: Need, trace: Trace, reserved: int | None = None, ddp: bool = False) -> Need:
    """The need with what a trace takes of a card. reserved: its peak without a limit, where it is known."""
    trace = with_ddp(trace) if ddp else trace
    if ddp or reserved is None:
        trace, allocator = trace.through()
        reserved = allocator.peak_reserved_bytes
    timeline = trace.timeline()
    card = card_of(timeline, reserved)
    generating, training = (
        Timeline([phase for phase in timeline.phases if (phase.name == GENERATION) == generated])
        for generated in (True, False)
    )
    return replace(
        need, tensors=timeline.peak_bytes, card=card, at_peak=timeline.at_peak(), generation=generating.peak_bytes,
        training=training.peak_bytes, at_generation=generating.at_peak(),
        rollout=trace.reserved_in(GENERATION) if GENERATION in trace.emptied else 0,
    )  # fmt: skip


def like_any(compute_capability: tuple[int, int]) -> GPUSpec:
    """A card with the kernels of any of this compute capability, whose memory does not end."""
    return replace(CATALOG["T4"], compute_capability=compute_capability, memory_bytes=2**60, usable_bytes=None)


def card_of(timeline: Timeline, reserved: int) -> int:
    """A `Need`'s card, from a trace that went through the allocator, which reserved so much without a limit."""
    step = max(timeline.peak_bytes // 128, 2 * 2**20)
    return timeline.trace.smallest_capacity(step, reserved=reserved)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters (tied ones once), of quantized layers with their statistics."""
    statistics = (
        getattr(module, name) for module in model.modules() for name in getattr(module, "quantization_state", ())
    )
    return storage_bytes([*model.parameters(), *statistics, *_bitsandbytes_statistics(model)])


def _bitsandbytes_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    states = [s for p in model.parameters() if (s := getattr(p, "quant_state", None)) is not None]
    nested = [s.state2 for s in states if s.state2 is not None]
    tensors = [t for s in (*states, *nested) for t in (s.absmax, s.code)] + [s.offset for s in states]
    # Those of int8 go from the weight to the layer's state with the first product.
    tensors += [getattr(p, "SCB", None) for p in model.parameters()]
    tensors += [getattr(getattr(module, "state", None), "SCB", None) for module in model.modules()]
    return [t for t in tensors if t is not None]


def training_arguments(setting: Setting, autocast: torch.dtype | None) -> SimpleNamespace:
    """What `train` reads of a setting."""
    return SimpleNamespace(
        per_device_train_batch_size=setting.batch_size,
        gradient_accumulation_steps=setting.gradient_accumulation_steps,
        gradient_checkpointing=setting.gradient_checkpointing,
        max_steps=OPTIMIZER_STEPS,
        optim=setting.optimizer,
        holds_outputs=setting.holds_outputs,
        fused_lm_head=setting.fused_lm_head,
        logits_by_row=setting.logits_by_row,
        repeat_kv=setting.attention == REPEATED,
        kept_results=setting.kept_results,
        offload_checkpoints=setting.offload_checkpoints,
        use_reentrant=setting.use_reentrant,
        fp32_embedding_state=setting.fp32_embedding_state,
        objective=setting.objective,
        optim_args=setting.optim_args,
        optim_target_modules=setting.optim_target_modules,
        completions=setting.completions,
        fp16=autocast == torch.float16,
        bf16=autocast == torch.bfloat16,
        loss_scale=1.0,  # values do not matter here, and a step that overflows would be skipped: no optimizer state
    )


def report_of(
    setting: Setting, gpu: GPU, log: TrainingLog, parameters_bytes: int, *, predicted: bool = False
) -> MemoryReport:
    """What a log says of a setting on a GPU."""
    timeline = log.timeline
    kind = tr(ko="가상 ", en="virtual ") if gpu.is_virtual else ""
    if predicted and not gpu.is_virtual:
        kind = tr(ko="예측, ", en="predicted, ")
    report = MemoryReport(
        title=f"{setting.title} · {kind}{gpu.name}",
        gpu_name=gpu.name,
        is_virtual=gpu.is_virtual,
        capacity_bytes=gpu.capacity_bytes,
        parameters_bytes=parameters_bytes,
        gradients_bytes=log.gradients_bytes,
        optimizer_bytes=log.optimizer_bytes,
        paged_bytes=log.paged_bytes,
        allocated_bytes=log.allocated_bytes,
        peak_bytes=timeline.peak_bytes,
        needed_bytes=timeline.peak_bytes,
        peak_phase=timeline.peak_phase,
        setting=setting.to_dict() | {"gpu": gpu.name},
        timeline=timeline,
        room=room_on(gpu.spec) if gpu.is_virtual else None,
        run_again=_run_again(setting, gpu, predicted),
    )
    if log.offloaded and log.micro_steps:
        _tell_of_cpu(report, setting, _moved(setting, log))
    return report


def _moved(setting: Setting, log: TrainingLog) -> Moved:
    return Moved.of(log.offloaded, setting.rows * setting.sequence_length, log.micro_steps)


def _tell_of_cpu(report: MemoryReport, setting: Setting, moved: Moved) -> None:
    tokens = setting.rows * setting.sequence_length
    report.offloaded_bytes = moved.nbytes(tokens) * setting.gradient_accumulation_steps
    report.pinned_bytes = moved.pinned(tokens)


def _run_again(setting: Setting, gpu: GPU, predicted: bool) -> Callable[[], Details | None] | None:
    """The setting's run with the tensor behind each block; a prediction's has no limit, a real GPU's no details.

    None too for a prediction of GRPO's: its generation is another run (`rollout`).
    """
    if predicted and setting.completions:
        return None
    if predicted:
        spec = gpu.spec if gpu.is_virtual else spec_like(gpu)
        return functools.partial(_detailed, setting, spec, False, gpu.expandable_segments, ())
    if gpu.is_virtual:
        return functools.partial(_detailed, setting, gpu.spec, True, gpu.expandable_segments, gpu.rules.without)
    return None


@in_turn
def _detailed(
    setting: Setting, spec: GPUSpec, limited: bool, expandable_segments: bool, without: Iterable[str]
) -> Details | None:
    def run(limited: bool) -> tuple[Details | None, bool]:
        """What was recorded, and whether the memory ran out."""
        gpu = VirtualGPU(spec, limited=limited, expandable_segments=expandable_segments, without=without, detailed=True)
        with gpu.interrupts_wait():
            try:
                run_on(gpu, setting, load_config(setting.model_id))
            except torch.OutOfMemoryError as error:
                clear_frames(error)
                return gpu.details, True
        return gpu.details, False

    details, stopped = run(limited)
    if details is not None and stopped:  # before backward: what would have kept a tensor shows where there is room
        for origin, further in zip(details.origins, run(False)[0].origins, strict=False):
            origin.kept = origin.kept or further.kept
    return details


def spec_like(gpu: GPU) -> GPUSpec:
    """The catalogue's, with a real GPU's compute capability: its kernels."""
    return replace(
        next(iter(CATALOG.values())), name=gpu.name, compute_capability=torch.cuda.get_device_capability(gpu.device)
    )


class Run(NamedTuple):
    """What a run of a setting left: its trace, and the full sizes in bytes of what is trained and what trains it.

    paged: optimizer state in CUDA's managed memory. offloaded: what checkpointed blocks sent to the CPU. twice: of a
    run that was watched, FLOPs that a micro-batch computes again, by the name of the result (see `step.budget`).
    """

    trace: Trace
    parameters: int
    gradients: int
    optimizer: int
    paged: int
    offloaded: Moved
    method: str = "run"
    twice: Mapping[str, int] = {}


class Watched(Protocol):
    """A `Watch` that is told of the run that it watched, and gives it with what it found."""

    def __call__(self, *operation: Any) -> Any: ...

    def told(self, run: Run) -> Run: ...


Watching = Callable[[VirtualGPU], Watched]


@in_turn
def virtual_run(
    setting: Setting, config: Any, spec: GPUSpec, later: int | None = None, watching: Watching | None = None
) -> Run:
    """Every operation of the setting's two steps on a virtual GPU without a limit.

    later: the micro-batches of the second step, where they are fewer than the setting's. watching: makes who watches
    what checkpointed blocks compute on that GPU, and tells it of the run.
    """
    refuse_in_a_block()
    gpu = VirtualGPU(spec, limited=False)
    with gpu.interrupts_wait(), running(setting.model_id):
        if watching is None:
            return run_on(gpu, setting, config, later)
        watch = watching(gpu)
        return watch.told(run_on(gpu, setting, config, later, watch))


def run_on(gpu: Any, setting: Setting, config: Any, later: int | None = None, watch: Watch | None = None) -> Run:
    """The setting's two steps on a GPU, which is `virtual_run`'s, or like it."""
    dtype, autocast = setting.dtypes
    dtype = checkpoint_dtype(setting.model_id, config) if dtype == "auto" else dtype
    model = build_on_gpu(config, dtype, setting.attention, setting.peft, gpu, **setting.adapters)
    reference = reference_on(gpu, setting, config, dtype)
    if setting.objective != "sft":
        refuse_encoder_decoder(setting, config)
    if setting.pairs:
        for one in filter(None, (model, reference)):
            without_dropout(one)
    shape = (2, setting.sequence_length) if setting.pairs else (setting.sequence_length,)
    sample = dict.fromkeys(("input_ids", "labels"), torch.zeros(shape, dtype=torch.int64))
    if setting.padded:
        sample["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        gpu.answers.padded = True  # no values are there: which of these are 0 is not asked, but whether any is
    if setting.reference == "precomputed":
        sample["reference"] = torch.zeros(2)
    arguments = training_arguments(setting, autocast)
    samples = setting.samples if later is None else setting.batch_size * (setting.gradient_accumulation_steps + later)
    log = train(model, [sample] * samples, arguments, gpu=gpu, reference=reference, watch=watch)
    moved = _moved(setting, log)
    states = log.gradients_bytes, log.optimizer_bytes, log.paged_bytes
    parameters = model_bytes(model) + (model_bytes(reference) if reference else 0)
    return Run(log.timeline.trace, parameters, *states, moved)


def reference_on(gpu: Any, setting: Setting, config: Any, dtype: torch.dtype) -> torch.nn.Module | None:
    """The second model of DPO or GRPO, with weights of `dtype` or of what is computed in; None where there is none.

    TRL freezes it not, so that autocast keeps the casts of its weights until its forward is done.
    """
    if not (setting.pairs or setting.beta) or setting.peft or setting.reference == "precomputed":
        return None
    dtype = setting.dtypes[1] if setting.reference == "half" else dtype
    return build_on_gpu(config, dtype, setting.attention, None, gpu)


def refuse_encoder_decoder(setting: Setting, config: Any) -> None:
    """NotSupported for DPO or GRPO of a model that reads the prompt apart from the answer."""
    if getattr(config, "is_encoder_decoder", False):
        raise NotSupported(
            tr(
                ko=f"objective={setting.objective!r}: 인코더-디코더 모델({setting.model_id})은 세지 않는다.",
                en=f"objective={setting.objective!r}: an encoder-decoder ({setting.model_id}) is not counted.",
            )
        )


def predicted_run(
    setting: Setting, config: Any, spec: GPUSpec, how: Callable[..., Run] | None = None, like: str = "step"
) -> Run:
    """What `how`, else `virtual_run`, gives, from less work where that is found to give the same.

    like: its name, where what has been found of one run may hold for another (see `models.depth.from_shallow`).
    """
    how, wanted = how or virtual_run, setting.gradient_accumulation_steps
    # GRPO scores the completions of all micro-batches at once, and outputs that are held are released by the next one.
    if wanted > LATER and not (setting.completions or setting.holds_outputs):
        few = replace(setting, gradient_accumulation_steps=min(wanted, MICRO_BATCHES))
        run = _by_depth(how, like, few, config, spec, LATER) or how(few, config, spec, LATER)
        trace = with_micro_batches(run.trace, wanted)
        if trace is not None:
            return run._replace(trace=trace)
    return _by_depth(how, like, setting, config, spec) or how(setting, config, spec)


def _by_depth(
    how: Callable[..., Run], name: str, setting: Setting, config: Any, spec: GPUSpec, later: int | None = None
) -> Run | None:
    """The run at full depth from shallow ones; None where that is not less work, or contradicted."""
    if not is_uniform(setting.kept_results):
        return None

    names = "parameters", "gradients", "optimizer", "paged"

    def run(shallow: Any) -> tuple[Trace, dict[Any, int]]:
        one = how(setting, shallow, spec, later)
        return one.trace, {name: getattr(one, name) for name in names} | one.offloaded.sizes | one.twice

    try:
        kind = setting.short(kind_of_batch(setting.batch_size))
        like = name, kind, later, spec.compute_capability
        found = from_shallow(config, run, like, length=setting.sequence_length, names=setting.module_names)
    except NoSuchLayer:  # an adapter's target that only the full depth has
        return None
    if found is None:
        return None
    trace, numbers = found
    rest = {name: number for name, number in numbers.items() if name not in names}
    sizes = {size: times for size, times in rest.items() if isinstance(size, Fraction)}
    twice = {name: flops for name, flops in rest.items() if name not in sizes}
    return Run(trace, *(numbers[name] for name in names), Moved(sizes), "depth", twice)
