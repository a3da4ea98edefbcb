"""Layers and activations of Liger-Kernel's benchmark scripts, in PyTorch, beside which Liger's kernels are measured.

Each script makes Liger's layer too, though only the other is called: its weights are there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from virtual_gpu.counting.gpu import VirtualGPU

from .calls import Program
from .recipe import Stated


def _placed(gpu: VirtualGPU, make, dtype: torch.dtype = torch.float32) -> nn.Module:
    with _disable_current_modes(), torch.device("meta"):
        module = make().to(dtype)
    return gpu.place(module)


def _with_given(forward, x: torch.Tensor) -> Program:
    """A gradient that is there before the calls."""
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return Program(forward, lambda y: dy, retain=True)


def _norm(make_ours):
    def program(gpu: VirtualGPU, s: Stated) -> Program:
        layers = [_placed(gpu, lambda: make_ours(s)) for _ in ("liger", "torch")]
        x = torch.randn(s.M, s.get("N", s.get("H")), dtype=s.dtype)
        return _with_given(lambda: layers[1](x), x)

    return program


class _LlamaRMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)


class _AddRMSNorm(_LlamaRMSNorm):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype), residual.to(dtype)


def fused_add_rms_norm(gpu: VirtualGPU, s: Stated) -> Program:
    """Residual added, then normed; gradients for both outputs. Liger's two layers hold three weights."""
    layers = [_placed(gpu, lambda: _AddRMSNorm(s.H)) for _ in range(4)]
    x, r = (torch.randn(s.M, s.H, dtype=s.dtype) for _ in range(2))
    dy, ds = torch.randn_like(x), torch.randn_like(r)
    x.requires_grad_(True)
    r.requires_grad_(True)

    def full() -> None:
        y, total = layers[1](x, r)
        torch.autograd.backward((y, total), (dy, ds))

    return Program(lambda: layers[1](x, r), full=full)


