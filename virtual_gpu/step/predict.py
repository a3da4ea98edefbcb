"""What a setting needs, from running it on a virtual GPU: in full, or continued from a few layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..cards import CATALOG
from ..counting.gpu import VirtualGPU, as_gpu
from ..errors import NoSuchLayer
from ..language import tr
from ..models.build import build_on_gpu
from ..models.configs import cached_by_model, checkpoint_dtype, load_config
from ..models.depth import grows_evenly, shallow_depths, with_depth
from ..real import GPU, storage_bytes
from ..report import MemoryReport
from ..room import room_on
from ..trace.depth import continued
from ..trace.micro_batches import MICRO_BATCHES, with_micro_batches
from ..trace.timeline import Timeline
from .run import TrainingLog, train
from .setting import OPTIMIZER_STEPS, Setting


def predict_memory(
    setting: Setting | None = None, *, gpu: GPU | str, full: bool = False, **settings: Any
) -> MemoryReport:
    """What the experiment needs without a limit, and whether the caching allocator finds room for it on `gpu`.

    gpu: a GPU, or a name of the catalogue. Of a deep model the trace follows from three shallow runs (`trace.depth`),
    where that is proven, and of many micro-batches from four (`trace.micro_batches`); otherwise, or with `full=True`,
    all of it is run.
    """
    setting, gpu = Setting.one(setting, settings), as_gpu(gpu)
    # A real GPU: the catalogue's kernels for its compute capability, its own capacity.
    spec = gpu.spec if gpu.is_virtual else _spec_like(gpu)
    config = load_config(setting.model_id)
    setting.check_length(config)
    run = (*virtual_run(setting, config, spec), "run") if full else _predicted(setting, config, spec)
    timeline, parameters, log, method = run
    report = _report(setting, gpu, log, parameters, timeline)
    report.peak_bytes = report.needed_bytes = timeline.peak_bytes
    report.method = method
    report.fits = timeline.peak_bytes <= gpu.capacity_bytes
    if report.fits:
        try:
            report.reserved_bytes = timeline.trace.reserved_peak(
                gpu.capacity_bytes, expandable_segments=gpu.expandable_segments
            )
        except MemoryError:
            report.fits = False
    return report


@dataclass(frozen=True)
class Need:
    """What an experiment takes of a card, in bytes.

    tensors: their peak. card: the least capacity in which the caching allocator gets through, to 1/128 of the peak.
    states: parameters, gradients and optimizer state. at_peak: category → bytes of the tensors' peak.
    """

    tensors: int
    card: int
    states: dict[str, int]
    at_peak: dict[str, int]


@cached_by_model
def predict_need(setting: Setting, compute_capability: tuple[int, int]) -> Need:
    """What the experiment takes on any GPU of the catalogue with this compute capability: they run the same kernels."""
    gpu = VirtualGPU(replace(CATALOG["T4"], compute_capability=compute_capability))  # its size says nothing here
    report = predict_memory(setting, gpu=gpu)
    states = {
        "parameters": report.parameters_bytes,
        "gradients": report.gradients_bytes,
        "optimizer": report.optimizer_bytes,
    }
    step = max(report.peak_bytes // 128, 2 * 2**20)
    return Need(report.peak_bytes, report.timeline.trace.smallest_capacity(step), states, report.at_peak)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters (tied ones once), for 4-bit layers with their quantization statistics."""
    statistics = (
        getattr(module, name) for module in model.modules() for name in getattr(module, "quantization_state", ())
    )
    return storage_bytes([*model.parameters(), *statistics, *_bitsandbytes_statistics(model)])


def _bitsandbytes_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    states = [s for p in model.parameters() if (s := getattr(p, "quant_state", None)) is not None]
    nested = [s.state2 for s in states if s.state2 is not None]
    tensors = [t for s in (*states, *nested) for t in (s.absmax, s.code)] + [s.offset for s in states]
    return [t for t in tensors if t is not None]


def _training_args(setting: Setting, autocast: torch.dtype | None) -> SimpleNamespace:
    return SimpleNamespace(
        per_device_train_batch_size=setting.batch_size,
        gradient_accumulation_steps=setting.gradient_accumulation_steps,
        gradient_checkpointing=setting.gradient_checkpointing,
        max_steps=OPTIMIZER_STEPS,
        optim=setting.optimizer,
        fp16=autocast == torch.float16,
        bf16=autocast == torch.bfloat16,
        loss_scale=1.0,  # values do not matter here, and a step that overflows would be skipped: no optimizer state
    )


