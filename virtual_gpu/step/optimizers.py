"""Optimizers by name, and what their state weighs."""

from __future__ import annotations

import torch

from ..language import tr
from ..models.adapters import require
from ..real import GPU, gpu_of, storage_bytes
from ..units import choose

# Our names, and the names that transformers' TrainingArguments has for the same optimizers.
OPTIMIZERS = {
    "adamw": ("adamw_torch", "adamw_hf"),
    "adamw_fused": ("adamw_torch_fused",),
    "adamw_8bit": ("adamw_bnb_8bit", "adamw_8bit"),
    "sgd": ("sgd",),
    "adafactor": ("adafactor",),
}


def estimate_memory_of_gradients(model: torch.nn.Module) -> int:
    """Bytes of the gradients that the model's parameters hold now."""
    return storage_bytes(p.grad for p in model.parameters() if p.grad is not None)


def estimate_memory_of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer state on the GPU. Scalars (AdamW's step counters, which live on the CPU) do not count."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return storage_bytes(v for v in states if isinstance(v, torch.Tensor) and v.dim() > 0)


def make_optimizer(
    name: str, model: torch.nn.Module, learning_rate: float = 5e-5, gpu: GPU | None = None
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, with CUDA's defaults (`foreach`) on either GPU.

    name: "adamw", "adamw_fused", "adamw_8bit" (bitsandbytes), "sgd" (no momentum), "adafactor", or TrainingArguments'
    name for one of them. gpu: where the model lies; None finds it out.
    """
    names = {alias: ours for ours, aliases in OPTIMIZERS.items() for alias in (ours, *aliases)}
    name = names[choose(str(getattr(name, "value", name)), names, tr(ko="옵티마이저", en="optimizer"))]
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(tr(ko="학습할 파라미터가 하나도 없다.", en="The model has no trainable parameter."))
    if name == "adamw_8bit":
        require("bitsandbytes")
        from ..models.four_bit import bnb

        optimizer = bnb.optim.AdamW8bit(parameters, lr=learning_rate)
        optimizer.name2qmap = (gpu or gpu_of(model)).place(optimizer.name2qmap)  # its code tables live beside the state
        return optimizer
    if name == "adamw_fused":
        return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    # foreach is the default on CUDA and not on a CPU: its temporaries are part of the peak.
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": getattr(torch.optim, "Adafactor", None)}
    return kind[name](parameters, lr=learning_rate, foreach=True)