def group_norm(gpu: VirtualGPU, s: Stated) -> Program:
    """(M, C, H) in groups of some channels."""
    layers = [_placed(gpu, lambda: nn.GroupNorm(s.C // s.channels_per_group, s.C)) for _ in range(2)]
    x = torch.randn(s.M, s.C, s.H, dtype=s.dtype)
    return replace(_with_given(lambda: layers[1](x), x), only_full=True)


def megatron_rms_norm(gpu: VirtualGPU, s: Stated) -> Program:
    """torch's own RMS norm in bf16; the gradient is that of a sum."""
    layer = _placed(gpu, lambda: nn.RMSNorm(s.H, eps=1e-6), torch.bfloat16)
    x = torch.randn(s.S, s.B, s.H, dtype=torch.bfloat16, requires_grad=True)

    def full() -> None:
        y = layer(x)
        y.sum().backward()

    return Program(lambda: layer(x), full=full)


def megatron_swiglu(gpu: VirtualGPU, s: Stated) -> Program:
    """silu of one half times the other; the gradient is dropped before each call."""
    x = torch.randn(s.S, s.B, 2 * s.ffn_local, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        first, second = torch.chunk(x, 2, -1)
        return F.silu(first) * second

    def full() -> None:
        if x.grad is not None:
            x.grad = None
        y = forward()
        y.sum().backward()

    return Program(forward, full=full)


class _MLP(nn.Module):
    """Gate, up, down, as in Llama; `nn.GELU(approximate="tanh")` or `nn.SiLU` for the gate."""

    def __init__(self, hidden: int, intermediate: int, activation: str):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = nn.GELU(approximate="tanh") if "gelu" in activation else nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def mlp(gpu: VirtualGPU, s: Stated) -> Program:
    """Llama's MLP with a random gradient; only the layer that is measured is made."""
    x = torch.randn(s.bsz, s.T, s.hidden_size, dtype=s.dtype, requires_grad=True)
    layer = _placed(gpu, lambda: _MLP(s.hidden_size, s.intermediate_size, s.hidden_act), s.dtype)
    return Program(lambda: layer(x), torch.randn_like, lambda: torch.randn_like(x), retain=True)


def softmax(gpu: VirtualGPU, s: Stated) -> Program:
    """The script's shape is the row's N alone: one row, whatever M says."""
    x = torch.randn(s.N, dtype=s.dtype, requires_grad=True)
    return Program(lambda: torch.softmax(x, -1), torch.ones_like, lambda: torch.ones_like(x), retain=True)


def relu_squared(gpu: VirtualGPU, s: Stated) -> Program:
    """As for softmax, N numbers."""
    x = torch.randn(s.N, dtype=s.dtype, requires_grad=True)
    return Program(lambda: torch.square(F.relu(x)), torch.ones_like, lambda: torch.ones_like(x), retain=True)


def sparsemax(gpu: VirtualGPU, s: Stated) -> Program:
    """Sorted, summed up, cut off."""
    x = torch.randn(s.B * s.T, s.V, dtype=s.dtype)
    return _with_given(lambda: _sparsemax(x), x)


def _sparsemax(x: torch.Tensor) -> torch.Tensor:
    size = x.size(-1)
    input_sorted, _ = torch.sort(x, dim=-1, descending=True)
    summed = torch.cumsum(input_sorted, dim=-1)
    places = torch.arange(1, size + 1, dtype=x.dtype)
    places = places.view(1, size)
    bound = 1 + places * input_sorted
    support = bound > summed
    k = support.sum(dim=-1, keepdim=True).clamp(min=1)
    support_sum = (input_sorted * support).sum(dim=-1, keepdim=True)
    tau = (support_sum - 1) / k
    return torch.clamp(x - tau, min=0)


def _sizes(s: Stated) -> tuple[int, int, int]:
    """(hidden size, length, head size): one of the first two is the row's x."""
    hidden = s.hidden_size if hasattr(s, "hidden_size") else s.H
    return hidden, s.seq_len if hasattr(s, "seq_len") else s.T, hidden // s.num_q_heads


def rope(gpu: VirtualGPU, s: Stated) -> Program:
    """Llama's rotation of queries and keys, with gradients asked for by `autograd.grad`."""
    _, length, head = _sizes(s)
    frequencies = torch.empty(head // 2)
    q, k = (
        torch.randn(1, length, heads, head, dtype=s.dtype, requires_grad=True).transpose(1, 2)
        for heads in (s.num_q_heads, s.num_kv_heads)
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    places = torch.arange(length, dtype=torch.long).unsqueeze(0)
    with torch.no_grad():
        angles = frequencies[None, :, None] @ places[:, None, :].float()
        angles = torch.cat((angles.transpose(1, 2),) * 2, dim=-1)
        cos, sin = angles.cos().to(s.dtype), angles.sin().to(s.dtype)
        del angles

    def half(x: torch.Tensor) -> torch.Tensor:
        first = x[..., : x.shape[-1] // 2]
        second = x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        wide_cos, wide_sin = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated_q = (q * wide_cos) + (half(q) * wide_sin)
        rotated_k = (k * wide_cos) + (half(k) * wide_sin)
        return rotated_q, rotated_k

    def full() -> None:
        rotated_q, rotated_k = forward()
        torch.autograd.grad((rotated_q, rotated_k), (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return Program(forward, full=full, holds=(frequencies, places))


def llama4_rope(gpu: VirtualGPU, s: Stated) -> Program:
    """Llama 4's rotation, in complex numbers."""
    _, length, head = _sizes(s)
    frequencies = torch.empty(head // 2)
    q, k = (
        torch.randn(1, length, heads, head, dtype=s.dtype, requires_grad=True)
        for heads in (s.num_q_heads, s.num_kv_heads)
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    places = torch.arange(length, dtype=torch.long).unsqueeze(0)
    with torch.no_grad():
        angles = (frequencies[None, :, None] @ places[:, None, :].float()).transpose(1, 2)
        turns = torch.polar(torch.ones_like(angles), angles)
        del angles

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        complex_q = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        complex_k = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        q_out = torch.view_as_real(complex_q * turns[:, :, None, :]).flatten(3)
        k_out = torch.view_as_real(complex_k * turns[:, :, None, :]).flatten(3)
        return q_out.type_as(q), k_out.type_as(k)

    def full() -> None:
        q_out, k_out = forward()
        torch.autograd.grad((q_out, k_out), (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return Program(forward, full=full, holds=(frequencies, places))


PROGRAMS = {
    "layer_norm": _norm(lambda s: nn.LayerNorm(s.N, eps=s.eps)),
    "rms_norm": _norm(lambda s: _LlamaRMSNorm(s.H)),
    "fused_add_rms_norm": fused_add_rms_norm,
    "group_norm": group_norm,
    "megatron_rms_norm": megatron_rms_norm,
    "megatron_swiglu": megatron_swiglu,
    **dict.fromkeys(("geglu", "swiglu", "tiled_geglu", "tiled_swiglu"), mlp),
    "softmax": softmax,
    "relu_squared": relu_squared,
    "sparsemax": sparsemax,
    "rope": rope,
    "llama4_rope": llama4_rope,
}
