"""bcrafton's memory snapshot, end to end: one compiled training step of CS336's model, request by request.

`benchmarking_script.py` of bcrafton/assignment2-systems (commit 0c0e8a7, PyTorch 2.6): a model of 12 layers compiled as
a whole, loss and optimizer by hand and eager, gradients that are never zeroed, ten steps before the recorded one. Two
things of PyTorch 2.6 are asked of the running one. Its Dynamo did not trace einx, which the program turns positions
with: the recorded addresses come from the code of four graphs a layer, which begin where `Attention` has its break. And
its AOTAutograd took gradients in the strides that they have; today's copies those that are laid out otherwise than the
output, but with `guess_tangent_strides_as_outputs` off (torch/_functorch/_aot_autograd, 2.6.0 and 2.13.0). Where graphs
end is read off the trace; nothing is fitted to its bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from virtual_gpu.program.context import cuda

from . import cs336
from .compiled import compiler_on, refuse_eager
from .cs336_snapshots import held, said
from .recipe import ANY, Recipe, Row, from_source

WORDS, LENGTH, WIDTH, HIDDEN, LAYERS, HEADS = 50257, 64, 768, 3072, 12, 12
WARM_UP = 10
CARD = "A100-80GB"  # not stated; the recorded cuBLAS workspaces, 8,519,680 bytes, are not a Hopper's


class Attention(cs336.Attention):
    """Causal attention whose graph ends before the positions are turned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) → the same."""
        query, key, value = self.q(x), self.k(x), self.v(x)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        positions = torch.arange(x.shape[-2], device=x.device)
        torch._dynamo.graph_break()
        query = self.turned(query, positions)
        key = self.turned(key, positions)
        places = torch.arange(x.shape[-2], device=x.device)
        mask = (places[:, None] >= places[None, :])[None, ...]
        out = cs336.attention(query, key, value, mask)
        return self.out(out.transpose(1, 2).flatten(2).contiguous())

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(batch, heads, length, head), by the cosines and sines of its positions; the halves of a pair stay beside."""
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.rotary.table[:, positions]
        return torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1).flatten(-2).contiguous()


class AdamW(torch.optim.Optimizer):
    """His: weight decay last, the state bound at the end."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            rate, (beta_1, beta_2) = group["lr"], group["betas"]
            for p in group["params"]:
                grad, state = p.grad.data, self.state[p]
                t = state.get("t", 1)
                m = state.get("m", torch.zeros_like(grad))
                v = state.get("v", torch.zeros_like(grad))
                new_m = beta_1 * m + ((1 - beta_1) * grad)
                new_v = beta_2 * v + ((1 - beta_2) * torch.square(grad))
                corrected = rate * math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
                p.data -= corrected * new_m / (torch.sqrt(new_v) + group["eps"])
                p.data -= rate * group["weight_decay"] * p.data
                state["m"], state["v"], state["t"] = new_m, new_v, t + 1


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """So many steps; ids, targets and logits are held from one to the next."""
    for _ in range(steps):
        ids = torch.randint(0, WORDS, (1, LENGTH)).to("cuda")
        targets = torch.randint(0, WORDS, (1, LENGTH)).to("cuda")
        logits = model(ids)
        loss = cs336.cross_entropy(logits, targets)
        loss = loss.backward()
        optimizer.step()


@functools.lru_cache(2)
def recorded_step(warm_up: int = WARM_UP) -> tuple[Mapping[str, int], list[Mapping[str, Any]]]:
    """(start, peak and end, allocated and reserved; the events of the step after the warm-up, as PyTorch has them)."""
    as_2_6 = torch._functorch.config.patch(guess_tangent_strides_as_outputs=False)
    with compiler_on(), as_2_6, cuda(CARD) as gpu:
        model = cs336.Model(LENGTH, WIDTH, LAYERS, HEADS, HIDDEN, WORDS)
        for layer in model.layers:
            layer.attention.__class__ = Attention
        model = model.to("cuda")
        model.compile()
        optimizer = AdamW(model.parameters())
        train(model, optimizer, warm_up)
        found = held(torch.cuda, "start")
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        train(model, optimizer, 1)
        refuse_eager(gpu.watch.notes)
        found |= {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }
        return found | held(torch.cuda, "end"), torch.cuda.memory._snapshot()["device_traces"][0]


def predict(row: Row) -> int:
    """ "peak_allocated" and its kin."""
    return said(recorded_step()[0], row)


RECIPES = (
    Recipe(
        name="CS336 compiled, end to end",
        what="a compiled step of a 0.2B model: allocated and reserved",
        what_ko="컴파일한 2억 파라미터 모델의 스텝: 할당과 예약",
        handles=from_source("bcrafton/assignment2-systems", kinds=("trace",)),
        predict=predict,
        settings={"torch": ANY, "allocator_settings": ("default",)},
    ),
)
