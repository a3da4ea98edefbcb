"""Optimizers that are made by a library's own code, and that this code steps: the Trainer's factory, PyTorch's Muon.

What such code does hangs on which device a tensor is on (it compiles, launches Triton kernels, copies to the CPU), so
it runs where a program finds CUDA: on a real GPU, or on a program's virtual card (`plan.on_a_card`).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import NotSupported, WrongValue
from ..language import tr

MUON, IN_BACKWARD = "muon", "adamw_in_backward"
OURS = (MUON, IN_BACKWARD)  # of PyTorch, and without a name in TrainingArguments
# A part of TrainingArguments' name → (module, what pip calls it). Source: transformers/trainer_optimizer.py.
_LIBRARIES = {
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "schedule_free": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "adamw_torch_8bit": ("torchao", "torchao"),
    "adamw_torch_4bit": ("torchao", "torchao"),
    "anyprecision": ("torchdistx", "torchdistx"),
    "bnb": ("bitsandbytes", "bitsandbytes"),
    "ademamix": ("bitsandbytes", "bitsandbytes"),
}
_ELSEWHERE = ("xla", "npu")  # accelerators that are not CUDA's
PROJECTORS = ("galore_torch", "apollo_torch")  # whose states are objects with tensors in them
ALL_LINEAR = "all-linear"


@functools.cache
def of_the_trainer() -> frozenset[str]:
    """Every name that the installed TrainingArguments have for an optimizer."""
    from transformers.training_args import OptimizerNames

    return frozenset(name.value for name in OptimizerNames)


def checked(name: str) -> str:
    """The Trainer's name; NotSupported where it is of another accelerator, ImportError where its library is missing."""
    if any(part in name for part in _ELSEWHERE):
        raise NotSupported(
            tr(
                ko=f"optim={name!r}: CUDA에서 쓰는 옵티마이저가 아니다.",
                en=f"optim={name!r} is not an optimizer of CUDA.",
            )
        )
    for module, package in (library for part, library in _LIBRARIES.items() if part in name):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                tr(
                    ko=f"optim={name!r}: {package}이(가) 없다. 'pip install {package}'로 설치하면 센다.",
                    en=f"optim={name!r}: {package} is missing: 'pip install {package}' lets it be counted.",
                )
            )
    return name


def is_of(optimizer: str, module: str) -> bool:
    """Whether that library has its code."""
    return any(name == module for part, (name, _) in _LIBRARIES.items() if part in optimizer)


def takes_targets(optimizer: str) -> bool:
    """Whether `optim_target_modules` say which weights its low-rank states are of."""
    return optimizer.startswith(("galore_", "apollo_"))


def steps_in_backward(optimizer: str) -> bool:
    """Whether a parameter steps as soon as it has its gradient: nothing can be accumulated, scaled or clipped."""
    return optimizer == IN_BACKWARD or optimizer.endswith("_layerwise") or "lomo" in optimizer


def beside_4_bits() -> str:
    """Why none of these is counted of QLoRA, in the reader's language."""
    return tr(ko="4비트 가중치와 함께는 세지 않는다", en="not counted beside 4-bit weights")


def too_early() -> str:
    """Why what steps in the backward is not for several GPUs, in the reader's language."""
    return tr(ko="GPU끼리 그레이디언트를 더하기 전에 스텝한다", en="it steps before GPUs have added their gradients")


def trains_all(optimizer: str) -> bool:
    """Whether it is made for weights, not for adapters: of low rank itself, of matrices, or in the backward."""
    return takes_targets(optimizer) or steps_in_backward(optimizer) or optimizer == MUON


def arguments_of(optimizer: str, optim_args: Any, targets: Any) -> tuple[str, str | tuple[str, ...]]:
    """(optim_args, optim_target_modules) as a Setting has them; WrongValue for what is none.

    Where none are named, the low-rank states are of every linear layer: the Trainer has no default.
    """
    args, targets = optim_args or "", "" if targets is None else targets
    targets = tuple(targets) if isinstance(targets, list) else targets
    targets = ALL_LINEAR if targets in ((ALL_LINEAR,), "all_linear") else targets
    if not isinstance(args, str) or any(part.count("=") != 1 for part in args.split(",") if args):
        raise WrongValue(
            tr(
                ko=f"optim_args={args!r:.80}: 'rank=128,scale=0.25'처럼 이름=값을 쉼표로 잇는다.",
                en=f"optim_args={args!r:.80}: names and values, as in 'rank=128,scale=0.25'.",
            )
        )
    named = isinstance(targets, tuple) and all(isinstance(name, str) for name in targets)
    if not isinstance(targets, str) and not named:
        raise WrongValue(
            tr(
                ko=f"optim_target_modules={targets!r:.80}: 'all-linear'이거나 층 이름의 목록이어야 한다.",
                en=f"optim_target_modules={targets!r:.80}: must be 'all-linear' or a list of layers' names.",
            )
        )
    return args.replace(" ", ""), (targets or ALL_LINEAR) if takes_targets(optimizer) else ""


