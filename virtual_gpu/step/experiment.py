"""The experiment of the course: a setting in, a `MemoryReport` out. Run in full, or predicted from a few layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..cards import CATALOG
from ..counting.gpu import VirtualGPU
from ..gpus import GPU, clear_frames, current_gpu, gpu_utilization_line, release_memory
from ..language import tr
from ..report import MemoryReport, MemoryTable
from ..trace.depth import continued, shallow_depths, text_config, with_depth
from ..trace.micro_batches import MICRO_BATCHES, with_micro_batches
from ..trace.timeline import Timeline
from ..units import choose, human_bytes, positive_int
from .data import check_size, make_dummy_dataset
from .models import (
    ATTENTION,
    DEFAULT_MODEL,
    LORA_RANK,
    PEFT,
    build_on_gpu,
    checkpoint_dtype,
    grows_evenly,
    load_config,
    load_model_and_tokenizer,
    resolve_model_id,
)
from .training import OPTIMIZERS, TrainingLog, storage_bytes, train_model

# name -> (dtype of the weights, dtype that autocast computes in). "auto" is the checkpoint's dtype.
PRECISIONS = {
    "auto": ("auto", None),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "mixed_fp16": (torch.float32, torch.float16),
    "mixed_bf16": (torch.float32, torch.bfloat16),
}
# Frozen 16-bit weights under autocast: as Trainer trains adapters (which peft keeps in fp32).
ADAPTER_PRECISIONS = {
    "autocast_fp16": (torch.float16, torch.float16),
    "autocast_bf16": (torch.bfloat16, torch.bfloat16),
}
# The second optimizer step is the first with the whole optimizer state from its beginning; nothing new comes after it.
OPTIMIZER_STEPS = 2


@dataclass(frozen=True)
class Setting:
    """What an experiment runs; checked when it is made, ValueError in the reader's language."""

    batch_size: int
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    model_id: str = DEFAULT_MODEL
    peft: str | None = None
    sequence_length: int = 256
    precision: str = "auto"
    optimizer: str = "adamw"
    attention: str = "sdpa"
    lora_rank: int = LORA_RANK
    lora_targets: str | tuple[str, ...] = "attention"

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "batch_size", positive_int(self.batch_size, "batch_size"))
        steps = positive_int(self.gradient_accumulation_steps, "gradient_accumulation_steps")
        put(self, "gradient_accumulation_steps", steps)
        put(self, "sequence_length", positive_int(self.sequence_length, "sequence_length"))
        put(self, "gradient_checkpointing", bool(self.gradient_checkpointing))
        precisions = {**PRECISIONS, **(ADAPTER_PRECISIONS if self.peft else {})}
        put(self, "precision", choose(self.precision, precisions, tr(ko="정밀도", en="precision")))
        put(self, "optimizer", choose(self.optimizer, OPTIMIZERS, tr(ko="옵티마이저", en="optimizer")))
        put(self, "attention", choose(self.attention, ATTENTION, tr(ko="어텐션", en="attention")))
        put(self, "model_id", resolve_model_id(self.model_id))
        if self.peft is not None:
            put(self, "peft", choose(self.peft, PEFT, "peft"))
        rank = positive_int(self.lora_rank, "lora_rank")
        targets = self.lora_targets
        if not isinstance(targets, str):
            if not isinstance(targets, Sequence) or not all(isinstance(target, str) for target in targets):
                raise ValueError(
                    tr(
                        ko=f"lora_targets={targets!r}: 'attention', 'all-linear'나 층 이름의 목록이어야 한다.",
                        en=f"lora_targets={targets!r}: must be 'attention', 'all-linear' or a list of layers' names.",
                    )
                )
            targets = tuple(targets)
        put(self, "lora_rank", rank if self.peft else LORA_RANK)  # without adapters neither says anything
        put(self, "lora_targets", targets if self.peft else "attention")
        check_size(self.samples, self.sequence_length)

    @property
    def samples(self) -> int:
        """The samples that the optimizer steps of the experiment take."""
        return self.batch_size * self.gradient_accumulation_steps * OPTIMIZER_STEPS

    @property
    def title(self) -> str:
        """One line that names what is run."""
        parts = [
            self.model_id.split("/")[-1],
            tr(ko=f"배치 {self.batch_size}", en=f"batch {self.batch_size}"),
            tr(ko=f"길이 {self.sequence_length}", en=f"length {self.sequence_length}"),
        ]
        if self.gradient_accumulation_steps > 1:
            parts[1] += f" × {self.gradient_accumulation_steps}"
        if self.gradient_checkpointing:
            parts.append(tr(ko="체크포인팅", en="checkpointing"))
        defaults = {f.name: f.default for f in fields(self)}
        names = ("peft", "precision", "optimizer", "attention")
        parts += [str(getattr(self, name)) for name in names if getattr(self, name) != defaults[name]]
        if self.lora_rank != LORA_RANK:
            parts.append(f"rank {self.lora_rank}")
        if self.lora_targets != "attention":
            parts.append(self.lora_targets if isinstance(self.lora_targets, str) else ", ".join(self.lora_targets))
        return " · ".join(parts)

    @property
    def dtypes(self) -> tuple[torch.dtype | str, torch.dtype | None]:
        """(dtype of the weights, dtype that autocast computes in); "auto" is the checkpoint's dtype."""
        return {**PRECISIONS, **ADAPTER_PRECISIONS}[self.precision]

    @property
    def adapters(self) -> dict[str, Any]:
        """The settings that only LoRA and QLoRA have; none without adapters."""
        return {"lora_rank": self.lora_rank, "lora_targets": self.lora_targets} if self.peft else {}

    def to_dict(self) -> dict[str, Any]:
        """The settings by name; without adapters, without theirs."""
        return {name: value for name, value in asdict(self).items() if self.peft or not name.startswith("lora_")}

    def check_length(self, config: Any) -> None:
        """ValueError where the sequence is longer than the model's positions."""
        limit = getattr(text_config(config), "max_position_embeddings", None)
        if limit is not None and self.sequence_length > limit:
            raise ValueError(
                tr(
                    ko=f"sequence_length={self.sequence_length}: {self.model_id}의 최대 길이는 {limit}이다.",
                    en=f"sequence_length={self.sequence_length}: {self.model_id} goes up to {limit}.",
                )
            )


