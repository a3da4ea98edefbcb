"""The course's experiment: a setting in, the book's lines and a report out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from virtual_gpu.counting.gpu import as_gpu
from virtual_gpu.frames import clear_frames
from virtual_gpu.language import tr
from virtual_gpu.models.adapters import LORA_DROPOUT, LORA_RANK
from virtual_gpu.models.configs import DEFAULT_MODEL, load_config
from virtual_gpu.models.depth import text_config
from virtual_gpu.real import GPU
from virtual_gpu.report import MemoryReport, MemoryTable
from virtual_gpu.step import largest, predict
from virtual_gpu.step import splits as _splits
from virtual_gpu.step.predict import (
    model_bytes,
    report_of,
    training_arguments,
)
from virtual_gpu.step.run import TrainingLog
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.splits import Combination
from virtual_gpu.turns import in_turn
from virtual_gpu.units import human_bytes

from .data import make_dummy_dataset
from .gpu import current_gpu, gpu_utilization_line, release_memory
from .models import load_model_and_tokenizer
from .training import train_model
from .watched import telling


@in_turn
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
    lora_dropout: float = LORA_DROPOUT,
    load_in_8bit: bool = False,
    modules_to_save: Sequence[str] = (),
    holds_outputs: bool = False,
    fused_lm_head: bool = False,
    kept_results: tuple[str, ...] = (),
    offload_checkpoints: bool = False,
    gpu: GPU | str | None = None,
) -> MemoryReport:
    """Train for two optimizer steps on the GPU in use, print the book's lines, and report what lay in memory.

    precision: "auto" (the checkpoint's dtype), "fp16", "bf16", "fp32", or "mixed_fp16"/"mixed_bf16" (autocast over fp32
    weights). optimizer: one of `virtual_gpu.step.optimizers.OPTIMIZERS`. attention: "sdpa" or "eager" (the few
    architectures without sdpa are eager in any case), "sdpa_repeat_kv" (see `virtual_gpu.models.attention`).
    peft: None, "lora" or "qlora", with lora_rank, lora_dropout and lora_targets ("attention",
    "all-linear" or ends of layers' names); load_in_8bit: LoRA over int8 weights, modules_to_save: what is trained whole
    beside the adapters.
    holds_outputs: the loop gives the model's outputs and the loss names, as the book's does, so that they stay until
    the next ones; without it the outputs go once there is a loss, and that after backward, as in transformers' Trainer.
    fused_lm_head: the loss from tiles of the logits, by TRL (see `virtual_gpu.models.fused_head`). kept_results: what
    checkpointed blocks keep all the same (see `virtual_gpu.models.kept`). offload_checkpoints: what they keep waits in
    the CPU's RAM (see `virtual_gpu.models.offloaded`).
    gpu: another GPU than the one in use, or a name of the catalogue for a virtual one.
    An out-of-memory error is caught and reported; all memory is given back, after an error or an interrupt too.
    """
    setting = Setting(
        batch_size, gradient_accumulation_steps, gradient_checkpointing, model_id, peft,
        sequence_length, precision, optimizer, attention, lora_rank, lora_targets, holds_outputs, lora_dropout,
        fused_lm_head=fused_lm_head,
        kept_results=kept_results,
        offload_checkpoints=offload_checkpoints,
        load_in_8bit=load_in_8bit, modules_to_save=modules_to_save,
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
        report = report_of(setting, gpu, log, parameters[0])
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


@in_turn
def gpu_memory_sweep(**settings: Any) -> MemoryTable:
    """`gpu_memory_experiment` over every combination of the settings that are given as lists; a table of reports.

    Whoever watches is told how far it is (see `watched`).
    """
    lists = {name: value if isinstance(value, (list, tuple, range)) else [value] for name, value in settings.items()}
    table, many = MemoryTable(), math.prod(map(len, lists.values()))
    with telling() as told:
        for number, values in enumerate(itertools.product(*lists.values()), 1):
            setting = dict(zip(lists, values, strict=True))
            varied = ", ".join(f"{name}={setting[name]!r:.40}" for name in lists if len(lists[name]) > 1)
            told(f"{number}/{many}: {varied}" if varied else f"{number}/{many}")
            with redirect_stdout(StringIO()):
                table.append(gpu_memory_experiment(**setting))
    return table


def predict_memory(
    setting: Setting | None = None, *, gpu: GPU | str | None = None, full: bool = False, **settings: Any
) -> MemoryReport:
    """`virtual_gpu.step.predict.predict_memory`, on the GPU in use where none is named."""
    return predict.predict_memory(setting, gpu=_chosen(gpu), full=full, **settings)


def largest_fitting(name: str, *, multiple: int = 1, gpu: GPU | str | None = None, **settings: Any) -> int:
    """`virtual_gpu.step.largest.largest_fitting`, on the GPU in use where none is named."""
    with telling() as told:
        return largest.largest_fitting(name, multiple=multiple, gpu=_chosen(gpu), **{"progress": told} | settings)


def splits(batch: int, *, gpu: GPU | str | None = None, **settings: Any) -> list[Combination]:
    """`virtual_gpu.step.splits.splits`, on the GPU in use where none is named."""
    with telling() as told:
        return _splits.splits(batch, gpu=_chosen(gpu), **{"progress": told} | settings)


def plan_training(model: Any, gpu: str = "T4", gpus: int = 1, **request: Any) -> Any:
    """`virtual_gpu.plan_training`; whoever watches is told how many plans there are so far (see `watched`)."""
    from virtual_gpu.plan import search

    with telling() as told:

        def so_far(plans: Any) -> None:
            told(tr(ko=f"찾는 중, {len(plans)}가지", en=f"searching, {len(plans)} so far"))

        so_far(())
        return search.plan_training(model, gpu, gpus, **{"progress": so_far} | request)


def _chosen(gpu: GPU | str | None) -> GPU:
    """The GPU in use for None, a new virtual one for a card (see `virtual_gpu.cards.card`)."""
    return current_gpu() if gpu is None else as_gpu(gpu)


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
        train_model(model, dataset, training_arguments(setting, autocast), log=log)
    except RuntimeError as error:  # cuBLAS and the driver have words of their own for the same
        if not any(words in str(error) for words in ("out of memory", "ALLOC_FAILED")):
            raise
        clear_frames(error)
        return str(error)
    return None


def _dataset(setting: Setting, vocab_size: int) -> Any:
    return make_dummy_dataset(max(64, setting.samples), setting.sequence_length, min(30000, vocab_size))


def _explain(gpu: GPU) -> str:
    return tr(
        ko=f"메모리 부족(OOM): {gpu.name}의 한도 {human_bytes(gpu.capacity_bytes)}를 넘었다. 배치 크기나 길이를 "
        "줄이거나, 그레이디언트 누적이나 체크포인팅을 켠다.",
        en=f"Out of memory: beyond the {human_bytes(gpu.capacity_bytes)} of {gpu.name}. Use a smaller batch or length, "
        "gradient accumulation or checkpointing.",
    )