def _report(
    setting: Setting, gpu: GPU, log: TrainingLog, parameters_bytes: int, timeline: Timeline | None = None
) -> MemoryReport:
    predicted = timeline is not None
    timeline = timeline or log.timeline
    kind = tr(ko="가상 ", en="virtual ") if gpu.is_virtual else ""
    if predicted and not gpu.is_virtual:
        kind = tr(ko="예측, ", en="predicted, ")
    return MemoryReport(
        title=f"{setting.title} · {kind}{gpu.name}",
        gpu_name=gpu.name,
        is_virtual=gpu.is_virtual,
        capacity_bytes=gpu.capacity_bytes,
        parameters_bytes=parameters_bytes,
        gradients_bytes=log.gradients_bytes,
        optimizer_bytes=log.optimizer_bytes,
        allocated_bytes=log.allocated_bytes,
        peak_bytes=timeline.peak_bytes,
        needed_bytes=timeline.peak_bytes,
        peak_phase=timeline.peak_phase,
        setting=setting.to_dict() | {"gpu": gpu.name},
        timeline=timeline,
        room=room_on(gpu.spec) if gpu.is_virtual else None,
    )


def _spec_like(gpu: GPU) -> Any:
    return replace(
        next(iter(CATALOG.values())), name=gpu.name, compute_capability=torch.cuda.get_device_capability(gpu.device)
    )


def virtual_run(setting: Setting, config: Any, spec: Any) -> tuple[Timeline, int, TrainingLog]:
    """Every operation of the experiment on a virtual GPU without a limit: (timeline, bytes of parameters, log)."""
    gpu = VirtualGPU(spec, limited=False)
    with gpu.interrupts_wait():
        return _run_unlimited(setting, config, gpu)


def _run_unlimited(setting: Setting, config: Any, gpu: VirtualGPU) -> tuple[Timeline, int, TrainingLog]:
    log = TrainingLog()
    dtype, autocast = setting.dtypes
    dtype = checkpoint_dtype(setting.model_id, config) if dtype == "auto" else dtype
    model = build_on_gpu(config, dtype, setting.attention, setting.peft, gpu, **setting.adapters)
    batch = {"input_ids": torch.zeros(setting.sequence_length, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"]
    train(model, [batch] * setting.samples, _training_args(setting, autocast), log=log)
    return log.timeline, model_bytes(model), log


def _predicted(setting: Setting, config: Any, spec: Any) -> tuple[Timeline, int, TrainingLog, str]:
    """What `virtual_run` gives, from less work where that is proven to give the same; and the method."""
    wanted = setting.gradient_accumulation_steps
    if wanted > MICRO_BATCHES:
        few = replace(setting, gradient_accumulation_steps=MICRO_BATCHES)
        timeline, parameters, log, method = _predicted(few, config, spec)
        trace = with_micro_batches(timeline.trace, wanted)
        if trace is not None:
            return trace.timeline(), parameters, log, method
    by_depth = _predict_by_depth(setting, config, spec)
    return (*by_depth, "depth") if by_depth else (*virtual_run(setting, config, spec), "run")


def _predict_by_depth(setting: Setting, config: Any, spec: Any) -> tuple[Timeline, int, TrainingLog] | None:
    """The run at full depth from three shallow ones; None where that is not less work, or not proven."""
    shallow = shallow_depths(config)
    if shallow is None or not grows_evenly(config, *shallow):
        return None
    depths, more = shallow
    try:
        runs = [virtual_run(setting, with_depth(config, layers), spec) for layers in depths]
    except NoSuchLayer:  # an adapter's target that only the full depth has
        return None
    trace = continued([timeline.trace for timeline, _, _ in runs], more)
    numbers = np.array(
        [(parameters, log.gradients_bytes, log.optimizer_bytes, log.allocated_bytes) for _, parameters, log in runs]
    )
    steps = np.diff(numbers, axis=0)
    if trace is None or not np.array_equal(*steps):
        return None
    parameters, gradients, optimizer, allocated = map(int, numbers[0] + more * steps[0])
    log = TrainingLog(allocated_bytes=allocated, gradients_bytes=gradients, optimizer_bytes=optimizer)
    return trace.timeline(), parameters, log
