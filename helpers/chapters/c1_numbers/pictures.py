"""Chapter 1's pictures: bits as boxes, and how far apart a format's numbers are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

from ...charts import Chart
from ...hand import answer_to_hands, pressable
from .formats import FORMATS, NumberFormat

SIGN, EXPONENT, MANTISSA = svg.RED, svg.GREEN, svg.BLUE
COLORS = {
    "fp32": svg.INK,
    "bf16": svg.BLUE,
    "fp16": svg.ORANGE,
    "fp8 e4m3": svg.GREEN,
    "fp8 e5m2": svg.PURPLE,
    "fp4 e2m1": svg.RED,
}


def draw_layouts(*names: str) -> svg.Drawing:
    """One row of boxes a format: sign, exponent, mantissa. Without names all but fp64."""
    formats = [FORMATS[name] for name in names or list(FORMATS)[1:]]
    splits = ", ".join(f"{f.name} 1+{f.exponent_bits}+{f.mantissa_bits}" for f in formats)
    top, row, cell = 30, 44, 15.0
    drawing = svg.Drawing(760, top + row * len(formats) + 34, splits)
    for i, f in enumerate(formats):
        y = top + row * i
        drawing.text(86, y + 16, f.name, anchor="end", bold=True)
        _boxes(drawing, 100, y, cell, f, None)
        total = tr(ko=f"{f.bits}비트", en=f"{f.bits} bits")
        text = f"1 + {f.exponent_bits} + {f.mantissa_bits} = {total}"
        drawing.text(100 + cell * f.bits + 10, y + 16, text, 12, fill=svg.MUTED)
    _legend(drawing, top + row * len(formats) + 12)
    return drawing


def draw_number(value: float, to: str | None = None) -> svg.Drawing:
    """A number in every format: its bits, what is stored, and the error.

    to: the CSS class of a panel's field; a bit that is pressed writes there the number that it makes.
    """
    formats = list(FORMATS.values())
    top, row = 64, 46
    drawing = svg.Drawing(760, top + row * (len(formats) + 1) + 30, tr(ko=f"{value!r}의 비트", en=f"bits of {value!r}"))
    drawing.text(20, 30, f"{value!r}", size=18, bold=True)
    for i, f in enumerate(formats):
        y, stored = top + row * i, f.round(value)
        drawing.text(86, y + 16, f.name, anchor="end", bold=True)
        _boxes(drawing, 100, y, 430 / max(f.bits, 32), f, value, to)
        drawing.text(750, y + 10, _shown(stored), 13, anchor="end", bold=True)
        drawing.text(750, y + 26, _error(value, stored), 11, anchor="end", fill=svg.MUTED)
    y = top + row * len(formats)
    drawing.text(86, y + 16, "int8", anchor="end", bold=True)
    stored = _int8(value)
    if stored is not None:
        numbers = [_signed(stored & 0xFF ^ 1 << place) for place in range(7, -1, -1)]
        _bits(drawing, 100, y, 430 / 32, "int8", f"{stored & 0xFF:08b}", [svg.GREY] * 8, numbers, to)
    drawing.text(750, y + 10, _shown(stored) if stored is not None else "-", 13, anchor="end", bold=True)
    drawing.text(750, y + 26, _error(value, stored), 11, anchor="end", fill=svg.MUTED)
    y = top + row * (len(formats) + 1) + 8
    _legend(drawing, y)
    if to is not None:
        hint = tr(
            ko="비트를 누르면 뒤집힌다 (키보드: Tab, ← →, Enter)", en="Press a bit to flip it (keys: Tab, ← →, Enter)"
        )
        drawing.text(750, y + 10, hint, 12, anchor="end", fill=svg.MUTED)
        answer_to_hands(drawing)
    return drawing


def draw_spacing(names: Sequence[str] = (), powers: tuple[int, int] = (-46, 40)) -> Chart:
    """The distance between neighbours of each format, for numbers of 10**powers[0] to 10**powers[1].

    Both axes in powers of ten. The flat left end of a line is its subnormal numbers; a dot is where the format ends.
    """
    formats = [FORMATS[name] for name in names or ("fp32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2")]
    title = tr(ko="이웃한 두 수의 간격", en="The distance between neighbours")
    chart = Chart(title, ", ".join(f.name for f in formats), height=400)
    low, high = (10.0**power for power in powers)
    for f in formats:
        ends = [max(f.smallest, low), min(f.largest, high)]
        knots = sorted({*ends, min(max(f.smallest_normal, ends[0]), ends[1])})
        chart.ax.loglog(knots, [f.spacing(v) for v in knots], color=COLORS[f.name], linewidth=3, label=f.name)
        inside = [v for v in (f.smallest, f.largest) if v in ends]  # not where only the picture ends
        chart.ax.loglog(inside, [f.spacing(v) for v in inside], "o", color=COLORS[f.name])
    chart.ax.set(
        xlabel=tr(ko="수의 크기", en="the number"), ylabel=tr(ko="다음 수까지의 간격", en="to the next number")
    )
    chart.ax.legend(loc="upper left")
    return chart


def _boxes(
    drawing: svg.Drawing, x: float, y: float, cell: float, f: NumberFormat, value: float | None, to: str | None = None
) -> None:
    colors = [SIGN] + [EXPONENT] * f.exponent_bits + [MANTISSA] * f.mantissa_bits
    bits, numbers = " " * f.bits, []
    if value is not None:
        pattern = f.encode(value)
        bits, numbers = f"{pattern:0{f.bits}b}", [f.decode(pattern ^ 1 << place) for place in range(f.bits)][::-1]
    _bits(drawing, x, y, cell, f.name, bits, colors, numbers, to)


def _bits(
    drawing: svg.Drawing,
    x: float,
    y: float,
    cell: float,
    name: str,
    bits: str,
    colors: Sequence[str],
    numbers: Sequence[float],
    to: str | None,
) -> None:
    """A row of boxes; where there is a field `to`, each writes the number that its flipped bit makes."""
    if to is None:
        for j, (bit, color) in enumerate(zip(bits, colors, strict=True)):
            _box(drawing, x + j * cell, y, cell, color, bit.strip())
        return
    drawing.open("g", role="group", aria_label=tr(ko=f"{name}의 비트", en=f"bits of {name}"))
    for j, (bit, color, number) in enumerate(zip(bits, colors, numbers, strict=True)):
        part = tr(
            ko={SIGN: "부호", EXPONENT: "지수", MANTISSA: "가수"}.get(color, "비트"),
            en={SIGN: "sign", EXPONENT: "exponent", MANTISSA: "mantissa"}.get(color, "bit"),
        )
        told = f"{part} {bit} → {1 - int(bit)}: {_shown(number)}"
        drawing.open("g", **pressable(f"{name}-{j}", [to], [repr(float(number))], first=j == 0), aria_label=told)
        drawing.raw(f"<title>{told}</title>")
        _box(drawing, x + j * cell, y, cell, color, bit)
        drawing.close("g")
    drawing.close("g")


def _box(drawing: svg.Drawing, x: float, y: float, cell: float, color: str, bit: str) -> None:
    filled = bit != "0"
    drawing.rect(x + 1, y, cell - 2, 22, color if filled else svg.PAPER, stroke=color, stroke_width=1)
    if bit and cell > 8:
        drawing.text(x + cell / 2, y + 15, bit, 10, "middle", svg.ink_on(color) if filled else svg.INK)


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


def _int8(value: float) -> int | None:
    return round(value) if math.isfinite(value) and -128 <= round(value) <= 127 else None


def _signed(pattern: int) -> int:
    """Eight bits as a two's complement."""
    return pattern - 256 if pattern & 128 else pattern


def _shown(value: float) -> str:
    return f"{value:.10g}"


def _error(value: float, stored: float | None) -> str:
    if stored is None:
        return tr(ko="담을 수 없다", en="cannot be stored")
    if value == stored or (math.isnan(value) and math.isnan(stored)):
        return tr(ko="오차 없음", en="exact")
    if not math.isfinite(value):
        return tr(ko="담을 수 없다", en="cannot be stored")
    if not math.isfinite(stored):
        return tr(ko="범위를 벗어났다", en="out of range")
    if stored == 0:
        return tr(ko="0이 되었다", en="became 0")
    relative = tr(ko="상대", en="relative")
    return f"{tr(ko='오차', en='error')} {stored - value:.3g} ({relative} {abs(stored - value) / abs(value):.2g})"
