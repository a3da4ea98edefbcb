"""The language model, loss and optimizer of Stanford's CS336 (assignment 2), written here from their sizes.

Students ran copies of it and published what they measured: the course's model, with norms, rotation, softmax, silu and
AdamW by hand. Every name that holds a tensor on the card holds one here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from virtual_gpu.rules.registry import version


class Linear(nn.Module):
    """x Wᵀ by einsum. A bare einsum takes the operands in another order than einops, which names its axes anew."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, inputs) → (batch, length, outputs)."""
        return torch.einsum("abc,dc->abd", x, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in fp32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The shape and dtype of x."""
        dtype = x.dtype
        x = x.float()
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    """Rotary positions; cosines and sines in one buffer of (2, length, head / 2)."""

    def __init__(self, length: int, head: int):
        super().__init__()
        self.register_buffer("table", torch.empty(2, length, head // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, heads, length, head), the halves of each pair apart afterwards."""
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.shape[-2], :].unbind(0)
        return torch.cat((cos * first - sin * second, sin * first + cos * second), dim=-1)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """By hand, over the last dimension."""
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    e = torch.exp(x)
    return e / torch.sum(e, dim=-1, keepdim=True)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores, mask, softmax, sum: nothing fused."""
    scores = torch.einsum("abcd,abed->abce", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("abce,abed->abcd", weights, value)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int, rotary: Rotary):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) → the same."""
        query, key, value = self.q(x), self.k(x), self.v(x)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        places = torch.arange(x.shape[-2], device=x.device)
        mask = (places[:, None] >= places[None, :])[None, ...]
        out = attention(query, key, value, mask)
        out = out.transpose(1, 2).flatten(2).contiguous()
        return self.out(out)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) · w3 x), silu by hand."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, hidden), Linear(hidden, width), Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) → the same."""
        return self.w2(_silu(self.w1(x)) * self.w3(x))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """Norm, attention, norm, SwiGLU, with residuals."""

    def __init__(self, width: int, heads: int, hidden: int, rotary: Rotary):
        super().__init__()
        self.attention, self.ffn = Attention(width, heads, rotary), SwiGLU(width, hidden)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) → the same."""
        attended = self.attention(self.norm1(x))
        middle = x + attended
        fed = self.ffn(self.norm2(middle))
        return middle + fed


class Model(nn.Module):
    """The language model; "medium" is width 1024, 24 layers, 16 heads, 4096 hidden, a vocabulary of 10,000.

    sliced: whether the colon of `embedding[ids, :]` is a slice of its own, whose backward takes zeros of the
    embedding's size for a moment; see `colon_is_a_slice`.
    """

    def __init__(
        self,
        length: int,
        width: int = 1024,
        layers: int = 24,
        heads: int = 16,
        hidden: int = 4096,
        vocabulary: int = 10_000,
        sliced: bool = False,
    ):
        super().__init__()
        self.sliced = sliced
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        rotary = Rotary(length, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, hidden, rotary) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), Linear(width, vocabulary)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) → (batch, length, width)."""
        table = torch.ops.aten.slice.Tensor(self.embedding, 1) if self.sliced else self.embedding
        return table[ids, :]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) → logits (batch, length, vocabulary)."""
        x = embedded = self.embedded(ids)  # held to the end, as in the program that was recorded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.head(x)
        del embedded
        return logits


def colon_is_a_slice(torch_version: str) -> bool:
    """Whether PyTorch of this version slices for the colon in `x[ids, :]`; "" (not stated): as the running one.

    Up to 2.5 a slice is left out only where its end is the length, and a colon's end is the largest integer; today
    where it is no less. Which version between is the first is not known here; a card's trace of 2.11 has no slice.
    Source: applySlice in aten/src/ATen/TensorIndexing.h of 2.5.1 (sym_eq) and of 2.13.0 (sym_le).
    """
    return bool(torch_version) and version(torch_version) < (2, 6)


def forward_in_segments(model: Model, ids: torch.Tensor, segment: int | None) -> torch.Tensor:
    """The logits, with every `segment` layers in a row checkpointed (None: none); the embedding is not held."""
    x = model.embedded(ids)
    if segment is None:
        for layer in model.layers:
            x = layer(x)
    else:
        for start in range(0, len(model.layers), segment):
            layers = model.layers[start : start + segment]
            x = checkpoint(_through(layers), x, use_reentrant=False)
    x = model.norm(x)
    return model.head(x)


def _through(layers: nn.ModuleList) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """By hand, over the last dimension."""
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of −log softmax at the targets."""
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """One tensor at a time, little in place, and every name bound until the next tensor takes it."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.data
                p.data -= 1e-5 * p.data
                m = state.get("m", torch.zeros_like(grad))
                v = state.get("v", torch.zeros_like(grad))
                state["m"] = 0.9 * m + 0.1 * grad
                state["v"] = 0.999 * v + 0.001 * torch.square(grad)
                p.data -= 1e-3 * state["m"] / (torch.sqrt(state["v"]) + 1e-8)


def _weights(scores: torch.Tensor) -> torch.Tensor:
    largest = scores.max(dim=-1, keepdim=True).values
    numerator = torch.exp(scores - largest)
    denominator = torch.sum(numerator, dim=-1, keepdim=True)
    return numerator / denominator


def attention_by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Without heads and mask, (batch, length, width) each; silmont2000's, who names the largest scores."""
    scores = torch.einsum("abc,adc->abd", query, key)
    scores = scores / query.shape[-1] ** 0.5
    weights = _weights(scores)
    return torch.einsum("abd,adc->abc", weights, value)