def gpu_memory_experiment(
    batch_size: int,
    gradient_accumulation_steps: int = 1,
    gradient_checkpointing: bool = False,
    model_id: str = DEFAULT_MODEL,
    peft: str | None = None,
    *,
    sequence_length: int = 256,
    precision: str = "auto",
    optimizer: str = "adamw",
    attention: str = "sdpa",
    lora_rank: int = LORA_RANK,
    lora_targets: str | Sequence[str] = "attention",
    gpu: GPU | str | None = None,
) -> MemoryReport:
    """Train for two optimizer steps on the GPU in use, print the book's lines, and report what lay in memory.

    precision: "auto" (the checkpoint's dtype), "fp16", "bf16", "fp32", or "mixed_fp16"/"mixed_bf16" (autocast over fp32
    weights). optimizer: "adamw", "adamw_fused", "adamw_8bit", "sgd", "adafactor". attention: "sdpa" or "eager"
    (the few architectures without sdpa are eager in any case).
    peft: None, "lora" or "qlora", with lora_rank and lora_targets ("attention", "all-linear" or ends of layers' names).
    gpu: another GPU than the one in use, or a name of the catalogue for a virtual one.
    An out-of-memory error is caught and reported; all memory is given back, after an error or an interrupt too.
    """
    setting = Setting(
        batch_size, gradient_accumulation_steps, gradient_checkpointing, model_id, peft,
        sequence_length, precision, optimizer, attention, lora_rank, lora_targets,
    )  # fmt: skip
    gpu = _chosen(gpu)
    config = load_config(setting.model_id)
    setting.check_length(config)
    log, parameters, error = TrainingLog(), [0], None
    gpu.reset_peak_memory_stats()
    held_before = gpu.memory_allocated()
    with _in_words(gpu):
        with gpu.interrupts_wait():
            try:
                error = _run(setting, gpu, config, log, parameters)
            except BaseException as failure:
                clear_frames(failure)  # they hold the model and its tensors
                raise
            finally:
                release_memory(gpu)
        if error:
            print(error)
            print(_explain(gpu))
        print(gpu_utilization_line(gpu.memory_allocated()))
        report = _report(setting, gpu, log, parameters[0])
        report.reserved_bytes = gpu.max_memory_reserved()
        if error:
            report.fits, report.error, report.needed_bytes = False, error, None
            if gpu.is_virtual:
                report.needed_bytes = held_before + predict_memory(setting, gpu=gpu).needed_bytes
    return report


