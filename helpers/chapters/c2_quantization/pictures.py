"""Chapter 2's pictures: a quantized tensor as a histogram with its codes, and numbers beside their codes."""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

from ...hand import answer_to_hands, draggable

LEFT, WIDTH = 24, 712
REACH, STEP = 32.0, 0.5  # of the axis on which an outlier is dragged


def draw_quantized(q: Any, outlier: float | None = None, to: str | None = None) -> svg.Drawing:
    """The numbers' histogram, what the codes stand for in up to three groups, and who uses the codes.

    outlier: one of the numbers, which is marked on an axis that stands still up to REACH.
    to: the CSS class of a panel's field; the mark that is dragged writes there.
    """
    shown = _shown_groups(q)
    drawing = svg.Drawing(760, 338 + 34 * len(shown), f"{q.title}: {q.verdict}")
    drawing.text(20, 30, q.title, size=16, bold=True)
    drawing.text(20, 52, q.verdict, size=svg.fit_size(q.verdict, 720, 13))
    low, high = _span(q.original) if outlier is None else _around(outlier)
    _histogram(drawing, q.original, low, high, top=84, height=100)
    if outlier is not None:
        _mark(drawing, outlier, low, high, to)
    drawing.text(LEFT, 78, tr(ko="값의 분포", en="the numbers"), size=11, fill=svg.MUTED)
    used = q.counts > 0
    y = 212
    for group, name in shown:
        levels, inside = q.levels(group), 0
        for level, is_used in zip(levels.tolist(), used.tolist(), strict=True):
            if low <= level <= high:
                inside += 1
                x = LEFT + WIDTH * (level - low) / (high - low)
                drawing.line(x, y, x, y + 10, svg.BLUE if is_used else svg.RED)
        beyond = len(levels) - inside
        text = name + (
            tr(ko=f" · 코드 {beyond}개는 그림 밖", en=f" · {beyond} codes off the picture") if beyond else ""
        )
        drawing.text(LEFT, y + 21, text, size=11, fill=svg.MUTED)
        y += 34
    _usage(drawing, q, top=y + 30, height=60)
    return drawing


def _shown_groups(q: Any) -> list[tuple[int, str]]:
    """(group, label): the only one, or those with the narrowest, the middle and the widest codes."""
    if q.groups == 1 or q.method == "type_range":
        return [(0, tr(ko="코드가 뜻하는 값", en="what the codes stand for"))]
    widths = (q.table[:, -1] - q.table[:, 0]) if q.table is not None and q.table.dim() == 2 else q.scales
    order = widths.argsort(stable=True).tolist()
    group = tr(ko="블록", en="block") if q.grouping == "block" else tr(ko="채널", en="channel")
    names = {
        0: tr(ko=f"가장 촘촘한 {group}의 코드", en=f"the {group} with the narrowest codes"),
        len(order) // 2: tr(ko=f"중간 {group}의 코드", en=f"a middle {group}"),
        len(order) - 1: tr(ko=f"가장 성긴 {group}의 코드", en=f"the {group} with the widest codes"),
    }
    return [(order[rank], name) for rank, name in sorted(names.items())]


def _span(numbers: torch.Tensor) -> tuple[float, float]:
    low, high = float(numbers.min()), float(numbers.max())
    margin = (high - low) * 0.02 or max(abs(low), 1.0) * 0.1
    return low - margin, high + margin


def _around(outlier: float) -> tuple[float, float]:
    reach = REACH if abs(outlier) <= REACH else abs(outlier) * 1.02
    return -reach, reach


def _mark(drawing: svg.Drawing, outlier: float, low: float, high: float, to: str | None) -> None:
    x, name = LEFT + WIDTH * (outlier - low) / (high - low), tr(ko="이상치", en="outlier")
    if to is not None:
        axis = (LEFT, WIDTH, low, high, STEP)
        drawing.open("g", **draggable("outlier", to, outlier, axis), aria_label=name)
    drawing.line(x, 112, x, 184, svg.RED, stroke_width=2)
    drawing.circle(x, 112, 11, svg.RED)
    drawing.path(f"M{x - 6:.2f} 112l5 -4v8zM{x + 6:.2f} 112l-5 -4v8z", svg.PAPER)
    if to is not None:
        drawing.close("g")
        answer_to_hands(drawing)
    words = f"{name} {outlier:g}"
    half = svg.text_width(words, 12) / 2
    middle = min(max(x, LEFT + half), LEFT + WIDTH - half)
    drawing.text(middle, 96, words, 12, "middle", svg.RED, bold=True, halo=True)


