"""A whole model quantized: its weights alone, or its weights and what its layers are given."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .quantization import Quantized, double_quantize, quantize

HEAD = ("head",)  # stays as it is, as in QLoRA and LLM.int8


@dataclass(frozen=True)
class QuantizedModel:
    """A copy of a model that computes with restored weights, and the quantized ones by name."""

    model: nn.Module
    weights: dict[str, Quantized]

    @property
    def bits_per_parameter(self) -> float:
        """Over the quantized weights, all in."""
        sizes = [q.codes.numel() for q in self.weights.values()]
        bits = [q.bits_per_parameter for q in self.weights.values()]
        return sum(n * b for n, b in zip(sizes, bits, strict=True)) / sum(sizes)

    @property
    def relative_error(self) -> float:
        """Over the quantized weights: the length of the error beside the length of the weights."""
        originals = torch.cat([q.original.reshape(-1).double() for q in self.weights.values()])
        restored = torch.cat([q.dequantize().reshape(-1).double() for q in self.weights.values()])
        return float((restored - originals).norm() / originals.norm())


@torch.no_grad()
def quantize_model(model: nn.Module, double: bool = False, **setting: Any) -> QuantizedModel:
    """Quantize the weights of the linear layers but the head; `setting` as for `quantize`, `double`: the scales too."""
    model, weights = copy.deepcopy(model), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in HEAD:
            quantized = quantize(module.weight, **setting)
            weights[name] = double_quantize(quantized) if double else quantized
            module.weight.copy_(weights[name].dequantize())
    return QuantizedModel(model, weights)


# ---- LLM.int8: both sides of a product in int8 ---------------------------------------------------------------------


def outlier_columns(x: torch.Tensor, threshold: float = 6.0) -> torch.Tensor:
    """The columns (features) of x (…, features) that hold a number of at least `threshold` (LLM.int8, 2208.07339)."""
    return (x.abs() >= threshold).reshape(-1, x.shape[-1]).any(0).nonzero().flatten()


def int8_linear(x: torch.Tensor, weight: torch.Tensor, threshold: float | None = None) -> torch.Tensor:
    """x (n, in) · weight (out, in)ᵀ in int8, a scale for each row of both.

    With a threshold, the columns of x with outliers are multiplied as they are, by weights that are restored from their
    int8 codes: no weight is kept in 16 bits (bitsandbytes, `int8_mixed_scaled_mm`).
    """
    columns = outlier_columns(x, threshold) if threshold else torch.empty(0, dtype=torch.long)
    kept = torch.ones(x.shape[1], dtype=torch.bool)
    kept[columns] = False
    codes = quantize(weight, per_channel=True)
    product = x[:, columns] @ codes.dequantize()[:, columns].T
    if not kept.any():
        return product
    rows = quantize(x[:, kept], per_channel=True)
    return product + (rows.codes.int() @ codes.codes[:, kept].int().T) * rows.scales[:, None] * codes.scales


class Int8Linear(nn.Module):
    """A linear layer that multiplies by `int8_linear`."""

    def __init__(self, layer: nn.Linear, threshold: float | None):
        super().__init__()
        self.weight, self.bias, self.threshold = layer.weight, layer.bias, threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in) → (…, out)."""
        product = int8_linear(x.flatten(0, -2), self.weight, self.threshold)
        return product.unflatten(0, x.shape[:-1]) + self.bias


@torch.no_grad()
def int8_model(model: nn.Module, threshold: float | None = None) -> nn.Module:
    """A copy whose linear layers but the head multiply in int8, weights and inputs."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name not in HEAD:
            model.set_submodule(name, Int8Linear(module, threshold))
    return model
