"""The requests that a program makes of the allocator on the virtual GPU, beside those that a real card recorded.

The program is a transformer of Stanford's CS336 (assignment 2), written here from its sizes; the traces are PyTorch's
memory snapshots of it, published by students under the MIT licence, reduced to their events. A request is compared by
whether it allocates or frees, and by its bytes; tensors of a card are not rounded in such a trace, so both are rounded
to blocks of 512.

    python benchmarks/request_by_request.py medium_forward.json.gz --length 128
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from virtual_gpu.allocator import round_size
from virtual_gpu.counting.gpu import VirtualGPU, virtual

Request = tuple[str, int]  # "alloc" or "free", and bytes in blocks of 512


# -- the program ------------------------------------------------------------------------------------------------------


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
    """The language model; "medium" is width 1024, 24 layers, 16 heads, 4096 hidden, a vocabulary of 10,000."""

    def __init__(self, length: int, width: int = 1024, layers: int = 24, heads: int = 16, hidden: int = 4096):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(10_000, width))
        rotary = Rotary(length, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, hidden, rotary) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), Linear(width, 10_000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) → logits (batch, length, vocabulary)."""
        x = embedded = self.embedding[ids, :]  # held to the end, as in the program that was recorded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.head(x)
        del embedded
        return logits


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


# -- requests ---------------------------------------------------------------------------------------------------------


def recorded(path: str | Path) -> tuple[list[Request], list[str]]:
    """The requests of a card's trace, and beside each what made it ("operator | file:line", "" for a free)."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    labels = trace["labels"]
    events = [event for event in trace["devices"][0]["events"] if event[0] in (0, 1)]
    requests = [("free" if event[0] else "alloc", round_size(event[2])) for event in events]
    return requests, [labels[event[4]] if event[0] == 0 else "" for event in events]


class Requests:
    """A recorder for the meter: every request in order, in blocks of 512 bytes."""

    def __init__(self, gpu: VirtualGPU) -> None:
        self.made: list[Request] = []
        self._sizes = {block: size for block, (size, *_) in gpu.meter.live_blocks().items()}

    def allocated(self, block: int, size: int, *_: Any) -> None:
        """Called by the meter."""
        self.made.append(("alloc", size))
        self._sizes[block] = size

    def freed(self, block: int) -> None:
        """Called by the meter."""
        self.made.append(("free", self._sizes.pop(block)))

    def label(self, block: int, category: str) -> None:
        """Called by the meter; of no interest here."""


def predicted(gpu: VirtualGPU, length: int, training: bool, half: bool, batch: int = 4, **sizes: int) -> list[Request]:
    """The requests of one forward pass, or one training step, after another one."""
    with torch.device("meta"):
        model = Model(length, **sizes)
    gpu.place(model)
    optimizer = AdamW(model.parameters())
    ids, targets = (gpu.place(torch.zeros(batch, length, dtype=torch.int64)) for _ in range(2))
    with gpu:
        for recorded_one in (False, True):
            recorder = gpu.meter.recorder = Requests(gpu) if recorded_one else None
            if training:
                with gpu.autocast(torch.bfloat16 if half else None):
                    output = model(ids)
                    loss = cross_entropy(output, targets)
                loss.backward()
                optimizer.step()
                if not recorded_one:
                    optimizer.zero_grad()
                    del output, loss
            else:
                with torch.inference_mode(), gpu.autocast(torch.bfloat16) if half else nullcontext():
                    model(ids)
    gpu.meter.recorder = None
    return recorder.made


def _weights(scores: torch.Tensor) -> torch.Tensor:
    largest = scores.max(dim=-1, keepdim=True).values
    numerator = torch.exp(scores - largest)
    denominator = torch.sum(numerator, dim=-1, keepdim=True)
    return numerator / denominator


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("abc,adc->abd", query, key)
    scores = scores / query.shape[-1] ** 0.5
    weights = _weights(scores)
    return torch.einsum("abd,adc->abc", weights, value)


def attention_step(gpu: VirtualGPU) -> list[Request]:
    """The requests of attention by hand, 8 × 4,096 × 16 in fp32, forward and backward, from an empty allocator."""
    recorder = gpu.meter.recorder = Requests(gpu)
    with gpu:
        query, key, value = (torch.randn(8, 4096, 16, requires_grad=True) for _ in range(3))
        out = _attended(query, key, value)
        loss = out.sum()
        loss.backward()
        gpu.meter.recorder = None
    return recorder.made


def first_difference(ours: list[Request], theirs: list[Request]) -> int | None:
    """The index of the first request that differs; None where the lists are equal."""
    for index, (a, b) in enumerate(zip(ours, theirs)):  # noqa: B905 - the lengths are compared below
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def main() -> None:
    """Compare and print the first difference with its surroundings, and how many requests differ in all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--half", action="store_true", help="under bf16 autocast")
    parser.add_argument("--gpu", default="A100-80GB")
    parser.add_argument("--show", type=int, default=8)
    args = parser.parse_args()
    theirs, labels = recorded(args.trace)
    ours = predicted(virtual(args.gpu), args.length, args.training, args.half)
    print(f"{len(ours):,} requests on the virtual GPU, {len(theirs):,} on the card")
    at = first_difference(ours, theirs)
    if at is None:
        print("all the same, in the same order")
        return
    print(f"first difference: {at:,}")
    for index in range(max(0, at - args.show), at + args.show):
        a, b = (side[index] if index < len(side) else ("", 0) for side in (ours, theirs))
        label = labels[index] if index < len(labels) else ""
        print(f"{index:>7} {a[0]:<6}{a[1]:>12,}   {b[0]:<6}{b[1]:>12,} {'' if a == b else '≠'} {label}")
    for whose, rest in (("here", Counter(ours) - Counter(theirs)), ("on the card", Counter(theirs) - Counter(ours))):
        most = ", ".join(f"{count} × {action} {size:,}" for (action, size), count in rest.most_common(6))
        print(f"{rest.total():,} only {whose}: {most}")


if __name__ == "__main__":
    main()