def _histogram(drawing: svg.Drawing, numbers: torch.Tensor, low: float, high: float, top: float, height: float) -> None:
    bins = 72
    places = ((numbers.double().reshape(-1) - low) / (high - low) * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins).tolist()
    for i, count in enumerate(counts):
        if count:
            tall = max(height * count / max(counts), 1.0)
            drawing.rect(LEFT + WIDTH * i / bins, top + height - tall, WIDTH / bins - 1, tall, svg.SKY)
    drawing.line(LEFT, top + height, LEFT + WIDTH, top + height, svg.MUTED)
    _value_ticks(drawing, low, high, top + height)


def _value_ticks(drawing: svg.Drawing, low: float, high: float, y: float) -> None:
    ends = [(float(f"{low:.3g}"), "start", LEFT), (float(f"{high:.3g}"), "end", LEFT + WIDTH)]
    for value, anchor, x in ends:
        drawing.text(x, y + 14, f"{value:g}", size=11, anchor=anchor, fill=svg.MUTED)
    zero = LEFT + WIDTH * (0 - low) / (high - low)
    if LEFT + 60 < zero < LEFT + WIDTH - 60:
        drawing.line(zero, y, zero, y + 4, svg.MUTED)
        drawing.text(zero, y + 14, "0", size=11, anchor="middle", fill=svg.MUTED)


def _usage(drawing: svg.Drawing, q: Any, top: float, height: float) -> None:
    counts = q.counts.tolist()
    label = tr(
        ko="코드마다 몇 개의 값이 쓰는가 (주황은 아무도 쓰지 않는 코드)", en="numbers using each code (orange: unused)"
    )
    drawing.text(LEFT, top - 8, label, size=11, fill=svg.MUTED)
    step = WIDTH / len(counts)
    for i, count in enumerate(counts):
        x, wide = LEFT + i * step, step - (1 if step > 4 else 0)
        if count:
            tall = max(height * count / max(counts), 1.0)
            drawing.rect(x, top + height - tall, wide, tall, svg.BLUE)
        else:
            drawing.rect(x, top + height, wide, 7, svg.RED)
    drawing.line(LEFT, top + height, LEFT + WIDTH, top + height, svg.MUTED)
    y = top + height + 20
    drawing.text(LEFT, y, str(q.first_code), size=11, fill=svg.MUTED)
    drawing.text(LEFT + WIDTH, y, str(q.first_code + len(counts) - 1), size=11, anchor="end", fill=svg.MUTED)


def draw_mappings(parts: list[tuple[str, float, Any]]) -> svg.Drawing:
    """(label, largest, quantized): the numbers on a line from -largest to largest, and the codes they become.

    Codes beyond the outermost number's are marked: nobody reaches them.
    """
    tall, size = 176, 14
    drawing = svg.Drawing(760, tall * len(parts) + 8, "; ".join(f"{label}: {_unreached(q)}" for label, _, q in parts))
    for i, (label, largest, q) in enumerate(parts):
        top = i * tall
        drawing.text(20, top + 28, label, size=size, bold=True)
        _mapping(drawing, top + 66, largest, q)
        drawing.text(20, top + 172, _unreached(q), size=12, fill=svg.RED)
    return drawing


def _ends(q: Any) -> tuple[int, int]:
    """The codes that nobody reaches below the lowest number's code and above the highest's."""
    last = q.first_code + 2**q.bits - 1
    return int(q.codes.min()) - q.first_code, last - int(q.codes.max())


