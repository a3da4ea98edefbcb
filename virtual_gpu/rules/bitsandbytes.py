"""What bitsandbytes takes to multiply with a 4-bit weight: a 16-bit copy of it, and its scales in fp32."""

from __future__ import annotations

import torch
from torch import nn

from .registry import Rule

BLOCK = 64  # weights that share an absmax (QLoRA, arXiv 2305.14314, section 3)
NESTED_BLOCK = 256  # absmax values that share a second-level absmax
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
