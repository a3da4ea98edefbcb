"""The drawings of chapter 8: W + BA, singular values, loss and forgetting."""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

COLORS = (svg.INK, svg.SKY, svg.BLUE, svg.GREEN, svg.ORANGE, svg.RED, svg.PURPLE)


def draw_update(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> svg.Drawing:
    """W (n, m) + B (n, r) · A (r, m) = W + BA; colour is sign and size, W and BA each on their own scale."""
    update = b @ a
    n, m, r = *weight.shape, a.shape[0]
    cell, top, height = 14, 74, max(n, r) * 14
    drawing = svg.Drawing(
        760,
        top + height + 58,
        tr(
            ko=f"고정된 가중치 W에 좁은 행렬 B와 A의 곱을 더한다. 조각 {n} × {m}, rank {r}",
            en=f"A frozen weight W plus the product of two thin matrices B and A: a piece of {n} × {m}, rank {r}",
        ),
    )
    drawing.text(
        20, 28, tr(ko="W는 그대로 두고 B와 A만 학습한다", en="W stays; only B and A are trained"), 16, bold=True
    )
    gap = 44
    x = (760 - (2 * m + r + m) * cell - 3 * gap) / 2
    pieces = [
        ("W", weight, tr(ko="고정", en="frozen"), weight.abs().max()),
        ("+", None, "", None),
        ("B", b, tr(ko="학습", en="trained"), b.abs().max()),
        ("×", None, "", None),
        ("A", a, tr(ko="학습", en="trained"), a.abs().max()),
        ("=", None, "", None),
        ("W + BA", weight + update, f"BA: rank {r}", weight.abs().max()),
    ]
    for name, matrix, note, largest in pieces:
        if matrix is None:
            drawing.text(x - gap / 2, top + height / 2 + 8, name, 22, anchor="middle")
            continue
        rows, columns = matrix.shape
        y = top + (height - rows * cell) / 2
        _cells(drawing, x, y, matrix / largest, cell)
        stroke = svg.RED if name in ("A", "B") else svg.INK
        drawing.rect(x, y, columns * cell, rows * cell, "none", stroke=stroke, stroke_width=2)
        middle = x + columns * cell / 2
        drawing.text(middle, y - 8, name, 14, anchor="middle", bold=True)
        drawing.text(middle, top + height + 20, f"{rows} × {columns}", 12, anchor="middle", fill=svg.MUTED)
        drawing.text(middle, top + height + 38, note, 12, anchor="middle", fill=stroke)
        x += columns * cell + gap
    return drawing


def _cells(drawing: svg.Drawing, x: float, y: float, matrix: torch.Tensor, cell: int) -> None:
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            colour = svg.BLUE if value >= 0 else svg.ORANGE
            drawing.rect(x + j * cell, y + i * cell, cell, cell, colour, opacity=round(min(abs(value), 1.0), 2))


def draw_singular_values(series: dict[str, torch.Tensor]) -> svg.Drawing:
    """name → singular values in falling order: how much of the squared whole the first k hold."""
    drawing = svg.Drawing(
        760, 330, tr(ko="처음 k개의 특잇값이 담는 몫", en="the share that the first k singular values hold")
    )
    drawing.text(20, 28, drawing.alt, 15, bold=True)
    left, top, width, height = 60, 52, 660, 220
    _frame(drawing, left, top, width, height, 1.0, 0.25, "{:.0%}")
    for colour, (i, (name, values)) in zip((svg.RED, svg.GREY, svg.BLUE), enumerate(series.items()), strict=False):
        share = [0.0, *(values.square().cumsum(0) / values.square().sum()).tolist()]
        step = width / (len(share) - 1)
        points = [(left + step * k, top + height * (1 - v)) for k, v in enumerate(share)]
        drawing.polyline(points, colour, stroke_width=2.5)
        _legend(drawing, left + width - 250, top + height - 50 + 22 * i, colour, name)
    for k in range(0, len(values) + 1, 8):
        drawing.text(left + width * k / len(values), top + height + 18, str(k), 11, anchor="middle", fill=svg.MUTED)
    drawing.text(left + width, top + height + 38, "k →", 12, anchor="end", fill=svg.MUTED)
    return drawing


def draw_runs(runs: list[Any], count: int) -> svg.Drawing:
    """Left: the loss by step. Right: answers known of the new task (solid) and of the old one (dashed)."""
    rows = -(-len(runs) // 3)
    drawing = svg.Drawing(
        760,
        330 + 22 * rows,
        "; ".join(
            tr(
                ko=f"{run.name}: 손실 {run.losses[-1]:.2f}, 새 과제 {run.learned}, 옛 과제 {run.kept}",
                en=f"{run.name}: loss {run.losses[-1]:.2f}, new task {run.learned}, old task {run.kept}",
            )
            for run in runs
        ),
    )
    steps = max(len(run.losses) for run in runs)
    top, width, height = 52, 300, 220
    highest = max(max(run.losses) for run in runs) * 1.05
    answers = tr(ko="맞히는 답(실선: 새 과제, 점선: 옛 과제)", en="answers known (solid: new, dashed: old)")
    for left, title, largest, show in (
        (60, tr(ko="손실", en="loss"), highest, "{:.1f}"),
        (430, answers, count, "{:.0f}"),
    ):
        drawing.text(left, 30, title, 14, bold=True)
        _frame(drawing, left, top, width, height, largest, svg.nice_step(largest) if left == 60 else count / 4, show)
        for k in range(0, steps + 1, 20):
            drawing.text(left + width * k / steps, top + height + 18, str(k), 11, anchor="middle", fill=svg.MUTED)
        caption = tr(ko="스텝 →", en="steps →")
        drawing.text(left + width, top + height + 36, caption, 11, anchor="end", fill=svg.MUTED)
    for i, run in enumerate(runs):
        colour = COLORS[i % len(COLORS)]
        losses = [(60 + width * k / steps, top + height * (1 - v / highest)) for k, v in enumerate(run.losses, 1)]
        drawing.polyline(losses, colour, stroke_width=2)
        for place, dashes in ((1, None), (2, "4 3")):
            points = [(430 + width * row[0] / steps, top + height * (1 - row[place] / count)) for row in run.history]
            drawing.polyline(points, colour, stroke_width=2, stroke_dasharray=dashes)
        _legend(drawing, 60 + (i % 3) * 230, top + height + 58 + 22 * (i // 3), colour, run.name)
    return drawing


def _frame(
    drawing: svg.Drawing, left: float, top: float, width: float, height: float, largest: float, step: float, show: str
) -> None:
    for i in range(int(largest / step + 1e-9) + 1):
        y = top + height * (1 - i * step / largest)
        drawing.line(left, y, left + width, y, svg.GRID)
        drawing.text(left - 6, y + 4, show.format(i * step), 11, anchor="end", fill=svg.MUTED)


def _legend(drawing: svg.Drawing, x: float, y: float, colour: str, name: str) -> None:
    drawing.line(x, y - 4, x + 18, y - 4, colour, stroke_width=3)
    drawing.text(x + 24, y, name, 12)
