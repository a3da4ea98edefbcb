"""Attention and experts of Liger-Kernel's benchmark scripts, in PyTorch. Liger's twin of each layer is made too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from virtual_gpu.counting.gpu import VirtualGPU

from .calls import Program
from .recipe import Stated


class _Neighborhood(nn.Module):
    """Attention under a mask of near neighbours, nothing fused."""

    def __init__(self, width: int, heads: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.q(x), self.k(x), self.v(x)
        query = query.view(batch, length, self.heads, -1).transpose(1, 2)
        key = key.view(batch, length, self.heads, -1).transpose(1, 2)
        value = value.view(batch, length, self.heads, -1).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (width // self.heads) ** -0.5
        mask = torch.zeros(length, length, dtype=torch.bool)  # filled place by place, which takes nothing
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        attended = torch.matmul(weights, value)
        attended = attended.transpose(1, 2).contiguous().view(batch, length, width)
        output = self.out(attended)
        return output


def neighborhood(gpu: VirtualGPU, s: Stated) -> Program:
    """(batch, length, width) in and out."""
    layers = []
    for _ in ("liger", "torch"):
        with _disable_current_modes(), torch.device("meta"):
            layers.append(_Neighborhood(s.hidden_size, s.num_heads, s.bias).to(s.dtype))
    layer = gpu.place(layers[1])
    x = torch.randn(s.batch_size, s.seq_len, s.hidden_size, dtype=s.dtype)
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return Program(lambda: layer(x), lambda y: dy, retain=True, holds=gpu.place(layers[0]))


def multi_token(gpu: VirtualGPU, s: Stated) -> Program:
    """Softmax of masked scores, then a convolution over queries and keys; what cuDNN takes for it is not known."""
    weights, biases = _convolutions(s)
    x, dy = _scores(s)

    def forward() -> torch.Tensor:
        mask = _causal(x)
        inf, zero = torch.tensor(-1e9, dtype=x.dtype), torch.tensor(0.0, dtype=x.dtype)
        masked = x.masked_fill(~mask, inf)
        probabilities = F.softmax(masked, dim=-1)
        out = F.conv2d(probabilities, weights[1], biases[1], padding=s.K // 2, groups=s.groups)
        return out.masked_fill(~mask, zero)

    return Program(forward, lambda y: dy, retain=True, holds=(weights, biases))


def sparse_multi_token(gpu: VirtualGPU, s: Stated) -> Program:
    """The same with sparsemax, in fp32."""
    weights, biases = _convolutions(s)
    x, dy = _scores(s)

    def forward() -> torch.Tensor:
        mask = _causal(x)
        inf, zero = torch.tensor(-1e9), torch.tensor(0.0)
        scores = x.to(torch.float32)
        z = scores.masked_fill(~mask, inf)
        z_sorted, _ = torch.sort(z, dim=-1, descending=True)
        summed = torch.cumsum(z_sorted, dim=-1)
        places = torch.arange(1, s.L + 1, dtype=z.dtype).view(1, 1, 1, s.L)
        positive = z_sorted > -1e8
        condition = (1 + places * z_sorted > summed) & positive
        k = torch.sum(condition, dim=-1, keepdim=True)
        safe = torch.max(k, torch.ones_like(k))
        summed_k = torch.gather(summed, dim=-1, index=safe.long() - 1)
        tau = (summed_k - 1) / safe.to(z.dtype)
        tau = torch.where(k == 0, torch.full_like(tau, float("inf")), tau)
        probabilities = torch.clamp(z - tau, min=0)
        weight = weights[1].to(torch.float32)
        bias = None if biases[1] is None else biases[1].to(torch.float32)
        out = F.conv2d(probabilities, weight, bias, padding=s.K // 2, groups=s.groups)
        return out.masked_fill(~mask, zero).to(x.dtype)

    return Program(forward, lambda y: dy, retain=True, holds=(weights, biases))


def _convolutions(s: Stated) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    shape = (s.C_out, s.C_in // s.groups, s.K, s.K)
    weights = [torch.empty(shape, dtype=s.dtype, requires_grad=True) for _ in ("liger", "torch")]
    biases = [torch.empty(s.C_out, dtype=s.dtype, requires_grad=True) if s.bias else None for _ in weights]
    return weights, biases


def _scores(s: Stated) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(s.B, s.C_in, s.L, s.L, dtype=s.dtype)
    dy = torch.randn_like(x)
    return x.requires_grad_(True), dy


def _causal(x: torch.Tensor) -> torch.Tensor:
    length = x.shape[-1]
    return torch.tril(torch.ones(length, length, dtype=torch.bool)).view(1, 1, length, length)


def fused_moe(gpu: VirtualGPU, s: Stated) -> Program:
    """Experts in a loop. How many tokens each gets was drawn on the card: here all get the same."""
    tokens, experts = s.T, s.E
    x = torch.randn(tokens, s.H, dtype=s.dtype, requires_grad=True)
    gate_up = torch.randn(experts, 2 * s.intermediate_dim, s.H, dtype=s.dtype, requires_grad=True) * 0.02
    down = torch.randn(experts, s.H, s.intermediate_dim, dtype=s.dtype, requires_grad=True) * 0.02
    logits = torch.randn(tokens, experts)
    chosen = torch.topk(logits, s.K, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, chosen.long()), dim=-1).to(s.dtype).requires_grad_(True)
    total = tokens * s.K
    counts = [total // experts + (expert < total % experts) for expert in range(experts)]

    def forward() -> torch.Tensor:
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen.long(), num_classes=experts)
            mask = mask.permute(2, 1, 0)
            torch.greater(mask.sum(dim=(-1, -2)), 0)
        for expert, count in enumerate(counts):
            if not count:
                continue
            place, token = (torch.zeros(count, dtype=torch.int64) for _ in range(2))
            current = x[token]
            gate, up = F.linear(current, gate_up[expert]).chunk(2, dim=-1)
            current = F.silu(gate) * up
            current = F.linear(current, down[expert])
            current = current * weights[token, place, None]
            final.index_add_(0, token, current.to(final.dtype))
        return final

    return Program(forward, torch.randn_like, lambda: torch.randn_like(x), retain=True)


PROGRAMS = {
    "fused_neighborhood_attention": neighborhood,
    "multi_token_attention": multi_token,
    "sparse_multi_token_attention": sparse_multi_token,
    "fused_moe": fused_moe,
}
