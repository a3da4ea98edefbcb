"""One training program for a card, or for one of several, as one writes it with PyTorch; a lever changes one piece."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode, mm_flop

from benchmarks.recipes.compiled import compiler_on, refuse_eager
from virtual_gpu.cards import card
from virtual_gpu.program import device, pipeline, ranks
from virtual_gpu.program.context import cuda
from virtual_gpu.program.traffic import Traffic, Watching
from virtual_gpu.shards.collectives import NOTHING_SENT
from virtual_gpu.shards.nccl import of_groups
from virtual_gpu.step.flops import grouped_flop

STEPS = 2  # the second is the first with the whole optimizer state from its beginning
LORA_RANK = 16


def _product(bias: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return mm_flop(a, b)


# PyTorch's own refuses the form of the first that says the result's type, and knows not the second.
_FORMULAS = {torch.ops.aten.addmm: _product, torch.ops.aten._grouped_mm: grouped_flop}
_SMALL = 2**10  # elements: of a copy on the CPU only the shape matters here, so its values may all be one


class Operations(Watching, _FlopCounterMode):
    """What `Flops` sees: of compiled code the products that it calls, which are operations."""


class Flops(FlopCounterMode):
    """FLOPs of all modules together.

    PyTorch's own tells them apart by hooks on leaves, with which a zero-bubble schedule's `autograd.grad` raises.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.mod_tracker = Nowhere()

    def __enter__(self) -> Flops:
        self.flop_counts.clear()
        self.mode = Operations(self)
        self.mode.__enter__()
        return self


class Nowhere(contextlib.nullcontext):
    """In no module but the whole."""

    parents = ("Global",)


def load(program: Program) -> nn.Module:
    """The model on the card, its weights in the program's type."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(program.model_id, dtype=program.weights, **shape(program)).cuda()


def shape(program: Program) -> dict[str, Any]:
    """What a configuration is changed by."""
    layers = {} if program.layers is None else {"num_hidden_layers": program.layers}
    return {"attn_implementation": program.attention, **layers}


def adapted(model: nn.Module, **more: Any) -> nn.Module:
    """The model with LoRA on every linear layer but the head."""
    from peft import LoraConfig, get_peft_model

    config = {"r": LORA_RANK, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | more
    return get_peft_model(model, LoraConfig(**config))


def loss_of_model(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that the model computes itself: all logits, in fp32."""
    return model(**batch, labels=batch["input_ids"], use_cache=False).loss


def fused_adamw(model: nn.Module) -> Any:
    """What TrainingArguments' default makes since transformers 5."""
    return torch.optim.AdamW(trained(model), lr=1e-5, fused=True)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def one_length(program: Program) -> dict[str, torch.Tensor]:
    """A batch in which every text has the full length."""
    return {"input_ids": torch.ones(program.batch, program.length, dtype=torch.int64)}


def nothing(model: nn.Module) -> None: ...


def keeping(model: nn.Module) -> contextlib.AbstractContextManager:
    """What is kept for backward stays where it is."""
    return contextlib.nullcontext()


def checkpointed(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


def whole(model: nn.Module) -> nn.Module:
    """Nobody else has a part of the model."""
    return model


Batch = dict[str, torch.Tensor]
Backward = Callable[[torch.Tensor], None]
Ended = Callable[[str], None]  # told the name of a phase as it ends


def once(program: Program, model: nn.Module, batch: Batch, backward: Backward, ended: Ended) -> torch.Tensor:
    """Forward and backward of one batch; the loss, which a loop holds until its next one."""
    with program.saving(model), program.casting():
        loss = program.loss(model, batch)
    ended("forward")
    backward(loss)
    ended("backward")
    return loss


@dataclass(frozen=True)
class Program:
    """What is trained, and the pieces of how. batch: texts; length: tokens; weights, autocast: types.

    gpus: cards, each with a batch of its own; this is number `rank` of them. split: what is shared with the others.
    groups: sizes of those in which cards send to each other; one of all where none are named.
    """

    card: str
    model_id: str
    batch: int
    length: int
    weights: torch.dtype
    autocast: torch.dtype | None = None
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    layers: int | None = None  # fewer than the model has
    attention: str = "sdpa"
    load: Callable[[Program], nn.Module] = load
    adapt: Callable[[nn.Module], nn.Module] | None = None
    prepare: Callable[[nn.Module], Any] = nothing
    data: Callable[[Program], dict[str, torch.Tensor]] = one_length
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor] = loss_of_model
    saving: Callable[[nn.Module], contextlib.AbstractContextManager] = keeping
    optimizer: Callable[[nn.Module], Any] = fused_adamw
    gpus: int = 1
    rank: int = 0
    groups: tuple[int, ...] = ()
    split: Callable[[nn.Module], nn.Module] = whole
    passes: Callable[[Program, nn.Module, Batch, Backward, Ended], Any] = once

    def casting(self) -> contextlib.AbstractContextManager:
        """Autocast, where the program has it."""
        return torch.autocast("cuda", self.autocast, enabled=self.autocast is not None)

    @property
    def room(self) -> int:
        """Bytes of the card for PyTorch's allocator: what NCCL likely takes for the groups of cards is beside it."""
        return card(self.card).capacity_bytes - of_groups(self.groups or (self.gpus,)).likely


