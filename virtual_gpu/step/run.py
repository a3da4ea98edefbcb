"""The training step."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..errors import NotSupported, WrongValue
from ..frames import clear_frames
from ..language import tr
from ..models.attention import kv_repeated
from ..models.depth import text_config
from ..models.fused_head import fused_head
from ..models.kept import Leave, Watch, context_fn, kept_results
from ..models.offloaded import leaving, offloading, require_offload
from ..real import GPU, gpu_of
from ..trace.timeline import Timeline
from ..turns import in_turn
from ..units import positive_int, with_parameters
from .completions import Completions, Learner, learning
from .optimizers import estimate_memory_of_gradients, estimate_memory_of_optimizer, make_optimizer, paged_bytes
from .pairs import OF_THE_HEAD, preference_loss, side_by_side


@dataclass
class TrainingLog:
    """What a run of `train` left: bytes right after the first optimizer step, losses, and the timeline.

    paged_bytes: optimizer state in CUDA's managed memory (see `models.pages`), not in optimizer_bytes. offloaded: bytes
    of a tensor → how often one went to the CPU (and came back), where checkpoints wait there.
    It is filled as training goes, so it holds what happened even when the memory ran out. On a virtual GPU there are
    no losses: its tensors have no values.
    """

    allocated_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    paged_bytes: int = 0
    optimizer_steps: int = 0
    micro_steps: int = 0
    offloaded: Counter[int] = field(default_factory=Counter)
    losses: list[float] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)


@in_turn
def train(
    model: torch.nn.Module,
    dataset: Any,
    training_args: Any,
    *,
    log: TrainingLog | None = None,
    gpu: GPU | None = None,
    reference: torch.nn.Module | None = None,
    after_first_step: Callable[[TrainingLog], None] | None = None,
    watch: Watch | None = None,
) -> TrainingLog:
    """Train `model`, which lies on a GPU, on `dataset`; what was held when is in the log.

    training_args: any object with transformers' `TrainingArguments` names; read are per_device_train_batch_size,
    gradient_accumulation_steps, gradient_checkpointing, num_train_epochs, max_steps (optimizer steps), learning_rate,
    optim (PyTorch's foreach AdamW where it is absent; a real TrainingArguments has the fused one by default), fp16 and
    bf16 (mixed precision over fp32 weights), loss_scale (the GradScaler's first, 65536), use_cache, and holds_outputs:
    the model's outputs, logits among them, and the loss, with what its graph keeps, stay until the next ones are there,
    as in a loop that gives them names. Without it the outputs are dropped once there is a loss, and the loss after
    backward, as transformers' Trainer does. fused_lm_head: the loss comes from TRL's head (see `models.fused_head`),
    repeat_kv: grouped heads are repeated before attention (see `models.attention`), kept_results: what checkpointed
    blocks keep all the same (see `models.kept`), offload_checkpoints: what they keep waits in the CPU's RAM (see
    `models.offloaded`), fp32_embedding_state: see `make_optimizer`; a real TrainingArguments has it. objective: "dpo"
    is the loss of pairs (see `step.pairs`), of which a sample holds both sequences, the chosen one first, (2, length),
    and "reference", (2,), where the reference's log probabilities are known; logits_by_row: see there. "grpo" is the
    loss of completions, on a virtual GPU alone: `completions` (see `step.completions`) says how long they are; of the
    data only the length is read.
    reference: DPO's and GRPO's, on the same GPU; None is the model without its adapters. gpu: where the model lies;
    None finds it out. after_first_step is called with the log after the first optimizer step, before the gradients are
    dropped.
    watch: computes what checkpointed blocks could keep (see `models.kept`).

    The last group of micro-batches may be shorter, and its last micro-batch smaller: each loss counts by its share of
    the group's samples, so the gradient is that of one big batch, nothing lost and nothing counted twice.

    ValueError for a model that is not on a GPU, and for data that it cannot read. After an error nothing of the
    training stays, even if the error is kept (as a notebook does); only if it came while backward recomputed a
    checkpointed layer, that layer's activations stay with it.
    """
    log = TrainingLog() if log is None else log
    gpu = gpu or gpu_of(model)
    setting = _Setting.read(training_args)
    _check_data(model, dataset, setting)
    scaled = setting.autocast == torch.float16  # torch's GradScaler: "Attempting to unscale FP16 gradients."
    if scaled and any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters()):
        raise WrongValue(
            tr(
                ko="혼합 정밀도(fp16=True)에는 fp32 가중치가 필요하다. dtype=torch.float32로 불러온다.",
                en="Mixed precision (fp16=True) wants fp32 weights: load with dtype=torch.float32.",
            )
        )
    try:
        _train(model, reference, dataset, setting, gpu, log, after_first_step, watch)
    except BaseException as error:
        clear_frames(error)  # a notebook keeps the last error, and with it all that its frames hold
        raise
    return log


def _train(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    dataset: Any,
    setting: _Setting,
    gpu: GPU,
    log: TrainingLog,
    after_first_step: Callable[[TrainingLog], None] | None,
    watch: Watch | None,
) -> None:
    moved: Counter[int] = Counter()  # to the CPU in this micro-batch
    if setting.gradient_checkpointing:
        leave = leaving(gpu if gpu.is_virtual else None, moved)
        enable_checkpointing(
            model, setting.kept_results, watch, leave, setting.offload_checkpoints, setting.use_reentrant
        )
    # As libraries do under adapters: of an input without a gradient reentrant checkpointing makes none.
    asks = setting.use_reentrant and not any(p.requires_grad for p in model.get_input_embeddings().parameters())
    if asks:
        model.enable_input_require_grads()
    optimizer = make_optimizer(
        setting.optimizer, model, setting.learning_rate, gpu, setting.fp32_embedding_state, setting.optim_args,
        setting.optim_target_modules,
    )  # fmt: skip
    if callable(getattr(optimizer, "train", None)):  # of schedule-free ones, as the Trainer does before a step
        optimizer.train()
    of_lomo = getattr(optimizer, "fused_backward", None)  # steps there, as accelerate calls it
    scaled = setting.autocast == torch.float16 and not gpu.is_virtual
    scaler = torch.amp.GradScaler("cuda", init_scale=setting.loss_scale, enabled=scaled)
    model.train()
    learner = _learner(model, reference, setting, gpu)
    with (
        gpu.record(model, optimizer) as record,
        _use_cache(model, setting.use_cache),
        _as_set(model, reference, setting, gpu, moved),
        contextlib.nullcontext() if learner is None else learning(gpu, learner),
    ):
        made: list[dict[str, torch.Tensor]] = []
        try:
            for group in _groups(dataset, setting):
                samples = sum(len(batch["input_ids"]) for batch in group)
                if learner is not None:
                    with record.phase("scoring"):
                        made = learner.buffer()  # until then TRL keeps the last ones
                for place, batch in enumerate(group):
                    share = len(batch["input_ids"]) / samples
                    with record.phase("forward"):
                        if learner is None:
                            loss, outputs = _loss(model, reference, gpu.place(batch), setting, gpu)
                        else:
                            loss, outputs = learner.loss(made[place]), None
                        loss = loss * share
                        if not setting.holds_outputs:
                            del outputs
                    with record.phase("backward"):
                        if of_lomo is not None:
                            of_lomo(loss, setting.learning_rate)
                        else:
                            scaler.scale(loss).backward()
                        if not gpu.is_virtual:
                            log.losses.append(loss.item() / share)
                        if not setting.holds_outputs:
                            del loss
                    log.micro_steps += 1
                    log.offloaded.update(moved)
                    moved.clear()
                with record.phase("step"):
                    if of_lomo is None:
                        scaler.step(optimizer)
                scaler.update()
                log.optimizer_steps += 1
                if log.optimizer_steps == 1:
                    log.allocated_bytes = gpu.memory_allocated()
                    log.gradients_bytes = estimate_memory_of_gradients(model)
                    log.optimizer_bytes = estimate_memory_of_optimizer(optimizer)
                    log.paged_bytes = paged_bytes(optimizer)
                    if after_first_step is not None:
                        after_first_step(log)
                optimizer.zero_grad()
        finally:
            log.timeline = record.timeline()
            optimizer.zero_grad()  # what was half done goes too
            if asks:
                model.disable_input_require_grads()
            if setting.gradient_checkpointing:
                disable_checkpointing(model)  # the next run decides for itself


def _learner(model: torch.nn.Module, reference: torch.nn.Module | None, setting: _Setting, gpu: GPU) -> Learner | None:
    """GRPO's; None for another objective. NotSupported on a real GPU."""
    if setting.completions is None:
        return None
    if not gpu.is_virtual:
        raise NotSupported(
            tr(
                ko="objective='grpo': 가상 GPU에서만 학습한다. 진짜 GPU에서는 TRL의 GRPOTrainer를 쓴다.",
                en="objective='grpo': trained on a virtual GPU alone. On a real one use TRL's GRPOTrainer.",
            )
        )
    forward = partial(forward_under, gpu, setting.autocast)
    return Learner(gpu, model, reference, setting.completions, forward, setting.autocast)


def _loss(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    batch: dict[str, torch.Tensor],
    setting: _Setting,
    gpu: GPU,
) -> tuple[torch.Tensor, Any]:
    """The loss of a micro-batch on the GPU, and the model's outputs where a loop could keep them."""
    # No closure over the model: after an error a frame that was cleared still keeps its function, and that its cells.
    forward = partial(forward_under, gpu, setting.autocast)
    if setting.objective != "dpo":
        outputs = forward(model, **batch, **({"fused_lm_head": True} if setting.fused_lm_head else {}))
        return outputs.loss, outputs
    inputs = side_by_side({name: value for name, value in batch.items() if name != "reference"})
    known = batch["reference"].transpose(0, 1).flatten() if "reference" in batch else None
    how = {"known": known, "fused_lm_head": setting.fused_lm_head, "by_row": setting.logits_by_row}
    return preference_loss(forward, model, inputs, reference=reference, **how), None


def forward_under(gpu: GPU, autocast: torch.dtype | None, model: torch.nn.Module, **inputs: Any) -> Any:
    """The model's outputs: under autocast, where it has a dtype, and in fp32 then."""
    from accelerate.utils import convert_to_fp32  # takes its time

    with gpu.autocast(autocast):
        outputs = model(**inputs)
    # As accelerate's wrapper of the model's forward does, inside the Trainer.
    return convert_to_fp32(outputs) if autocast else outputs


def enable_checkpointing(
    model: torch.nn.Module,
    kept: Sequence[str] = (),
    watch: Watch | None = None,
    leave: Leave | None = None,
    offload: bool = False,
    use_reentrant: bool = False,
) -> None:
    """Switch on gradient checkpointing, under whichever name transformers has for it.

    kept: what blocks keep all the same (see `models.kept`). watch, leave: see `context_fn` there. offload: their inputs
    wait in the CPU's RAM. use_reentrant: PyTorch's older way. WrongValue for a model that cannot, and where
    transformers cannot offload.
    """
    with_parameters(model)
    if offload:
        require_offload()
    arguments: dict[str, Any] = {"use_reentrant": use_reentrant}
    if kept or watch is not None:
        blocks = text_config(model.config).num_hidden_layers
        arguments["context_fn"] = context_fn(kept, blocks, model, watch, leave or leaving(None, Counter()))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable(arguments, **({"offload": True} if offload else {}))
    except ValueError as error:
        raise WrongValue(
            tr(
                ko=f"{type(model).__name__}: 이 모델은 그레이디언트 체크포인팅을 지원하지 않는다.",
                en=f"{type(model).__name__} does not support gradient checkpointing.",
            )
        ) from error


def disable_checkpointing(model: torch.nn.Module) -> None:
    """Switch gradient checkpointing off again."""
    (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()


def set_checkpointing(model: Any, on: bool, kept: Sequence[str] = ()) -> Any:
    """Switch a transformers model's checkpointing on (see `enable_checkpointing`) or off, and return the model."""
    if on:
        enable_checkpointing(model, kept)
    else:
        disable_checkpointing(model)
    return model


@dataclass
class _Setting:
    """What `train_model` reads from its arguments, checked."""

    batch_size: int
    accumulation: int
    gradient_checkpointing: bool
    epochs: float
    max_steps: int | None
    learning_rate: float
    optimizer: str
    autocast: torch.dtype | None
    loss_scale: float
    use_cache: bool
    holds_outputs: bool
    fused_lm_head: bool
    logits_by_row: bool
    repeat_kv: bool
    kept_results: tuple[str, ...]
    offload_checkpoints: bool
    use_reentrant: bool
    fp32_embedding_state: bool
    objective: str
    optim_args: str
    optim_target_modules: str | tuple[str, ...]
    completions: Completions | None

    @classmethod
    def read(cls, args: Any) -> _Setting:
        fp16, bf16 = getattr(args, "fp16", False), getattr(args, "bf16", False)
        max_steps = getattr(args, "max_steps", -1)
        return cls(
            batch_size=positive_int(args.per_device_train_batch_size, "per_device_train_batch_size"),
            accumulation=positive_int(getattr(args, "gradient_accumulation_steps", 1), "gradient_accumulation_steps"),
            gradient_checkpointing=bool(getattr(args, "gradient_checkpointing", False)),
            epochs=getattr(args, "num_train_epochs", 1),
            max_steps=max_steps if max_steps and max_steps > 0 else None,
            learning_rate=getattr(args, "learning_rate", 5e-5),
            optimizer=getattr(args, "optim", "adamw"),
            autocast=torch.float16 if fp16 else torch.bfloat16 if bf16 else None,
            loss_scale=getattr(args, "loss_scale", 2.0**16),
            use_cache=bool(getattr(args, "use_cache", False)),
            holds_outputs=bool(getattr(args, "holds_outputs", False)),
            fused_lm_head=bool(getattr(args, "fused_lm_head", False)),
            logits_by_row=bool(getattr(args, "logits_by_row", False)),
            repeat_kv=bool(getattr(args, "repeat_kv", False)),
            kept_results=kept_results(getattr(args, "kept_results", ())),
            offload_checkpoints=bool(getattr(args, "offload_checkpoints", False)),
            use_reentrant=bool(getattr(args, "use_reentrant", False)),
            fp32_embedding_state=bool(getattr(args, "fp32_embedding_state", _is_the_trainer_s(args))),
            objective=getattr(args, "objective", "sft"),
            optim_args=getattr(args, "optim_args", None) or "",
            optim_target_modules=getattr(args, "optim_target_modules", None) or "",
            completions=getattr(args, "completions", None),
        )


def _is_the_trainer_s(args: Any) -> bool:
    return any(kind.__name__ == "TrainingArguments" for kind in type(args).__mro__)


def _groups(dataset: Any, setting: _Setting) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The micro-batches of one optimizer step at a time; the last group of an epoch may be shorter.

    As in transformers' Trainer: max_steps goes before num_train_epochs, and the data start anew as often as it takes.
    """
    steps_per_epoch = math.ceil(math.ceil(len(dataset) / setting.batch_size) / setting.accumulation)
    steps = setting.max_steps or max(1, math.ceil(setting.epochs * steps_per_epoch))
    done = 0
    while True:
        batches: Iterable = iter(_loader(dataset, setting.batch_size))
        while group := list(islice(batches, setting.accumulation)):
            yield group
            done += 1
            if done == steps:
                return


def _loader(dataset: Any, batch_size: int) -> DataLoader:
    """The data in their order. A loader draws a seed for its workers: from a generator of its own, not the reader's."""
    return DataLoader(dataset, batch_size=batch_size, generator=torch.Generator())


def _check_data(model: torch.nn.Module, dataset: Any, setting: _Setting) -> None:
    if setting.batch_size > len(dataset):
        raise WrongValue(
            tr(
                ko=f"배치 크기 {setting.batch_size}가 데이터 {len(dataset)}개보다 크다. "
                f"make_dummy_dataset(size={setting.batch_size})처럼 데이터를 늘린다.",
                en=f"Batch size {setting.batch_size} exceeds the {len(dataset)} samples; make more data.",
            )
        )
    ids = dataset[0]["input_ids"]
    config = text_config(model.config)
    limit, length = getattr(config, "max_position_embeddings", None), ids.shape[-1]
    if limit is not None and length > limit:
        raise WrongValue(
            tr(
                ko=f"시퀀스 길이 {length}가 이 모델의 최대 길이 {limit}보다 길다.",
                en=f"Sequence length {length} exceeds this model's maximum of {limit}.",
            )
        )
    chunks = _loader(dataset, 1024)
    largest = max(int(chunk[name].max()) for chunk in chunks for name in ("input_ids", "labels"))
    if largest >= config.vocab_size:
        raise WrongValue(
            tr(
                ko=f"토큰 번호 {largest}가 이 모델의 어휘 {config.vocab_size}개를 벗어난다. "
                f"make_dummy_dataset(vocab_size={config.vocab_size})로 만든다.",
                en=f"Token id {largest} is outside this model's vocabulary of {config.vocab_size}.",
            )
        )


@contextlib.contextmanager
def _as_set(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    setting: _Setting,
    gpu: GPU,
    moved: Counter[int],
) -> Iterator[None]:
    """TRL's head, repeated heads and checkpoints on the CPU, where the setting has them, until the training ends."""
    with contextlib.ExitStack() as stack:
        if setting.use_reentrant and setting.objective == "dpo":  # says of each block that a reference learns nothing
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        if setting.repeat_kv:
            stack.enter_context(kv_repeated())
        if setting.fused_lm_head and setting.completions is None:
            of_tokens = {"outputs": OF_THE_HEAD} if setting.objective == "dpo" else {}
            stack.enter_context(fused_head(model, gpu.is_virtual, **of_tokens))
            if reference is not None:
                stack.enter_context(fused_head(reference, gpu.is_virtual))
        if setting.offload_checkpoints:
            stack.enter_context(offloading(gpu if gpu.is_virtual else None, moved))
        yield


@contextlib.contextmanager
def _use_cache(model: torch.nn.Module, value: bool) -> Iterator[None]:
    config = text_config(model.config)
    before = getattr(config, "use_cache", None)
    if before is not None:
        config.use_cache = value
    try:
        yield
    finally:
        if before is not None:
            config.use_cache = before
