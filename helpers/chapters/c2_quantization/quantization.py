"""Quantization: numbers as small codes, and what that costs. The chapter's quantizers, for tensors of any shape."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch import nn

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.units import choose

from .pictures import draw_quantized

METHODS = ("type_range", "absmax", "zero_point", "quantile", "nf4")
SCALE_BITS = 32  # a scale, and a value of a table that the data decide, is stored as fp32
_TINY, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def method_label(method: str) -> str:
    """The method in the reader's language."""
    return {
        "type_range": tr(ko="자료형의 범위", en="type range"),
        "absmax": tr(ko="절댓값 최대", en="absmax"),
        "zero_point": tr(ko="영점", en="zero-point"),
        "quantile": tr(ko="분위수", en="quantile"),
        "nf4": "NF4",
    }[method]


@dataclass(frozen=True, repr=False)
class Quantized:
    """A quantized tensor. codes: integers of the tensor's shape; the rest says what a code stands for in each group.

    A group is a block, a row (channel) or the whole tensor: `size` numbers, the last one maybe fewer.
    scales (groups), zeros (groups) or None, table: (codes,) shared, (groups, codes) from the data, or None.
    """

    original: torch.Tensor  # fp32
    codes: torch.Tensor
    method: str
    bits: int
    size: int
    grouping: str  # "tensor", "channel" or "block"
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    scale_bits: float = SCALE_BITS

    @property
    def groups(self) -> int:
        return -(-self.codes.numel() // self.size)

    @property
    def first_code(self) -> int:
        """The lowest code that the bits can hold: -128 or 0."""
        return -(2 ** (self.bits - 1)) if self.method in ("type_range", "absmax") else 0

    def levels(self, group: int = 0) -> torch.Tensor:
        """What each code stands for in a group, from the first code to the last."""
        codes = torch.arange(self.first_code, self.first_code + 2**self.bits)
        return self._values(codes.repeat(self.groups, 1))[group]

    def dequantize(self) -> torch.Tensor:
        """The numbers that the codes stand for, in fp32."""
        rows = _rows(self.codes.reshape(-1), self.size)
        return self._values(rows).reshape(-1)[: self.codes.numel()].reshape(self.codes.shape)

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        """codes (groups, any) → values."""
        codes, scales = codes.long(), self.scales[:, None]
        if self.method == "quantile":
            return self.table.gather(1, codes)
        if self.method == "nf4":
            return self.table[codes] * scales
        zeros = 0 if self.zeros is None else self.zeros[:, None]
        return ((codes - zeros) * scales.double()).clamp(-_LARGEST, _LARGEST).float()

    @property
    def counts(self) -> torch.Tensor:
        """How many numbers have each code, from the first code to the last."""
        return torch.bincount(self.codes.reshape(-1).long() - self.first_code, minlength=2**self.bits)

    @property
    def wasted_codes(self) -> int:
        """Codes that not one number has."""
        return int((self.counts == 0).sum())

    @property
    def relative_error(self) -> float:
        """The length of the error beside the length of the tensor: 0 is perfect."""
        length = self.original.double().norm()
        return float((self.dequantize().double() - self.original.double()).norm() / length) if length else 0.0

    @property
    def largest_error(self) -> float:
        return float((self.dequantize() - self.original).abs().max())

    @property
    def bits_per_parameter(self) -> float:
        """All in: the codes, and the scales, zero points and tables that follow from the data.

        What is the same for every tensor (the range of a type, the table of NF4) is not stored with it.
        """
        per_group = {
            "type_range": 0,
            "absmax": self.scale_bits,
            "zero_point": self.scale_bits + self.bits,
            "quantile": SCALE_BITS * 2**self.bits,
            "nf4": self.scale_bits,
        }[self.method]
        return self.bits + per_group * self.groups / self.codes.numel()

    @property
    def title(self) -> str:
        grouping = {
            "tensor": tr(ko="텐서 전체", en="whole tensor"),
            "channel": tr(ko=f"채널(행)마다 {self.size}개", en=f"a channel (row) of {self.size}"),
            "block": tr(ko=f"블록 {self.size}", en=f"blocks of {self.size}"),
        }[self.grouping]
        return tr(
            ko=f"{method_label(self.method)} · {self.bits}비트 · {grouping}",
            en=f"{method_label(self.method)} · {self.bits} bits · {grouping}",
        )

    @property
    def verdict(self) -> str:
        wasted, codes, error = self.wasted_codes, 2**self.bits, f"{self.relative_error:.2%}"
        return tr(
            ko=f"낭비된 코드 {wasted}/{codes}개, 상대 오차 {error}, 파라미터당 {self.bits_per_parameter:.2f}비트",
            en=f"{wasted} of {codes} codes wasted, relative error {error}, {self.bits_per_parameter:.2f} bits each",
        )

    def __repr__(self) -> str:
        return f"{self.title}: {self.verdict}"

    def draw(self) -> svg.Drawing:
        """The histogram with the codes on it."""
        return draw_quantized(self)

    def _repr_svg_(self) -> str:
        return self.draw().svg()


def quantize(
    tensor: torch.Tensor,
    method: str = "absmax",
    bits: int | None = None,
    block_size: int | None = None,
    per_channel: bool = False,
    source: torch.dtype | None = None,
) -> Quantized:
    """Quantize a real tensor of any shape; ValueError says what cannot be.

    method: "type_range" (the range of `source`, by default the tensor's own type, onto the range of the codes),
        "absmax" (symmetric), "zero_point" (asymmetric), "quantile", "nf4".
    bits: 2 to 8; by default 8, for NF4 always 4.
    block_size: numbers that share a scale, counted along the flattened tensor; per_channel: each row (first
        dimension) is a group. With neither, the whole tensor is one.
    """
    method = choose(method, METHODS, tr(ko="양자화 방법", en="quantization method"))
    bits = _check_bits(bits, method)
    numbers = _check_tensor(tensor)
    size, grouping = _check_grouping(numbers, block_size, per_channel)
    rows = _rows(numbers.reshape(-1), size)
    if method == "type_range":
        parts = _type_range(rows, bits, source or tensor.dtype)
    elif method == "quantile":
        parts = _quantile(rows, bits, numbers.numel())
    else:
        parts = {"absmax": _absmax, "zero_point": _zero_point, "nf4": _nf4}[method](rows, bits)
    codes = parts.pop("codes").reshape(-1)[: numbers.numel()].reshape(numbers.shape).to(torch.int16)
    return Quantized(numbers, codes, method, bits, size, grouping, **parts)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """The numbers that the codes stand for."""
    return quantized.dequantize()


# ---- the methods: rows (groups, size) → codes, scales, … ------------------------------------------------------------


def _uniform(rows: torch.Tensor, scales: torch.Tensor, bits: int, zeros: torch.Tensor | None = None) -> dict[str, Any]:
    """Codes at equal steps. In fp64, so that no rounding but the one to a code happens; a scale is stored as fp32."""
    scales = scales.float().clamp_min(_TINY)
    codes = (rows.double() / scales.double()[:, None]).round()
    if zeros is None:
        codes = codes.clamp(-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)
    else:
        codes = (codes + zeros[:, None]).clamp(0, 2**bits - 1)
    return {"codes": codes, "scales": scales, "zeros": zeros}


def _type_range(rows: torch.Tensor, bits: int, source: torch.dtype) -> dict[str, Any]:
    if not source.is_floating_point:
        raise ValueError(tr(ko=f"source={source}: 실수 자료형이어야 한다.", en=f"source={source}: not a float type."))
    largest = min(torch.finfo(source).max, torch.finfo(torch.float32).max)
    if rows.abs().max() > largest:
        raise ValueError(
            tr(ko=f"{source}의 범위(±{largest:g})를 넘는 값이 있다.", en=f"values beyond {source} (±{largest:g}).")
        )
    return _uniform(rows, torch.full((len(rows),), largest / (2 ** (bits - 1) - 1), device=rows.device), bits)


def _absmax(rows: torch.Tensor, bits: int) -> dict[str, Any]:
    return _uniform(rows, rows.double().abs().amax(1) / (2 ** (bits - 1) - 1), bits)


def _zero_point(rows: torch.Tensor, bits: int) -> dict[str, Any]:
    # The range always holds 0, so that 0 stays 0.
    low, high = rows.double().amin(1).clamp_max(0), rows.double().amax(1).clamp_min(0)
    scales = ((high - low) / (2**bits - 1)).float().clamp_min(_TINY)
    return _uniform(rows, scales, bits, zeros=(-low / scales.double()).round())


def _nf4(rows: torch.Tensor, bits: int) -> dict[str, Any]:
    # x · (1 / absmax) rather than x / absmax, and in fp32: bit by bit what bitsandbytes does.
    scales = rows.abs().amax(1)
    table = torch.tensor(nf4_table(), device=rows.device)
    scaled = (rows * (1 / scales.clamp_min(_TINY))[:, None]).clamp(-1, 1)
    return {"codes": torch.bucketize(scaled, (table[:-1] + table[1:]) / 2), "scales": scales, "table": table}


def _quantile(rows: torch.Tensor, bits: int, count: int) -> dict[str, Any]:
    """Each code stands for the mean of an equal share of its group's numbers."""
    groups, size = rows.shape
    tail = count - (groups - 1) * size
    parts = [_quantile_rows(rows[:-1], bits)] if groups > 1 else []
    codes, table = _quantile_rows(rows[-1:, :tail], bits)
    parts.append((torch.nn.functional.pad(codes, (0, size - tail)), table))
    return {
        "codes": torch.cat([codes for codes, _ in parts]),
        "table": torch.cat([table for _, table in parts]),
        "scales": torch.ones(groups, device=rows.device),
    }


def _quantile_rows(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups, size = rows.shape
    number = 2**bits
    ranks = -(-torch.arange(1, number, device=rows.device) * size // number)  # where each share but the first begins
    edges = rows.sort(1).values[:, ranks.clamp_max(size - 1)].contiguous()
    codes = torch.searchsorted(edges, rows.contiguous(), right=True)
    sums = torch.zeros(groups, number, dtype=torch.double, device=rows.device).scatter_add_(1, codes, rows.double())
    members = torch.zeros_like(sums).scatter_add_(1, codes, torch.ones_like(sums[:, :1]).expand(groups, size))
    empty = torch.cat([rows.amin(1, keepdim=True), edges], 1)  # a code that nobody has stands for its lower edge
    return codes, torch.where(members > 0, sums / members.clamp_min(1), empty.double()).float()


@cache
def nf4_table() -> tuple[float, ...]:
    """The 16 values of NF4, from the normal distribution's quantiles (QLoRA, arXiv 2305.14314, appendix E).

    8 quantiles above 0 and 7 below, evenly spaced in probability, and 0 itself; all divided by the largest. The
    outermost is at the probability 0.9677083, halfway between the
    middle of the last of 16 shares and that of the last of 15.
    """
    offset = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    below = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    return tuple(value / above[0] for value in sorted([*above, 0.0, *below]))


def load_bitsandbytes() -> Any:
    """The module bitsandbytes, without its warning of optional CPU kernels that the course does not use."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    return importlib.import_module("bitsandbytes")


# ---- scales of scales, outlier columns ------------------------------------------------------------------------------


def double_quantize(quantized: Quantized, block_size: int = 256) -> Quantized:
    """The same codes with scales that are 8-bit codes themselves, in blocks (QLoRA, section 3). Their mean is kept."""
    if quantized.method not in ("absmax", "nf4"):
        raise ValueError(
            tr(
                ko=f"{method_label(quantized.method)}에는 다시 양자화할 스케일이 없다. absmax나 nf4를 쓴다.",
                en=f"{quantized.method} has no scales to quantize again: use absmax or nf4.",
            )
        )
    mean = quantized.scales.double().mean().float()
    small = quantize(quantized.scales - mean, "absmax", bits=8, block_size=min(block_size, quantized.groups))
    scales = (small.dequantize() + mean).clamp_min(_TINY)
    bits = small.bits_per_parameter + SCALE_BITS / quantized.groups
    return replace(quantized, scales=scales, scale_bits=bits)


def outlier_columns(x: torch.Tensor, threshold: float = 6.0) -> torch.Tensor:
    """The columns (features) of x (…, features) that hold a number of at least `threshold` (LLM.int8, 2208.07339)."""
    return (x.abs() >= threshold).reshape(-1, x.shape[-1]).any(0).nonzero().flatten()


def int8_linear(x: torch.Tensor, weight: torch.Tensor, threshold: float | None = None) -> torch.Tensor:
    """x (n, in) · weight (out, in)ᵀ in int8, a scale for each row of both; with a threshold, outlier columns apart."""
    columns = outlier_columns(x, threshold) if threshold else torch.empty(0, dtype=torch.long)
    kept = torch.ones(x.shape[1], dtype=torch.bool)
    kept[columns] = False
    if not kept.any():
        return x @ weight.T
    rows, cols = (quantize(part[:, kept], per_channel=True) for part in (x, weight))
    product = (rows.codes.int() @ cols.codes.int().T) * rows.scales[:, None] * cols.scales
    return product + x[:, columns] @ weight[:, columns].T


# ---- a whole model -------------------------------------------------------------------------------------------------


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
def quantize_model(model: nn.Module, skip: tuple[str, ...] = ("head",), **setting: Any) -> QuantizedModel:
    """Quantize the weights of a model's linear layers, but for those named in `skip`; `setting` as for `quantize`."""
    model, weights = copy.deepcopy(model), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in skip:
            weights[name] = quantize(module.weight, **setting)
            module.weight.copy_(weights[name].dequantize())
    return QuantizedModel(model, weights)


# ---- example tensors ------------------------------------------------------------------------------------------------


def _normal(*shape: int, seed: int) -> torch.Tensor:
    # In fp64, whose random numbers do not depend on the CPU's vector instructions.
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _heavy(count: int, seed: int) -> torch.Tensor:
    """Student's t with 3 degrees of freedom."""
    return _normal(count, seed=seed) / _normal(count, 3, seed=seed + 1).square().mean(1).sqrt()


def _outliers(count: int, seed: int) -> torch.Tensor:
    values = _normal(count, seed=seed)
    values[count // 7 :: max(count // 4, 1)] *= 20
    return values


NINE_NUMBERS = (0.6, -1.1, 0.3, 1.4, -0.8, 0.5, -0.2, 9.0, 0.9)  # one outlier


def book_numbers(count: int = 24) -> torch.Tensor:
    """Numbers whose smallest is -17 and whose largest is 15, as in the book's example."""
    numbers = _normal(count, seed=1).sort().values
    return torch.where(numbers < 0, numbers * 17 / -numbers[0], numbers * 15 / numbers[-1]).float()


DISTRIBUTIONS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda count, seed: _normal(count, seed=seed),
    "heavy_tailed": _heavy,
    "outliers": _outliers,
    "one_sided": lambda count, seed: _normal(count, seed=seed).clamp_min(0),
}


def example_tensor(distribution: str = "normal", count: int = 4096, seed: int = 0) -> torch.Tensor:
    """Numbers to quantize, the same on every machine: normal, heavy_tailed, outliers, one_sided (normal after ReLU)."""
    return DISTRIBUTIONS[choose(distribution, DISTRIBUTIONS, tr(ko="분포", en="distribution"))](count, seed).float()


# ---- what is refused ------------------------------------------------------------------------------------------------


def _check_bits(bits: Any, method: str) -> int:
    if bits is None:
        return 4 if method == "nf4" else 8
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(
            tr(ko=f"bits={bits!r}: 2부터 8까지의 정수여야 한다.", en=f"bits={bits!r}: an integer of 2 to 8.")
        )
    if method == "nf4" and bits != 4:
        raise ValueError(tr(ko=f"bits={bits}: NF4는 4비트 형식이다.", en=f"bits={bits}: NF4 has 4 bits."))
    return bits


def _check_tensor(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise ValueError(tr(ko=f"torch 텐서가 아니라 {kind}이다.", en=f"{kind} is not a torch tensor."))
    if not tensor.dtype.is_floating_point:
        raise ValueError(
            tr(
                ko=f"{tensor.dtype} 텐서는 양자화할 수 없다. 실수(부동소수점) 텐서여야 한다.",
                en=f"a {tensor.dtype} tensor cannot be quantized: it must be of a floating-point type.",
            )
        )
    if tensor.numel() == 0:
        raise ValueError(tr(ko="빈 텐서라서 양자화할 값이 없다.", en="the tensor is empty: nothing to quantize."))
    numbers = tensor.detach().to(torch.float32, copy=True)
    if bad := int((~numbers.isfinite()).sum()):
        raise ValueError(
            tr(
                ko=f"nan이나 inf(fp32의 범위를 넘는 값 포함)가 {bad}개 있다. 양자화하기 전에 없앤다.",
                en=f"{bad} values are nan or inf (or beyond fp32): remove them first.",
            )
        )
    return numbers


def _check_grouping(numbers: torch.Tensor, block_size: Any, per_channel: bool) -> tuple[int, str]:
    if per_channel:
        if block_size is not None:
            raise ValueError(
                tr(
                    ko="block_size와 per_channel은 함께 쓸 수 없다.",
                    en="choose block_size or per_channel, not both.",
                )
            )
        if numbers.dim() < 2:
            raise ValueError(tr(ko="채널별 양자화에는 2차원 이상의 텐서가 필요하다.", en="channels need 2 dimensions."))
        return numbers.numel() // len(numbers), "channel"
    if block_size is None:
        return numbers.numel(), "tensor"
    count = numbers.numel()
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= count:
        raise ValueError(
            tr(
                ko=f"block_size={block_size!r}: 1부터 텐서의 원소 수 {count:,}까지의 정수여야 한다.",
                en=f"block_size={block_size!r}: an integer of 1 to the tensor's {count:,} elements.",
            )
        )
    return block_size, "block"


def _rows(flat: torch.Tensor, size: int) -> torch.Tensor:
    """(n,) → (groups, size), the last one filled up with zeros."""
    groups = -(-len(flat) // size)
    return torch.nn.functional.pad(flat, (0, groups * size - len(flat))).reshape(groups, size)
