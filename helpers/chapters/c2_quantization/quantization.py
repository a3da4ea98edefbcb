"""Quantization: numbers as small codes, and what that costs; for tensors of any shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.units import choose

from .checks import FIXED, check_bits, check_grouping, check_tensor
from .code_tables import E2M1, E2M1_LARGEST, E2M1_LARGEST_EXPONENT, nf4_table
from .pictures import draw_quantized

METHODS = ("type_range", "absmax", "zero_point", "quantile", *FIXED)
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
        "mxfp4": "MXFP4",
        "nvfp4": "NVFP4",
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
        if self.table is not None:
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

        What is the same for every tensor (the range of a type, the table of a format) is not stored with it.
        """
        per_group = {
            "type_range": 0,
            "zero_point": self.scale_bits + self.bits,
            "quantile": SCALE_BITS * 2**self.bits,
        }.get(self.method, self.scale_bits)
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
        "absmax" (symmetric), "zero_point" (asymmetric), "quantile", "nf4", "mxfp4", "nvfp4".
    bits: 2 to 8; by default 8, for the last three always 4.
    block_size: numbers that share a scale, counted along the flattened tensor; per_channel: each row (first
        dimension) is a group. With neither, the whole tensor is one; MXFP4 has blocks of 32, NVFP4 of 16.
    """
    method = choose(method, METHODS, tr(ko="양자화 방법", en="quantization method"))
    bits = check_bits(bits, method)
    numbers = check_tensor(tensor)
    size, grouping = check_grouping(numbers, method, block_size, per_channel)
    rows = _rows(numbers.reshape(-1), size)
    if method == "type_range":
        parts = _type_range(rows, bits, source or tensor.dtype)
    elif method == "quantile":
        parts = _quantile(rows, bits, numbers.numel())
    else:
        parts = _METHODS[method](rows, bits)
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


def _mxfp4(rows: torch.Tensor, bits: int) -> dict[str, Any]:
    """A scale is a power of two in 8 bits (E8M0): the largest number's, over that of the largest code (section 6.3)."""
    exponents = rows.abs().amax(1).frexp().exponent - 1 - E2M1_LARGEST_EXPONENT
    scales = torch.ones(len(rows), device=rows.device).ldexp(exponents.clamp(-127, 127))
    return {"codes": _e2m1(rows / scales[:, None]), "scales": scales, "table": torch.tensor(E2M1), "scale_bits": 8}


def _nvfp4(rows: torch.Tensor, bits: int) -> dict[str, Any]:
    """A scale is an E4M3 number, times one fp32 number for the whole tensor (NVIDIA's format for Blackwell, 2025)."""
    eight_bits, largest = torch.float8_e4m3fn, rows.abs().amax(1)
    whole = (largest.max() / E2M1_LARGEST / torch.finfo(eight_bits).max).clamp_min(_TINY)
    scales = (largest / E2M1_LARGEST / whole).to(eight_bits).float() * whole
    scaled = torch.where(scales[:, None] > 0, rows / scales[:, None], 0)
    scale_bits = 8 + SCALE_BITS / len(rows)
    return {"codes": _e2m1(scaled), "scales": scales, "table": torch.tensor(E2M1), "scale_bits": scale_bits}


def _e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """The code of the nearest number of E2M1, ties to the even code; what is beyond 6 becomes 6."""
    magnitudes = torch.tensor(E2M1[:8], device=scaled.device)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    below, above = (torch.bucketize(scaled.abs(), middles, right=right) for right in (False, True))
    return torch.where(below % 2 == 0, below, above) + 8 * scaled.signbit()


_METHODS = {"absmax": _absmax, "zero_point": _zero_point, "nf4": _nf4, "mxfp4": _mxfp4, "nvfp4": _nvfp4}


def _rows(flat: torch.Tensor, size: int) -> torch.Tensor:
    """(n,) → (groups, size), the last one filled up with zeros."""
    groups = -(-len(flat) // size)
    return torch.nn.functional.pad(flat, (0, groups * size - len(flat))).reshape(groups, size)


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
