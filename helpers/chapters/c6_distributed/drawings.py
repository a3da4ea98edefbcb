"""Drawings of chapter 6."""

from __future__ import annotations

from collections.abc import Sequence

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...ranks.training import TrainingRun


def draw_data_parallel(runs: Sequence[TrainingRun]) -> svg.Drawing:
    """Every rank with its rows, the whole model, and the gradients' all-reduce; bytes as the ranks counted them."""
    n, first = len(runs), runs[0]
    title = tr(
        ko=f"데이터 병렬: 모델 전체를 {n}벌, 배치는 {n}등분",
        en=f"Data parallelism: {n} copies of the model, 1/{n} of the batch each",
    )
    drawing = svg.Drawing(760, 330, f"{title} ({sum(run.rows for run in runs)} → {n} × {first.rows})")
    drawing.text(20, 30, title, size=16, bold=True)
    step = 720 / n
    names = {
        "parameters": tr(ko="파라미터", en="parameters"),
        "gradients": tr(ko="그레이디언트", en="gradients"),
        "optimizer": tr(ko="옵티마이저 상태", en="optimizer state"),
    }
    for i, run in enumerate(runs):
        x, width = 20 + i * step + 6, step - 12
        color = svg.RANKS[i % len(svg.RANKS)]
        rows = tr(ko=f"문장 {run.rows}개", en=f"{run.rows} sentences")
        drawing.rect(x, 50, width, 30, color)
        size, ink = svg.fit_size(rows, width - 8, 13), svg.ink_on(color)
        drawing.text(x + width / 2, 70, rows, size=size, anchor="middle", fill=ink)
        drawing.polygon([(x + width / 2 - 6, 84), (x + width / 2 + 6, 84), (x + width / 2, 94)], svg.MUTED)
        drawing.rect(x, 98, width, 128, svg.PAPER, stroke=svg.INK)
        drawing.text(x + width / 2, 118, f"rank {i}", size=13, anchor="middle", bold=True)
        for line, (kind, name) in enumerate(names.items()):
            text = f"{name} {human_bytes(run.held[kind])}"
            drawing.text(x + width / 2, 144 + 22 * line, text, size=svg.fit_size(text, width - 8, 12), anchor="middle")
        text = tr(ko="모델 전체", en="the whole model")
        drawing.text(x + width / 2, 214, text, size=12, anchor="middle", fill=svg.MUTED)
        drawing.line(x + width / 2, 226, x + width / 2, 258, color, stroke_width=3)
    drawing.rect(26, 258, 708, 34, svg.GRID)
    label = tr(ko="all-reduce: 그레이디언트의 평균", en="all-reduce: the mean of the gradients")
    drawing.text(380, 280, label, size=14, anchor="middle", bold=True)
    note = tr(ko="모든 rank가 같은 그레이디언트로 같은 스텝을 실행한다.", en="Every rank takes the same step.")
    drawing.text(380, 316, note, size=12, anchor="middle", fill=svg.MUTED)
    return drawing