def check_way(optimizer: str, accumulation: int, scales: bool, peft: str | None, own: bool) -> None:
    """WrongValue for what does not go together with the optimizer, NotSupported for what is not counted with it.

    scales: whether the loss is scaled for fp16's gradients. own: whether it is counted by its library's own code.
    """
    if steps_in_backward(optimizer) and (accumulation > 1 or scales):
        raise WrongValue(
            tr(
                ko=f"optimizer={optimizer!r}: 역전파 안에서 스텝하므로 누적과 fp16의 GradScaler를 쓸 수 없다. "
                "gradient_accumulation_steps=1로 두고, 정밀도는 bf16이나 fp32로 한다.",
                en=f"optimizer={optimizer!r} steps in the backward: no accumulation, no GradScaler of fp16. Use "
                "gradient_accumulation_steps=1 and bf16 or fp32.",
            )
        )
    if peft and trains_all(optimizer):
        raise NotSupported(
            tr(
                ko=f"optimizer={optimizer!r}: 전체 미세 조정에서만 센다({peft}에서는 세지 않는다).",
                en=f"optimizer={optimizer!r} is counted in full fine-tuning alone, not with {peft}.",
            )
        )
    if peft == "qlora" and own:
        raise NotSupported(f"optimizer={optimizer!r}: {beside_4_bits()}.")


def make(
    name: str,
    model: nn.Module,
    learning_rate: float = 5e-5,
    optim_args: str = "",
    optim_target_modules: str | tuple[str, ...] = "",
) -> Any:
    """The optimizer of a model on CUDA, by its library's own code.

    name: TrainingArguments', or one of OURS. optim_args, optim_target_modules: as TrainingArguments take them.
    """
    if name == MUON:
        return _muon(model, learning_rate)
    if name == IN_BACKWARD:
        return _in_backward(model, learning_rate)
    from transformers import Trainer

    trainer = object.__new__(Trainer)  # its whole __init__ sets up data and devices
    trainer.model, trainer.optimizer, trainer.optimizer_cls_and_kwargs = model, None, None
    trainer.args = _arguments(name, learning_rate, optim_args, optim_target_modules)
    try:
        with _own_manager():
            return trainer.create_optimizer()
    except ImportError as error:  # of what the library itself needs
        raise NotSupported(f"optim={name!r}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:  # what the factory says of its arguments
        raise WrongValue(f"optim={name!r}, optim_args={optim_args!r}: {error}") from error


def _arguments(name: str, learning_rate: float, optim_args: str, targets: str | tuple[str, ...]) -> Any:
    """TrainingArguments' defaults, without the devices that an instance looks for."""
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames, ParallelMode

    given = {field: spec.default for field, spec in TrainingArguments.__dataclass_fields__.items()}
    given |= {"optim": OptimizerNames(name), "learning_rate": learning_rate, "optim_args": optim_args or None}
    given |= {"optim_target_modules": list(targets) if isinstance(targets, tuple) else targets or None}
    given |= {"gradient_accumulation_steps": 1, "parallel_mode": ParallelMode.NOT_DISTRIBUTED}
    return type("Arguments", (), given)()


@contextmanager
def _own_manager() -> Iterator[None]:
    """What a Trainer asks bitsandbytes for its embeddings is for that one, not for all that follow in this process."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield
        return
    from ..models.quantized import bnb

    manager = bnb.optim.GlobalOptimManager
    before, manager._instance = manager._instance, None
    try:
        yield
    finally:
        manager._instance = before


class Several:
    """Optimizers that step one after the other; those that step in the backward are not called again."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], stepped: bool = False):
        self.optimizers, self.stepped = optimizers, stepped
        self.state: dict[Any, Any] = {}  # each has its own
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All of theirs."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """A step of each."""
        for optimizer in () if self.stepped else self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """No parameter has a gradient."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(the blocks' trained matrices, all else that is trained): embeddings, head and vectors are for AdamW.

    So Muon's authors have it, and PyTorch's class takes nothing but matrices.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {id(p) for end in ends if end is not None for p in end.parameters()}
    outer |= {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = [p for p in trained if p.dim() == 2 and id(p) not in outer]
    known = {id(p) for p in inner}
    return inner, [p for p in trained if id(p) not in known]


def _muon(model: nn.Module, learning_rate: float) -> Several:
    if not hasattr(torch.optim, "Muon"):
        raise NotSupported(
            tr(ko="optimizer='muon': PyTorch 2.9부터 센다.", en="optimizer='muon' is counted from PyTorch 2.9 on.")
        )
    inner, others = matrices(model)
    if not inner:
        raise WrongValue(
            tr(ko="optimizer='muon': 학습할 행렬이 없다.", en="optimizer='muon': there is no matrix to train.")
        )
    made = [torch.optim.Muon(inner, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")]
    return Several(made + ([torch.optim.AdamW(others, lr=learning_rate, fused=True)] if others else []))


def _in_backward(model: nn.Module, learning_rate: float) -> Several:
    """PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass"."""
    trained = [p for p in model.parameters() if p.requires_grad]
    of_each = {p: torch.optim.AdamW([p], lr=learning_rate, fused=True) for p in trained}

    def step(parameter: torch.Tensor) -> None:
        of_each[parameter].step()
        of_each[parameter].zero_grad()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(step)
    return Several([*of_each.values()], stepped=True)
