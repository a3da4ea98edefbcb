"""Levers on the optimizer and its state."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .program import trained

RANK = 128  # of GaLore's and APOLLO's projections


class Several:
    """Optimizers that step one after the other; or, in the backward, none."""

    def __init__(self, *optimizers: Any):
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def pytorch(kind: str, **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: getattr(torch.optim, kind)(trained(model), lr=1e-5, **settings)


def by_trainer(optim: str, **settings: Any) -> Callable[[nn.Module], Any]:
    """What transformers' Trainer makes of `optim=`, by its own code."""

    def make(model: nn.Module) -> Any:
        from transformers import Trainer, TrainingArguments

        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, optim=optim, report_to=[], **settings)
            return Trainer(model, arguments).create_optimizer()

    return make


def bitsandbytes(kind: str) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        import bitsandbytes

        optimizer = getattr(bitsandbytes.optim, kind)(trained(model), lr=1e-5)
        optimizer.name2qmap = {name: table.cuda() for name, table in optimizer.name2qmap.items()}
        return optimizer

    return make


def in_backward(model: nn.Module) -> Any:
    """Each parameter steps as soon as its gradient is there, and the gradient goes (PyTorch's tutorial)."""
    of_each = {parameter: torch.optim.AdamW([parameter], lr=1e-5, fused=True) for parameter in trained(model)}

    def step(parameter: torch.Tensor) -> None:
        of_each[parameter].step()
        of_each[parameter].zero_grad()

    for parameter in of_each:
        parameter.register_post_accumulate_grad_hook(step)
    return Several()


def eight_bit_in_backward(model: nn.Module) -> Any:
    import bitsandbytes

    of_each = {parameter: bitsandbytes.optim.AdamW8bit([parameter], lr=1e-5) for parameter in trained(model)}
    for optimizer in of_each.values():
        optimizer.name2qmap = {name: table.cuda() for name, table in optimizer.name2qmap.items()}

    def step(parameter: torch.Tensor) -> None:
        of_each[parameter].step()
        of_each[parameter].zero_grad()

    for parameter in of_each:
        parameter.register_post_accumulate_grad_hook(step)
    return Several()


def muon(model: nn.Module) -> Any:
    """Muon for the matrices of the blocks; AdamW for embeddings, head and vectors, as its authors say."""
    outer = {id(p) for p in (*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters())}
    matrices = [p for p in trained(model) if p.dim() == 2 and id(p) not in outer]
    inner = {id(p) for p in matrices}
    others = [p for p in trained(model) if id(p) not in inner]
    return Several(torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-5, fused=True))


def adam_mini(model: nn.Module) -> Any:
    from adam_mini import Adam_mini

    config = model.config
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", heads)
    return Adam_mini(
        model.named_parameters(), lr=1e-5, dim=config.hidden_size, n_heads=heads, n_kv_heads=keys, verbose=False
    )


def on_the_cpu(gradients: bool) -> Callable[[nn.Module], Any]:
    """torchao's: states and step on the CPU; with gradients=True they leave the card as soon as they are there."""

    def make(model: nn.Module) -> Any:
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(trained(model), torch.optim.AdamW, offload_gradients=gradients, lr=1e-5)

    return make


def torchao(kind: str, **settings: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        import torchao.optim

        return getattr(torchao.optim, kind)(trained(model), lr=1e-5, **settings)

    return make