def _unreached(q: Any) -> str:
    below, above = _ends(q)
    return tr(
        ko=f"코드 {2**q.bits}개 가운데 {below + above}개에는 닿지 못한다 (아래 {below}개, 위 {above}개)",
        en=f"{below + above} of {2**q.bits} codes are out of reach ({below} below, {above} above)",
    )


def _mapping(drawing: svg.Drawing, top: float, largest: float, q: Any) -> None:
    left, width, lower = 60, 640, top + 62
    low_code, codes = q.first_code, 2**q.bits

    def x_of_code(code: float) -> float:
        return left + width * (code - low_code + 0.5) / codes

    # 0 stands above code 0, and the largest number above the largest code.
    scale = (x_of_code(codes + low_code - 1) - x_of_code(0)) / largest
    below, above = _ends(q)
    drawing.rect(left, lower - 7, width, 14, "#e8f1f8")
    drawing.rect(left, lower - 7, width * below / codes, 14, svg.RED, opacity=0.45)
    drawing.rect(left + width * (codes - above) / codes, lower - 7, width * above / codes, 14, svg.RED, opacity=0.45)
    ends = [x_of_code(0) + sign * largest * scale for sign in (-1, 1)]
    drawing.line(ends[0], top, ends[1], top, svg.MUTED, stroke_width=2)
    for number, code in zip(q.original.reshape(-1).tolist(), q.codes.reshape(-1).tolist(), strict=True):
        x = x_of_code(0) + number * scale
        drawing.line(x, top, x_of_code(code), lower, svg.BLUE, stroke_opacity=0.6)
        drawing.circle(x, top, 3, svg.BLUE)
        drawing.circle(x_of_code(code), lower, 3, svg.INK)
    drawing.text(ends[0], top - 10, f"{-largest:.3g}", size=11, anchor="middle", fill=svg.MUTED)
    drawing.text(ends[1], top - 10, f"{largest:.3g}", size=11, anchor="middle", fill=svg.MUTED)
    drawing.text(left, lower + 22, str(low_code), size=11, anchor="middle", fill=svg.MUTED)
    drawing.text(left + width, lower + 22, str(low_code + codes - 1), size=11, anchor="middle", fill=svg.MUTED)
    drawing.text(x_of_code(0), lower + 22, "0", size=11, anchor="middle", fill=svg.MUTED)


def draw_codes(*parts: Any) -> svg.Drawing:
    """A few numbers in a row under each quantization: what they become, and how far off. Blocks stand apart."""
    tall = 152
    drawing = svg.Drawing(760, tall * len(parts) + 12, "; ".join(map(repr, parts)))
    for i, q in enumerate(parts):
        top = i * tall
        scales = ", ".join(f"{scale:.3g}" for scale in q.scales.tolist())
        head = f"{q.title} · " + tr(ko=f"스케일 {scales}", en=f"scales {scales}")
        drawing.text(20, top + 28, head, size=svg.fit_size(head, 720, 14), bold=True)
        numbers, codes, restored = (t.reshape(-1).tolist() for t in (q.original, q.codes, q.dequantize()))
        names = [
            (tr(ko="값", en="number"), [f"{n:g}" for n in numbers]),
            (tr(ko="코드", en="code"), [str(c) for c in codes]),
            (tr(ko="되돌린 값", en="restored"), [f"{r:.2f}" for r in restored]),
        ]
        cell = 590 / len(numbers)
        for row, (name, texts) in enumerate(names):
            y = top + 44 + row * 32
            drawing.text(20, y + 20, name, size=12, fill=svg.MUTED)
            for column, text in enumerate(texts):
                gap = 8 * (column // q.size)
                lost = row == 2 and numbers[column] != 0 and codes[column] == 0
                fill = "#fbe3d3" if lost else ("#e8f1f8" if row == 1 else "#f4f6f8")
                x = 92 + column * cell + gap
                drawing.rect(x, y, cell - 3, 28, fill)
                color = svg.RED if lost else svg.INK
                drawing.text(x + cell / 2 - 1, y + 19, text, size=13, anchor="middle", fill=color, bold=row == 1)
    return drawing
