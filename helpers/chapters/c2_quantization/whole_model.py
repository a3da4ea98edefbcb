"""A whole model quantized: its weights alone, or its weights and what its layers are given."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...small_model import SmallLanguageModel, sentences
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


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    threshold: float | None = None,
    per_token: bool = True,
    per_channel: bool = True,
) -> torch.Tensor:
    """x (n, in) · weight (out, in)ᵀ in int8; a scale for each row of x (token) and of the weight (channel), or for all.

    With a threshold, the columns of x with outliers are multiplied as they are, by weights that are restored from their
    int8 codes: no weight is kept in 16 bits (bitsandbytes, `int8_mixed_scaled_mm`).
    """
    columns = outlier_columns(x, threshold) if threshold else torch.empty(0, dtype=torch.long)
    kept = torch.ones(x.shape[1], dtype=torch.bool)
    kept[columns] = False
    codes = quantize(weight, per_channel=per_channel)
    product = x[:, columns] @ codes.dequantize()[:, columns].T
    if not kept.any():
        return product
    rows = quantize(x[:, kept], per_channel=per_token)
    return product + (rows.codes.int() @ codes.codes[:, kept].int().T) * rows.scales[:, None] * codes.scales


class Int8Linear(nn.Module):
    """A linear layer that multiplies by `int8_linear`; `columns` counts those that the last product had in 16 bits."""

    def __init__(self, layer: nn.Linear, threshold: float | None, **setting: bool):
        super().__init__()
        self.weight, self.bias, self.threshold, self.setting = layer.weight, layer.bias, threshold, setting
        self.columns = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in) → (…, out)."""
        rows = x.flatten(0, -2)
        self.columns = len(outlier_columns(rows, self.threshold)) if self.threshold else 0
        product = int8_linear(rows, self.weight, self.threshold, **self.setting)
        return product.unflatten(0, x.shape[:-1]) + self.bias


@torch.no_grad()
def int8_model(model: nn.Module, threshold: float | None = None, **setting: bool) -> nn.Module:
    """A copy whose linear layers but the head multiply in int8, weights and inputs; `setting` as for `int8_linear`."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name not in HEAD:
            model.set_submodule(name, Int8Linear(module, threshold, **setting))
    return model


@torch.no_grad()
def smoothed(model: SmallLanguageModel, strength: float = 0.5) -> SmallLanguageModel:
    """A copy that computes the same function, its activations' outliers moved into the weights (SmoothQuant, eq. 4).

    Each channel is divided by s = max|x|^strength / max|w|^(1 − strength), the weights that read it are multiplied by
    it. Calibrated on the model's own sentences.
    """
    model, largest = copy.deepcopy(model), {}
    pairs = [pair for block in model.blocks for pair in block.readers]
    for norm, _ in pairs:
        norm.register_forward_hook(lambda norm, _, x: largest.update({norm: x.abs().amax((0, 1))}))
    model(sentences()[0])
    for norm, reader in pairs:
        norm._forward_hooks.clear()
        factor = largest[norm] ** strength / reader.weight.abs().amax(0) ** (1 - strength)
        norm.weight /= factor
        norm.bias /= factor
        reader.weight *= factor
    return model