@contextmanager
def _in_words(gpu: GPU) -> Iterator[None]:
    """Say what an interrupt has left, and what to do about a GPU that failed."""
    try:
        yield
    except KeyboardInterrupt:
        message = tr(ko="실험을 중단했다. 메모리는 모두 돌려주었다.", en="Interrupted; all memory was given back.")
        raise KeyboardInterrupt(message) from None
    except RuntimeError as failure:
        if "CUDA error" not in str(failure):
            raise
        raise RuntimeError(
            tr(
                ko=f"{gpu.name}을(를) 더는 쓸 수 없다. 런타임(커널)을 다시 시작하고, "
                f"nvidia-smi에 GPU가 보이는지 확인한다. "
                f"CUDA가 알린 것: {failure}",
                en=f"{gpu.name} can no longer be used. Restart the runtime and see whether nvidia-smi lists it. "
                f"CUDA says: {failure}",
            )
        ) from failure


def gpu_memory_sweep(**settings: Any) -> MemoryTable:
    """`gpu_memory_experiment` over every combination of the settings that are given as lists; a table of reports."""
    lists = {name: value if isinstance(value, (list, tuple, range)) else [value] for name, value in settings.items()}
    table = MemoryTable()
    for values in itertools.product(*lists.values()):
        with redirect_stdout(StringIO()):
            table.append(gpu_memory_experiment(**dict(zip(lists, values, strict=True))))
    return table


def predict_memory(
    setting: Setting | None = None, *, gpu: GPU | str | None = None, full: bool = False, **settings: Any
) -> MemoryReport:
    """What the experiment needs without a limit, and whether the caching allocator finds room for it on `gpu`.

    gpu: as in `gpu_memory_experiment`. Of a deep model the trace follows from three shallow runs (`helpers.depth`),
    where that is proven, and of many micro-batches from four (`helpers.micro_batches`); otherwise, or with `full=True`,
    all of it is run.
    """
    setting = setting or Setting(**settings)
    gpu = _chosen(gpu)
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


@functools.lru_cache(maxsize=1024)
def predict_need(setting: Setting, compute_capability: tuple[int, int]) -> Need:
    """What the experiment takes on any GPU of the catalogue with this compute capability: they run the same kernels."""
    name = next(name for name, spec in CATALOG.items() if spec.compute_capability == compute_capability)
    report = predict_memory(setting, gpu=name)
    states = {
        "parameters": report.parameters_bytes,
        "gradients": report.gradients_bytes,
        "optimizer": report.optimizer_bytes,
    }
    step = max(report.peak_bytes // 128, 2 * 2**20)
    return Need(report.peak_bytes, report.timeline.trace.smallest_capacity(step), states, report.at_peak)


def _chosen(gpu: GPU | str | None) -> GPU:
    """The GPU in use for None, a new virtual one for a name of the catalogue."""
    if isinstance(gpu, str):
        return VirtualGPU(CATALOG[choose(gpu, CATALOG, "GPU")])
    return gpu or current_gpu()


def _run(setting: Setting, gpu: GPU, config: Any, log: TrainingLog, parameters: list[int]) -> str | None:
    """Load and train; the text of the out-of-memory error, or None. Nothing on the GPU outlives this call's frame."""
    dataset = _dataset(setting, text_config(config).vocab_size)
    print(tr(ko=f"배치 크기: {setting.batch_size}", en=f"Batch size: {setting.batch_size}"))
    dtype, autocast = setting.dtypes
    try:
        model, _ = load_model_and_tokenizer(
            setting.model_id,
            peft=setting.peft,
            dtype=dtype,
            attention=setting.attention,
            gpu=gpu,
            quiet=True,
            **setting.adapters,
        )
        parameters[0] = model_bytes(model)
        train_model(model, dataset, _training_args(setting, autocast), log=log)
    except RuntimeError as error:  # cuBLAS and the driver have words of their own for the same
        if not any(words in str(error) for words in ("out of memory", "ALLOC_FAILED")):
            raise
        clear_frames(error)
        return str(error)
    return None


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


def _dataset(setting: Setting, vocab_size: int) -> Any:
    return make_dummy_dataset(max(64, setting.samples), setting.sequence_length, min(30000, vocab_size))


def _explain(gpu: GPU) -> str:
    return tr(
        ko=f"메모리 부족(OOM): {gpu.name}의 한도 {human_bytes(gpu.capacity_bytes)}를 넘었다. 배치 크기나 길이를 "
        "줄이거나, 그레이디언트 누적이나 체크포인팅을 켠다.",
        en=f"Out of memory: beyond the {human_bytes(gpu.capacity_bytes)} of {gpu.name}. Use a smaller batch or length, "
        "gradient accumulation or checkpointing.",
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
    )


# -- prediction ----------------------------------------------------------------------------------------------------


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
    with redirect_stdout(StringIO()):
        train_model(model, [batch] * setting.samples, _training_args(setting, autocast), log=log)
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
    runs = [virtual_run(setting, with_depth(config, layers), spec) for layers in depths]
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
