"""bitsandbytes' layers on a virtual GPU: what they hold (4 and 8 bits), and what they allocate while they compute."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..rules.active import in_force
from ..rules.bitsandbytes import BLOCK, compute_bias, product, product_backward


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
    if state is None or name != "weight":
        return {}
    return vars(state) | ({"to": functools.partial(_to, module)} if hasattr(state, "tensors") else {})


def _to(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Params4bit.to`: what dequantizes the weight goes with it (FSDP2 moves weights alone)."""
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    if device is not None:
        layer.virtual_state.tensors[:] = [tensor.to(device) for tensor in layer.virtual_state.tensors]
    return torch.Tensor.to(layer.weight, *args, **kwargs)


def quantize(layer: nn.Module, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The quantized weight of a layer; the layer computes from it from now on.

    The whole weight is on the card for a moment, as when it is loaded, and what bitsandbytes takes to quantize it.
    """
    on_card = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    if kept_tensors(layer) == "8bit":
        again = torch.empty(weight.shape, dtype=torch.float16, device=device)  # it comes back from the CPU as fp16
        scales, values = _quantized(again, threshold=0.0)
        del on_card
        layer.virtual_state = SimpleNamespace(SCB=scales, CB=None)
        layer.__class__ = _virtual(layer, _forward_8bit)
        return values
    old = layer.weight
    packed, state = sys.modules["bitsandbytes"].functional.quantize_4bit(
        on_card, blocksize=BLOCK, compress_statistics=old.compress_statistics, quant_type=old.quant_type,
        quant_storage=old.quant_storage,
    )  # fmt: skip
    nested = [state.offset, state.state2.absmax, state.state2.code] if old.compress_statistics else []
    tensors = [state.absmax, *nested, state.code]
    layer.virtual_state = SimpleNamespace(
        quant_type=old.quant_type, compress_statistics=old.compress_statistics, blocksize=BLOCK,
        quant_storage=old.quant_storage, bnb_quantized=True, tensors=tensors,
        quant_state=SimpleNamespace(
            shape=weight.shape, dtype=weight.dtype, blocksize=BLOCK, quant_type=old.quant_type,
            as_dict=lambda packed=False: {str(number): tensor for number, tensor in enumerate(tensors)},
        ),
        module=layer,  # as Params4bit knows it: a model in 4 bits goes with the garbage collection, not before
    )  # fmt: skip
    layer.__class__ = _virtual(layer, _forward_4bit)
    return packed


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
    return _Dequantized.apply(cast, layer.weight, bias, shape, nested).to(x.dtype)


class _Dequantized(torch.autograd.Function):
    """x · dequantize(W)ᵀ + b that saves only the quantized weight (bitsandbytes' MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, shape: tuple, nested: bool):
        ctx.shape, ctx.nested = shape, nested
        return product(x, shape, bias, 2 * nested)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return product_backward(grad, ctx.shape, ctx.nested), None, None, None, None


def _forward_8bit(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """x (…, in_features) → (…, out_features) of its type (Linear8bitLt.forward in bitsandbytes/nn/modules.py)."""
    scales, threshold = layer.virtual_state.SCB, layer.state.threshold
    return _Int8.apply(x, layer.weight, scales, compute_bias(layer, x.dtype), threshold)


class _Int8(torch.autograd.Function):
    """LLM.int8()'s product, where no column of the input is an outlier: which are hangs on values.

    Source: MatMul8bitLt in bitsandbytes/autograd/_functions.py and its operators in backends/cuda/ops.py, 0.50; an
    H100's LoRA on int8 (benchmarks/records, claims) asked for the same. The input is no saved tensor but an attribute
    of the node: it stays until the graph goes, also after a backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: Any, threshold: float):
        rows = x.reshape(-1, x.shape[-1])
        ctx.weight, ctx.scales, ctx.shape = weight, scales, x.shape
        statistics, quantized = _quantized(rows.to(torch.float16), threshold)
        out = _scaled(rows.new_empty((len(rows), len(weight)), dtype=torch.int32), bias, x.dtype)
        del quantized, statistics
        if any(ctx.needs_input_grad[:2]):
            ctx.input = rows
        return out.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        grad, dtype = grad.reshape(-1, grad.shape[-1]).contiguous(), ctx.input.dtype
        weight = ctx.weight.to(dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(dtype), weight).view(ctx.shape), None, None, None, None


def _quantized(rows: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(a scale for each row, the rows in int8), by bitsandbytes::int8_vectorwise_quant."""
    statistics = torch.empty(len(rows), device=rows.device)
    quantized = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    if threshold > 0:
        outliers = rows.abs() >= threshold
        outliers.any()
        columns = torch.empty(0, dtype=torch.int64, device=rows.device)
        if len(rows) > 1:
            quantized[:, columns] = 0
    return statistics, quantized


def _scaled(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The int32 product as numbers, by bitsandbytes::int8_mm_dequant: in fp16 first."""
    out = torch.empty_like(product, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)
    return out.to(dtype)
