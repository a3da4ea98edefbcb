"""One training program for a card, written as one writes it with PyTorch; a lever replaces one piece of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from virtual_gpu.cards import card
from virtual_gpu.program import device
from virtual_gpu.program.context import cuda

STEPS = 2  # the second is the first with the whole optimizer state from its beginning
LORA_RANK = 16


def _product(bias: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return mm_flop(a, b)


_FORMULAS = {torch.ops.aten.addmm: _product}  # PyTorch's own refuses the form that says the result's type
_SMALL = 2**10  # elements: of a copy on the CPU only the shape matters here, so its values may all be one


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


@dataclass(frozen=True)
class Program:
    """What is trained, and the pieces of how. batch: texts; length: tokens; weights, autocast: types."""

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


@dataclass(frozen=True)
class Measured:
    """Of optimizer steps on a card without a limit: two for the bytes, and one more to count operations.

    peak: bytes of tensors at most; phase: where; reserved: what the allocator had taken by then; fits: whether the card
    has room. flops: matrix products of a step; traffic: bytes copied between card and RAM in it, both ways.
    """

    peak: int
    phase: str
    reserved: int
    fits: bool
    flops: int
    traffic: int


class Traffic(TorchDispatchMode):
    """Bytes that are copied between the card and the RAM."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._crossed(args[0], out)
        elif func is torch.ops.aten.copy_.default:
            self._crossed(args[1], args[0])
        return out

    def _crossed(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.is_cuda != target.is_cuda:
            self.nbytes += target.numel() * target.element_size()


def measure(program: Program) -> Measured:
    """Run the program on its virtual card; whether it fits is tried where the cache might be given back in time."""
    found = _run(program, limited=False)
    capacity = card(program.card).capacity_bytes
    fits = found.reserved <= capacity
    if not fits and found.peak <= capacity:
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
        with program.around(), cuda(program.card, limited=limited):
            return _train(program)
    finally:
        device._HUGE = huge


def _train(program: Program) -> Measured:
    model = program.load(program)
    if program.adapt is not None:
        model = program.adapt(model)
    model.train()
    program.prepare(model)
    optimizer = program.optimizer(model)
    scaler = torch.amp.GradScaler("cuda", enabled=program.autocast == torch.float16)
    peaks: dict[str, int] = {}
    reserved = 0

    def ended(phase: str) -> None:
        nonlocal reserved
        peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        batch = {name: tensor.cuda() for name, tensor in program.data(program).items()}
        with program.saving(model), torch.autocast("cuda", program.autocast, enabled=program.autocast is not None):
            loss = program.loss(model, batch)
        ended("forward")
        if hasattr(optimizer, "fused_backward"):  # LOMO's, as accelerate calls it
            optimizer.fused_backward(loss, 1e-5)
            ended("backward")
        else:
            # what steps in the backward, or is no optimizer of PyTorch, cannot be stepped by the scaler
            scaled = isinstance(optimizer, torch.optim.Optimizer)
            (scaler.scale(loss) if scaled else loss).backward()
            ended("backward")
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        optimizer.zero_grad()
        ended("step")

    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step()
    phase, most = max(peaks, key=peaks.__getitem__), reserved
    peak = peaks[phase]
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as flops, Traffic() as traffic:
        step()  # a third one: who counts operations keeps tensors longer than the program does
    return Measured(peak, phase, most, True, flops.get_total_flops(), traffic.nbytes)
