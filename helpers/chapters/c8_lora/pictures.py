"""The drawings of chapter 8: W + BA, singular values, loss and forgetting."""

from __future__ import annotations

from typing import Any

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

from ...charts import Chart

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


def draw_singular_values(series: dict[str, torch.Tensor]) -> Chart:
    """name → singular values in falling order: how much of the squared whole the first k hold."""
    chart = Chart(tr(ko="처음 k개의 특잇값이 담는 비율", en="the share that the first k singular values hold"))
    for colour, (name, values) in zip((svg.RED, svg.GREY), series.items(), strict=True):
        share = [0.0, *(values.square().cumsum(0) / values.square().sum()).tolist()]
        chart.ax.plot([100 * part for part in share], color=colour, label=name)
    chart.ax.set(xlabel="k", ylabel="%", ylim=(0, 102))
    chart.ax.legend(loc="lower right")
    return chart


def draw_runs(runs: list[Any], count: int) -> Chart:
    """Left: the loss by step. Right: answers known of the new task (solid) and of the old one (dashed)."""
    ends = [
        tr(
            ko=f"{run.name}: 손실 {run.losses[-1]:.2f}, 새 과제 {run.learned}, 옛 과제 {run.kept}",
            en=f"{run.name}: loss {run.losses[-1]:.2f}, new task {run.learned}, old task {run.kept}",
        )
        for run in runs
    ]
    title = tr(ko="무엇을 배우고 무엇을 잊었나", en="What was learned, what was forgotten")
    chart = Chart(title, "; ".join(ends), columns=2, height=360)
    loss, answers = chart.axes
    for i, run in enumerate(runs):
        colour = COLORS[i % len(COLORS)]
        losses = [float(f"{value:.4g}") for value in run.losses]  # of the digits after these CPUs make others
        loss.plot(range(1, len(losses) + 1), losses, color=colour, label=run.name)
        steps, learned, kept = zip(*run.history, strict=True)
        answers.plot(steps, learned, color=colour)
        answers.plot(steps, kept, color=colour, linestyle="--")
    step = tr(ko="스텝", en="step")
    loss.set(title=tr(ko="손실(로그 눈금)", en="loss (log scale)"), xlabel=step, yscale="log")
    known = tr(ko=f"{count}개 중 맞힌 수(점선: 옛 과제)", en=f"known of {count} (dashed: old task)")
    answers.set(title=known, xlabel=step)
    loss.legend()
    return chart


def draw_rates(series: dict[str, list[tuple[float, int]]], count: int) -> Chart:
    """name → (learning rate, answers known of `count`): one line a method, the rate on a logarithmic scale."""
    alt = "; ".join(f"{name}: " + ", ".join(f"{lr:g} → {n}" for lr, n in points) for name, points in series.items())
    title = tr(ko="학습률과 맞힌 수", en="Answers known by learning rate")
    chart = Chart(title, alt)
    for colour, (name, points) in zip(COLORS, series.items(), strict=False):
        chart.ax.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
    rates = sorted({lr for points in series.values() for lr, _ in points})
    chart.ax.set_xscale("log")
    chart.ax.set_xticks(rates, [f"{lr:g}" for lr in rates])
    chart.ax.minorticks_off()
    known = tr(ko=f"{count}개 중 맞힌 수", en=f"known of {count}")
    chart.ax.set(xlabel=tr(ko="학습률", en="learning rate"), ylabel=known, ylim=(0, count + 1))
    chart.ax.legend(loc="upper left")
    return chart