@dataclass(frozen=True)
class Measured:
    """Of optimizer steps on a card without a limit: two for the bytes, and one more to count operations.

    peak: bytes of tensors at most; phase: where; reserved: what the allocator had taken by then; fits: whether the card
    has room. flops: matrix products of a step; traffic: bytes copied between card and RAM in it, both ways;
    sent: bytes of what this card's collectives work on (`Sent`).
    """

    peak: int
    phase: str
    reserved: int
    fits: bool
    flops: int
    traffic: int
    sent: int


class Sent(Watching):
    """Bytes that a rank's collectives work on, the larger of what goes in and comes out; an all-reduce counts twice.

    So `rank_step` counts, and the ZeRO paper. In a ring of N cards each sends (N - 1) / N of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it sends for itself is an operation of its own
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            if name not in NOTHING_SENT and not name.startswith("recv"):
                tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
                twice = 2 if name in ("allreduce", "all_reduce") else 1
                self.nbytes += twice * max(tensor.numel() * tensor.itemsize for tensor in tensors)
        return out


def measure(program: Program) -> Measured:
    """Run the program on its virtual card; whether it fits is tried where the cache might be given back in time."""
    found = _run(program, limited=False)
    fits = found.reserved <= program.room
    if not fits and found.peak <= program.room:
        try:
            _run(program, limited=True)
            fits = True
        except torch.OutOfMemoryError:
            pass
    return Measured(**{**vars(found), "fits": fits})


def _run(program: Program, limited: bool) -> Measured:
    import transformers.modeling_utils  # noqa: F401  before there is a CUDA GPU: it looks for what it could use with one

    huge, device._HUGE = device._HUGE, _SMALL
    try:
        place = {"rank": program.rank, "gpus": program.gpus}
        with compiler_on(), program.around(), cuda(program.card, limited=limited, **place) as gpu:
            if limited:
                gpu.limit(program.room / gpu.spec.memory_bytes)
            if program.gpus > 1:
                ranks.install(gpu.patches, gpu, gpu.watch)
                pipeline.install(gpu.patches, gpu.imports, _nobody)
                dist.init_process_group("nccl")
            found = _train(program)
            refuse_eager(gpu.watch.notes)  # else what is called compiled would be something else
            return found
    finally:
        device._HUGE = huge


def _nobody(rank: int, stage: int) -> tuple:
    raise NotImplementedError(f"stage {stage} is to know what it receives")


def _train(program: Program) -> Measured:
    model = program.load(program)
    if program.adapt is not None:
        model = program.adapt(model)
    model.train()
    program.prepare(model)
    model = program.split(model)
    optimizer = program.optimizer(model)
    scaler = torch.amp.GradScaler("cuda", enabled=program.autocast == torch.float16)
    peaks: dict[str, int] = {}
    reserved = 0

    def ended(phase: str) -> None:
        nonlocal reserved
        peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    # what steps in the backward, or is no optimizer of PyTorch, cannot be stepped by the scaler
    scaled = isinstance(optimizer, torch.optim.Optimizer)

    def backward(loss: torch.Tensor) -> None:
        if hasattr(optimizer, "fused_backward"):  # LOMO's, as accelerate calls it
            optimizer.fused_backward(loss, 1e-5)
        else:
            (scaler.scale(loss) if scaled else loss).backward()

    def step() -> None:
        batch = {name: tensor.cuda() for name, tensor in program.data(program).items()}
        loss = program.passes(program, model, batch, backward, ended)  # noqa: F841  on the card until the step is done
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        elif not hasattr(optimizer, "fused_backward"):
            optimizer.step()
        optimizer.zero_grad()
        ended("step")

    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step()
    phase, most = max(peaks, key=peaks.__getitem__), reserved
    peak = peaks[phase]
    flops, traffic, sent = Flops(display=False, custom_mapping=_FORMULAS), Traffic(), Sent()
    with flops, traffic, sent:
        step()  # a third one: who counts operations keeps tensors longer than the program does
    return Measured(peak, phase, most, True, flops.get_total_flops(), traffic.to_cpu + traffic.to_card, sent.nbytes)
