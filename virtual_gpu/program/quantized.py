"""bitsandbytes' layers on a virtual GPU: what they hold (4 and 8 bits), and what they allocate while they compute."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..rules.active import in_force
from ..rules.bitsandbytes import BLOCK, NESTED_BLOCK, compute_bias, product, product_backward


def kept_tensors(module: nn.Module) -> str:
    """ "4bit", "8bit", or "" where the module is not a quantized layer of bitsandbytes."""
    bnb = sys.modules.get("bitsandbytes")
    if bnb is None:
        return ""
    return (
        "4bit" if isinstance(module, bnb.nn.Linear4bit) else "8bit" if isinstance(module, bnb.nn.Linear8bitLt) else ""
    )


def attributes(module: nn.Module, name: str) -> dict[str, Any]:
    """What libraries read off a quantized weight."""
    state = getattr(module, "virtual_state", None)
    return vars(state) if state is not None and name == "weight" else {}


def quantize(layer: nn.Module, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The quantized weight of a layer; the layer computes from it from now on.

    The whole weight is on the card for a moment, as when it is loaded.
    """
    on_card = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    if kept_tensors(layer) == "8bit":
        layer.virtual_state = SimpleNamespace(SCB=torch.empty(weight.shape[0], device=device), CB=None)
        layer.__class__ = _virtual(layer, _forward_8bit)
        return torch.empty(weight.shape, dtype=torch.int8, device=device)
    old = layer.weight
    blocks = -(-weight.numel() // BLOCK)
    if old.compress_statistics:
        sizes = (
            ((blocks,), torch.uint8),
            ((), torch.float32),
            ((-(-blocks // NESTED_BLOCK),), torch.float32),
            ((256,), torch.float32),
        )
    else:
        sizes = (((blocks,), torch.float32),)
    state = [torch.empty(size, dtype=dtype, device=device) for size, dtype in (*sizes, ((16,), torch.float32))]
    layer.virtual_state = SimpleNamespace(
        quant_type=old.quant_type, compress_statistics=old.compress_statistics, blocksize=BLOCK,
        quant_storage=old.quant_storage, bnb_quantized=True, tensors=state,
        quant_state=SimpleNamespace(shape=weight.shape, dtype=weight.dtype, blocksize=BLOCK, quant_type=old.quant_type),
    )  # fmt: skip
    layer.__class__ = _virtual(layer, _forward_4bit)
    bytes_each = torch.empty((), dtype=old.quant_storage).element_size()
    del on_card
    return torch.empty(((weight.numel() + 1) // 2 // bytes_each, 1), dtype=old.quant_storage, device=device)


def state_tensors(module: nn.Module) -> list[torch.Tensor]:
    """What a quantized layer holds beside its weight."""
    state = getattr(module, "virtual_state", None)
    return [] if state is None else getattr(state, "tensors", [getattr(state, "SCB", None)])


_kinds: dict[tuple[type, Any], type] = {}


def _virtual(layer: nn.Module, forward: Any) -> type:
    """The layer's class with another forward, by its own name."""
    kind = type(layer)
    if (kind, forward) not in _kinds:
        _kinds[kind, forward] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _kinds[kind, forward]


def _forward_4bit(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """x (…, in_features) → (…, out_features), in the layer's compute type."""
    compute = layer.compute_dtype or x.dtype
    cast = x.to(compute)
    bias = compute_bias(layer, compute)
    shape = (layer.out_features, layer.in_features)
    nested = layer.virtual_state.compress_statistics and in_force("nested_scales")
    return _Dequantized.apply(cast, layer.weight, bias, shape, False, nested).to(x.dtype)


def _forward_8bit(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """x (…, in_features) → (…, out_features) in 16 bits: x is quantized for the product."""
    half = x if x.dtype in (torch.float16, torch.bfloat16) else x.to(torch.float16)
    shape = (layer.out_features, layer.in_features)
    return _Dequantized.apply(half, layer.weight, layer.bias, shape, True, False).to(x.dtype)


class _Dequantized(torch.autograd.Function):
    """x · dequantize(W)ᵀ + b that saves only the quantized weight (bitsandbytes' MatMul4Bit and MatMul8bitLt)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, shape: tuple, int8: bool, nested: bool):
        ctx.shape, ctx.nested = shape, nested
        if int8:
            quantized, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)
            out = x.new_empty((*x.shape[:-1], shape[0]), dtype=torch.int32)
            del quantized, scales
            return out.to(x.dtype)
        return product(x, shape, bias, 2 * nested)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return product_backward(grad, ctx.shape, ctx.nested), None, None, None, None, None
