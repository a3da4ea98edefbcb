"""Number formats taken apart: any split into sign, exponent and mantissa, and the bits of a number in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

SIGN, EXPONENT, MANTISSA = svg.RED, svg.GREEN, svg.BLUE


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format: 1 sign bit, `exponent_bits`, `mantissa_bits` (IEEE 754's rules).

    finite_only: no infinities, and the largest pattern alone is nan (fp8 e4m3fn, OCP 8-bit floating point, 2023).
    saturates: what is beyond the range becomes the largest number (torch 2.13 for e4m3fn; older versions gave nan).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite_only: bool = False
    saturates: bool = False
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> NumberFormat:
        """The format of a torch dtype, read off `torch.finfo`: bits, and the mantissa's from the machine epsilon."""
        info = torch.finfo(dtype)
        mantissa = -round(math.log2(info.eps))
        beyond = torch.tensor(math.inf).to(dtype).double().item()
        return cls(name, info.bits - 1 - mantissa, mantissa, not math.isinf(beyond), beyond == info.max, dtype)

    @property
    def bits(self) -> int:
        """Bits that carry information (tf32's 19 are stored in 32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with the full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal one."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top = 2**self.exponent_bits - (1 if self.finite_only else 2)
        fraction = 2 - 2.0**-self.mantissa_bits * (2 if self.finite_only else 1)
        return math.ldexp(fraction, top - self.bias)

    def spacing(self, value: float) -> float:
        """The distance from |value| to the next larger number of the format."""
        exponent = max(math.frexp(value)[1] - 1, 1 - self.bias) if value else 1 - self.bias
        return math.ldexp(1.0, exponent - self.mantissa_bits)

    def encode(self, value: float) -> int:
        """The bit pattern of the nearest number, ties to even; beyond the range inf, or what `saturates` says."""
        sign = int(math.copysign(1.0, value) < 0) << (self.bits - 1)
        if math.isnan(value):
            return self._nan
        if not math.isinf(value):
            magnitude = abs(value)
            exponent = max(math.frexp(magnitude)[1] - 1, 1 - self.bias) if magnitude else 1 - self.bias
            # In units of the spacing there; exact, a division by a power of two. round() takes ties to even.
            steps = round(math.ldexp(magnitude, self.mantissa_bits - exponent))
            # A carry out of the mantissa lands in the exponent, where it belongs.
            pattern = ((exponent + self.bias - 1) << self.mantissa_bits) + steps
            if pattern <= self._largest_pattern:
                return sign | pattern
        if self.saturates:
            return sign | self._largest_pattern
        return sign | (self._nan if self.finite_only else self._infinity)

    def decode(self, pattern: int) -> float:
        """The number that a bit pattern stands for."""
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        magnitude = pattern & (2 ** (self.bits - 1) - 1)
        if magnitude > self._largest_pattern:
            return sign * math.inf if not self.finite_only and magnitude == self._infinity else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & (2**self.mantissa_bits - 1)
        if exponent:
            mantissa += 2**self.mantissa_bits
        return sign * math.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa_bits)

    def round(self, value: float) -> float:
        """What is left of `value` when it is stored in this format."""
        return self.decode(self.encode(value))

    def parts(self, value: float) -> tuple[str, str, str]:
        """Sign, exponent and mantissa of the stored number, as text of bits."""
        text = f"{self.encode(value):0{self.bits}b}"
        return text[0], text[1 : 1 + self.exponent_bits], text[1 + self.exponent_bits :]

    @property
    def _infinity(self) -> int:
        return (2**self.exponent_bits - 1) << self.mantissa_bits

    @property
    def _largest_pattern(self) -> int:
        return 2 ** (self.bits - 1) - 2 if self.finite_only else self._infinity - 1

    @property
    def _nan(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.finite_only else self._infinity | 1 << (self.mantissa_bits - 1)

    def _repr_svg_(self) -> str:
        return draw_layouts([self]).svg()


FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat.of("fp64", torch.float64),
        NumberFormat.of("fp32", torch.float32),
        # No dtype: tensor cores round fp32 to it (NVIDIA, A100 whitepaper, 2020).
        NumberFormat("tf32", 8, 10),
        NumberFormat.of("fp16", torch.float16),
        NumberFormat.of("bf16", torch.bfloat16),
        NumberFormat.of("fp8 e4m3", torch.float8_e4m3fn),
        NumberFormat.of("fp8 e5m2", torch.float8_e5m2),
    )
}


def parse_number(text: str) -> float:
    """A number as a reader types it: "0.1", "1e-8", "1/3", "2**-14", "inf", "nan"; ValueError where it is none."""
    cleaned = text.strip().replace(",", "").replace("_", "")
    try:
        if "**" in cleaned:
            base, exponent = cleaned.split("**")
            return float(base) ** float(exponent)
        return float(Fraction(cleaned)) if "/" in cleaned else float(cleaned)
    except (ValueError, OverflowError, ZeroDivisionError, TypeError):
        raise ValueError(
            tr(
                ko=f"{text!r}: 숫자로 읽을 수 없다. 0.1, 1e-8, 1/3, 2**-14, inf, nan처럼 쓴다.",
                en=f"{text!r} is not a number. Write 0.1, 1e-8, 1/3, 2**-14, inf or nan.",
            )
        ) from None


def stochastic_round_to_bf16(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """fp32 → bf16, up or down by chance so that the mean is kept: random bits below bf16's mantissa, added, then cut.

    x: fp32, any shape. As in stochastic rounding for bf16 training (Zamirai et al. 2020, arXiv 2010.06192).
    """
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=generator)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


class FormatTable:
    """The formats beside each other: bits, range, smallest numbers, machine epsilon."""

    def __init__(self, formats: list[NumberFormat] | None = None):
        self.formats = formats or list(FORMATS.values())

    def _repr_html_(self) -> str:
        from virtual_gpu.drawing.labels import html_table

        heads = [
            tr(ko="형식", en="format"),
            tr(ko="비트", en="bits"),
            tr(ko="지수", en="exponent"),
            tr(ko="가수", en="mantissa"),
            tr(ko="가장 큰 수", en="largest"),
            tr(ko="가장 작은 정규 수", en="smallest normal"),
            tr(ko="가장 작은 양수", en="smallest positive"),
            tr(ko="1 다음 수와의 간격", en="epsilon"),
        ]
        rows = [
            [f.name, str(f.bits), str(f.exponent_bits), str(f.mantissa_bits)]
            + [short(v) for v in (f.largest, f.smallest_normal, f.smallest, f.epsilon)]
            for f in self.formats
        ]
        info = torch.iinfo(torch.int8)
        rows.append(["int8", str(info.bits), "-", "-", str(info.max), "1", "1", "1"])
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(f"{f.name}: {f.exponent_bits}+{f.mantissa_bits}, {short(f.largest)}" for f in self.formats)


def short(value: float) -> str:
    """A number with at most five significant digits."""
    return f"{value:.5g}"


# -- drawings ------------------------------------------------------------------------------------------------------


def draw_layouts(formats: list[NumberFormat], title: str = "") -> svg.Drawing:
    """One row of boxes a format: sign, exponent, mantissa."""
    names = ", ".join(f"{f.name} 1+{f.exponent_bits}+{f.mantissa_bits}" for f in formats)
    top, row, cell = 30, 44, 15.0
    drawing = svg.Drawing(760, top + row * len(formats) + 34, names)
    for i, f in enumerate(formats):
        y = top + row * i
        drawing.text(86, y + 16, f.name, anchor="end", bold=True)
        _boxes(drawing, 100, y, cell, f, None)
        drawing.text(100 + cell * f.bits + 10, y + 16, f"1 + {f.exponent_bits} + {f.mantissa_bits}", 12, fill=svg.MUTED)
    _legend(drawing, top + row * len(formats) + 12)
    return drawing


def draw_number(value: float) -> svg.Drawing:
    """A number in every format: its bits, what is stored, and the error."""
    formats = list(FORMATS.values())
    top, row = 64, 46
    drawing = svg.Drawing(760, top + row * (len(formats) + 1) + 30, tr(ko=f"{value!r}의 비트", en=f"bits of {value!r}"))
    drawing.text(20, 30, f"{value!r}", size=18, bold=True)
    for i, f in enumerate(formats):
        y, stored = top + row * i, f.round(value)
        drawing.text(86, y + 16, f.name, anchor="end", bold=True)
        cell = min(9.5, 430 / f.bits)
        _boxes(drawing, 100, y, cell, f, value)
        drawing.text(750, y + 10, _shown(stored), 13, anchor="end", bold=True)
        drawing.text(750, y + 26, _error(value, stored), 11, anchor="end", fill=svg.MUTED)
    y = top + row * len(formats)
    drawing.text(86, y + 16, "int8", anchor="end", bold=True)
    stored, text = _int8(value)
    if stored is not None:
        for j, bit in enumerate(text):
            _box(drawing, 100 + j * 9.5, y, 9.5, svg.GREY, bit)
    drawing.text(750, y + 10, _shown(stored) if stored is not None else "-", 13, anchor="end", bold=True)
    drawing.text(750, y + 26, _error(value, stored), 11, anchor="end", fill=svg.MUTED)
    _legend(drawing, top + row * (len(formats) + 1) + 8)
    return drawing


def draw_spacing(formats: list[NumberFormat] | None = None) -> svg.Drawing:
    """The distance between neighbours over the whole range, both axes in powers of ten."""
    formats = formats or [FORMATS[name] for name in ("fp32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2")]
    left, top, width, height = 70, 40, 560, 320
    low_x, high_x, low_y, high_y = -46, 40, -46, 38
    alt = tr(ko="이웃한 두 수의 간격", en="distance between neighbours")
    drawing = svg.Drawing(760, top + height + 60, f"{alt}: {', '.join(f.name for f in formats)}")

    def x_of(power: float) -> float:
        return left + width * (power - low_x) / (high_x - low_x)

    def y_of(power: float) -> float:
        return top + height * (1 - (power - low_y) / (high_y - low_y))

    for power in range(-40, 41, 10):
        drawing.line(x_of(power), top, x_of(power), top + height, svg.GRID)
        drawing.text(x_of(power), top + height + 18, f"1e{power}", 11, "middle", svg.MUTED)
        if power <= high_y:
            drawing.line(left, y_of(power), left + width, y_of(power), svg.GRID)
            drawing.text(left - 6, y_of(power) + 4, f"1e{power}", 11, "end", svg.MUTED)
    drawing.text(left, top - 14, tr(ko="다음 수까지의 간격", en="distance to the next number"), 12, fill=svg.MUTED)
    drawing.text(left + width, top + height + 38, tr(ko="수의 크기", en="the number"), 12, "end", svg.MUTED)
    colors = (svg.INK, svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE)
    for i, (f, color) in enumerate(zip(formats, colors, strict=True)):
        knots = [f.smallest, f.smallest_normal, f.largest]
        points = [(x_of(math.log10(v)), y_of(math.log10(f.spacing(v)))) for v in knots]
        drawing.polyline(points, color, stroke_width=3)
        for x, y in (points[0], points[-1]):
            drawing.circle(x, y, 4, color)
        y = top + 20 + 26 * i
        drawing.line(left + width + 16, y - 4, left + width + 36, y - 4, color, stroke_width=3)
        drawing.text(left + width + 42, y, f.name, 13)
    return drawing


def _boxes(drawing: svg.Drawing, x: float, y: float, cell: float, f: NumberFormat, value: float | None) -> None:
    parts = f.parts(value) if value is not None else ("", "", "")
    sizes = (1, f.exponent_bits, f.mantissa_bits)
    for bits, size, color in zip(parts, sizes, (SIGN, EXPONENT, MANTISSA), strict=True):
        for j in range(size):
            _box(drawing, x, y, cell, color, bits[j] if bits else "")
            x += cell


def _box(drawing: svg.Drawing, x: float, y: float, cell: float, color: str, bit: str) -> None:
    filled = bit != "0"
    drawing.rect(x + 1, y, cell - 2, 22, color if filled else svg.PAPER, stroke=color, stroke_width=1)
    if bit and cell > 8:
        drawing.text(x + cell / 2, y + 15, bit, 10, "middle", svg.PAPER if filled else svg.INK)


def _legend(drawing: svg.Drawing, y: float) -> None:
    x = 100.0
    names = (
        (SIGN, tr(ko="부호", en="sign")),
        (EXPONENT, tr(ko="지수", en="exponent")),
        (MANTISSA, tr(ko="가수", en="mantissa")),
    )
    for color, name in names:
        drawing.rect(x, y, 11, 11, color)
        drawing.text(x + 16, y + 10, name, 12)
        x += 40 + svg.text_width(name, 12)


def _int8(value: float) -> tuple[int | None, str]:
    if not math.isfinite(value) or not -128 <= round(value) <= 127:
        return None, ""
    return round(value), f"{round(value) & 0xFF:08b}"


def _shown(value: float) -> str:
    return f"{value:.10g}"


def _error(value: float, stored: float | None) -> str:
    if stored is None:
        return tr(ko="담을 수 없다", en="cannot be stored")
    if math.isnan(value) or value == stored:
        return tr(ko="오차 없음", en="exact")
    if not math.isfinite(stored):
        return tr(ko="범위를 벗어났다", en="out of range")
    if stored == 0:
        return tr(ko="0이 되었다", en="became 0")
    relative = tr(ko="상대", en="relative")
    return f"{tr(ko='오차', en='error')} {stored - value:.3g} ({relative} {abs(stored - value) / abs(value):.2g})"


class ModelSizes:
    """Bundled architectures and what their weights weigh in each format; ✓ where a T4 holds them.

    8 and 4 bits are those of the linear layers: embeddings, norms and the output head stay in 16 (bitsandbytes).
    """

    BITS: ClassVar = {"fp32": 32, "fp16": 16, "int8": 8, "NF4": 4.127}  # NF4 with double quantization, QLoRA section 3

    def __init__(self, model_ids: tuple[str, ...]):
        from virtual_gpu.models.adapters import linear_layers
        from virtual_gpu.models.build import build_model, count_parameters
        from virtual_gpu.models.configs import load_config

        self.counts: dict[str, tuple[int, int]] = {}  # name → (all parameters, those of the linear layers' weights)
        for name in model_ids:
            model = build_model(load_config(name), torch.float16)
            linear = sum(layer.weight.numel() for layer in linear_layers(model).values())
            self.counts[name] = count_parameters(model), linear

    def nbytes(self, name: str, form: str) -> float:
        """Bytes of a model's weights in a format of `BITS`."""
        count, linear = self.counts[name]
        bits = self.BITS[form]
        return (linear * bits + (count - linear) * max(bits, 16)) / 8

    def _repr_html_(self) -> str:
        from virtual_gpu.cards import CATALOG
        from virtual_gpu.drawing.labels import html_table

        heads = [tr(ko="모델", en="model"), tr(ko="파라미터 수", en="parameters"), *self.BITS]
        capacity, rows = CATALOG["T4"].capacity_bytes, []
        for name, (count, _) in self.counts.items():
            sizes = [self.nbytes(name, form) for form in self.BITS]
            cells = (f"{size / 1e9:,.1f} GB {'✓' if size <= capacity else '✗'}" for size in sizes)
            rows.append([name.split("/")[-1], f"{count:,}", *cells])
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {count:,}" for name, (count, _) in self.counts.items())
