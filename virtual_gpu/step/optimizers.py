"""Optimizers by name, and what their state weighs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import NotSupported, WrongValue
from ..language import tr
from ..optional import require
from ..real import GPU, gpu_of, storage_bytes
from ..units import choose, with_parameters

# Our names, and the names that transformers' TrainingArguments has for the same optimizers.
OPTIMIZERS = {
    "adamw": ("adamw_torch", "adamw_hf"),
    "adamw_fused": ("adamw_torch_fused",),
    "adamw_8bit": ("adamw_bnb_8bit", "adamw_8bit"),
    "sgd": ("sgd",),
    "adafactor": ("adafactor",),
}


def optimizer_named(name: object) -> str:
    """Our name of an optimizer that is given by ours or by TrainingArguments'.

    NotSupported for another one that TrainingArguments has; UnknownName for what neither knows.
    """
    text = str(getattr(name, "value", name))
    names = {alias: ours for ours, aliases in OPTIMIZERS.items() for alias in (ours, *aliases)}
    if text.lower() not in names:
        from transformers.training_args import OptimizerNames

        if text in {known.value for known in OptimizerNames}:
            raise NotSupported(
                tr(
                    ko=f"optim={text!r}: 흉내 내지 않는 옵티마이저다. 쓸 수 있는 값: {', '.join(names)}",
                    en=f"optim={text!r} is not simulated. Choose one of: {', '.join(names)}",
                )
            )
    return names[choose(text, names, tr(ko="옵티마이저", en="optimizer"))]


def estimate_memory_of_gradients(model: torch.nn.Module) -> int:
    """Bytes of the gradients that the model's parameters hold now."""
    return storage_bytes(p.grad for p in with_parameters(model).parameters() if p.grad is not None)


def estimate_memory_of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer state on the GPU. Scalars (AdamW's step counters, which live on the CPU) do not count."""
    if not isinstance(getattr(optimizer, "state", None), Mapping):
        raise WrongValue(
            tr(
                ko=f"optimizer={optimizer!r:.80}: torch.optim의 옵티마이저여야 한다.",
                en=f"optimizer={optimizer!r:.80}: must be an optimizer of torch.optim.",
            )
        )
    states = (value for state in optimizer.state.values() for value in state.values())
    return storage_bytes(v for v in states if isinstance(v, torch.Tensor) and v.dim() > 0)


def make_optimizer(
    name: str, model: torch.nn.Module, learning_rate: float = 5e-5, gpu: GPU | None = None
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, as transformers' Trainer makes it on CUDA, on either GPU.

    name: "adamw", "adamw_fused", "adamw_8bit" (bitsandbytes), "sgd" (no momentum), "adafactor", or TrainingArguments'
    name for one of them. gpu: where the model lies; None finds it out.
    """
    name = optimizer_named(name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise WrongValue(tr(ko="학습할 파라미터가 하나도 없다.", en="The model has no trainable parameter."))
    if name == "adamw_8bit":
        require("bitsandbytes")
        from ..models.four_bit import bnb

        optimizer = bnb.optim.AdamW8bit(parameters, lr=learning_rate)
        optimizer.name2qmap = (gpu or gpu_of(model)).place(optimizer.name2qmap)  # its code tables live beside the state
        # What a Trainer of this process asked for its embeddings, bitsandbytes applies to every optimizer that follows.
        optimizer.mng = object.__new__(bnb.optim.GlobalOptimManager)
        optimizer.mng.initialize()
        return optimizer
    if name == "adamw_fused":
        return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    if name == "adafactor":  # with what Trainer passes it (transformers/trainer_optimizer.py): one tensor at a time
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=learning_rate, scale_parameter=False, relative_step=False)
    # foreach is the default on CUDA and not on a CPU: its temporaries are part of the peak.
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kind[name](parameters, lr=learning_rate, foreach=True)
