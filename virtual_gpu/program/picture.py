"""A run as one picture: the program, the command, what the memory was filled with, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..drawing import svg
from ..language import tr
from ..units import human_bytes
from . import words
from .html import COLORS, heights
from .report import FITS, Report
from .watch import CATEGORIES

_MONO = "ui-monospace,'D2Coding','Noto Sans Mono',monospace"
_WIDTH, _LINE, _CHART, _COLUMNS = 760, 17, 190, 240


def draw_run(report: Report, command: Sequence[str]) -> svg.Drawing:
    """The program's text, the command that ran it, the stacked curve under the card's line, the verdict and advice."""
    source = Path(report.program).read_text(encoding="utf-8").split('"""\n')[-1].strip().splitlines()
    words_of = [report.verdict, *report.which_card, *report.advice]
    top = 54 + _LINE * len(source)
    drawing = svg.Drawing(_WIDTH, top + 84 + _CHART + 22 * len(words_of), f"{' '.join(command)}: {report.verdict}")
    drawing.rect(16, 14, _WIDTH - 32, top - 30, "#f3f5f7", rx=4)
    widest = max(source, key=len)
    size = min(svg.fit_size(widest, 700, 13), 12)
    for number, line in enumerate(source):
        drawing.text(28, 36 + _LINE * number, line, size=size, family=_MONO)
    drawing.text(28, top + 8, f"$ {' '.join(command)}", size=13, bold=True, family=_MONO)
    tops = heights(report, _COLUMNS)
    _curve(drawing, report, tops, 28, top + 34)
    y = top + 34 + _CHART + 26
    x = 28.0
    for name in CATEGORIES:
        if tops[:, CATEGORIES.index(name)].max() * 50 > report.allocated:
            drawing.rect(x, y - 10, 11, 11, COLORS[name])
            drawing.text(x + 16, y, words.category(name), size=12)
            x += 34 + svg.text_width(words.category(name), 12)
    said = len(report.which_card) + bool(report.oom)
    colours = [svg.GREEN if report.judgement == FITS else svg.RED, *[svg.INK] * said]
    colours += [svg.GREEN if one["status"] == FITS else svg.INK for one in report.tried]
    for number, (line, colour) in enumerate(zip(words_of, colours, strict=True)):
        drawing.text(28, y + 28 + 22 * number, line, size=svg.fit_size(line, 700, 14), fill=colour, bold=not number)
    return drawing


def _curve(drawing: svg.Drawing, report: Report, tops: np.ndarray, x: float, y: float) -> None:
    width, scale = _WIDTH - 2 * x, _CHART / max(report.capacity * 1.08, report.allocated)
    base = y + _CHART
    places = [round(x + width * place / max(len(tops) - 1, 1), 1) for place in range(len(tops))]
    below = tops.cumsum(axis=1)
    for column, name in enumerate(CATEGORIES):
        if not tops[:, column].any():
            continue
        lower = below[:, column - 1] if column else tops[:, 0] * 0
        outline = [(a, round(base - b * scale, 1)) for a, b in zip(places, below[:, column], strict=True)]
        outline += [(a, round(base - b * scale, 1)) for a, b in zip(places[::-1], lower[::-1], strict=True)]
        drawing.polygon(outline, COLORS[name])
    limit = base - report.capacity * scale
    drawing.line(x, base, x + width, base, svg.MUTED)
    drawing.line(x, limit, x + width, limit, svg.RED, stroke_width=2)
    card = tr(
        ko=f"{report.gpu}의 한도 {human_bytes(report.capacity)}",
        en=f"{report.gpu}, {human_bytes(report.capacity)}",
    )
    drawing.text(x + width, limit - 6, card, size=12, anchor="end", fill=svg.RED)
