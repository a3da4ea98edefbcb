"""What bitsandbytes takes to multiply with a 4-bit weight, a 16-bit copy and its scales in fp32, and with int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .registry import Rule

BLOCK = 64  # weights that share an absmax (QLoRA, arXiv 2305.14314, section 3)
NESTED_BLOCK = 256  # absmax values that share a second-level absmax
OUTLIER = 6.0  # columns of an input that hold a larger number are multiplied in 16 bits (LLM.int8, arXiv 2208.07339)
PACKED_ROWS = 4  # up to so many rows every architecture multiplies with the packed weight
"""_GEMM_4BIT_CUSTOM_FLOOR_M. Above 1,536 rows none does; between, a table by architecture, shape and number of
multiprocessors decides (large weights from 32 to 512 rows on), which is not repeated: the copy is counted."""

PACKED_PRODUCT = Rule(
    name="gemm_4bit",
    what=f"up to {PACKED_ROWS} rows are multiplied with the packed 4-bit weight, without a dequantized copy in forward",
    source="gemm_4bit, _gemm_4bit_use_custom_cuda in bitsandbytes/backends/cuda/ops.py; before, MatMul4Bit.forward in "
    "bitsandbytes/autograd/_functions.py dequantized always",
    since="0.50",
    library="bitsandbytes",
)
NESTED_SCALES = Rule(
    name="nested_scales",
    what="scales that are quantized themselves are made fp32 first: in forward twice, without and with their mean",
    source="_dequant_linear_fallback in bitsandbytes/backends/cuda/ops.py, dequantize_4bit in functional.py",
    since="0.50",
    library="bitsandbytes",
)


def compute_bias(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    """The layer's bias, which from the first product on is held in the type that is multiplied in.

    Source: Linear4bit.forward in bitsandbytes/nn/modules.py.
    """
    if layer.bias is not None and layer.bias.dtype != dtype:
        layer.bias.data = layer.bias.data.to(dtype)
    return layer.bias


def product(x: torch.Tensor, shape: tuple[int, int], bias: torch.Tensor | None, scales: int) -> torch.Tensor:
    """x · Wᵀ + b, where a weight of this shape is dequantized; scales: how often it makes its scales fp32."""
    made = _fp32_scales(x, shape, scales)
    out = nn.functional.linear(x, x.new_empty(shape), bias)
    del made
    return out


def product_backward(grad: torch.Tensor, shape: tuple[int, int], scales: int) -> torch.Tensor:
    """The gradient of x: its scales are there until the weight is."""
    made = _fp32_scales(grad, shape, scales)
    weight = grad.new_empty(shape)
    del made
    return grad @ weight


def _fp32_scales(like: torch.Tensor, shape: tuple[int, int], times: int) -> list[torch.Tensor]:
    return [like.new_empty(-(-shape[0] * shape[1] // BLOCK), dtype=torch.float32) for _ in range(times)]


class Int8Product(torch.autograd.Function):
    """LLM.int8()'s product, where no column of the input is an outlier: which are hangs on values.

    Source: MatMul8bitLt in bitsandbytes/autograd/_functions.py and its operators in backends/cuda/ops.py, 0.50; an
    H100's LoRA on int8 (benchmarks/records, claims) asked for the same. The input is no saved tensor but an attribute
    of the node: it stays until the graph goes, also after a backward, and where checkpointing drops what is saved. Not
    where that is reentrant, whose first forward makes no graph.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: Any, threshold: float):
        rows = x.reshape(-1, x.shape[-1])
        ctx.weight, ctx.scales, ctx.shape = weight, scales, x.shape
        statistics, quantized = int8_rows(rows.to(torch.float16), threshold)
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


def int8_rows(rows: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
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
