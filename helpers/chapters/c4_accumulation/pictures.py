"""The charts of chapter 4: gradients that add up, and losses over the samples seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

from ...charts import COLORS, Chart, steady


def draw_gradients(parts: Sequence[Sequence[float]], whole: Sequence[float]) -> Chart:
    """parts: for each micro-batch its share of some components of the gradient; whole: those of the one big batch.

    The shares are stacked, positive ones upward and negative ones downward; a dot marks their sum, a line the whole.
    """
    title = tr(
        ko=f"마이크로 배치 {len(parts)}개의 그레이디언트를 더하면 큰 배치의 그레이디언트가 된다",
        en=f"the gradients of {len(parts)} micro-batches add up to that of the big batch",
    )
    chart, x = Chart(title), np.arange(1, len(whole) + 1)
    above, below = np.zeros(len(whole)), np.zeros(len(whole))
    for i, part in enumerate(parts):
        heights = np.array(steady(part))
        name = tr(ko=f"마이크로 배치 {i + 1}", en=f"micro-batch {i + 1}")
        chart.ax.bar(x, heights, 0.5, np.where(heights >= 0, above, below), label=name, color=COLORS[i % len(COLORS)])
        above, below = above + heights.clip(min=0), below + heights.clip(max=0)
    total, line = tr(ko="쌓은 것의 합", en="sum of them"), tr(ko="큰 배치", en="the big batch")
    chart.ax.hlines(steady(whole), x - 0.38, x + 0.38, color=svg.INK, linewidth=2, label=line, zorder=3)
    chart.ax.scatter(x, above + below, 36, color=svg.INK, label=total, zorder=4)
    chart.ax.set_xticks(x)
    chart.ax.axhline(0, color=svg.MUTED, linewidth=1)
    chart.ax.set_xlabel(tr(ko="그레이디언트의 성분", en="component of the gradient"))
    chart.figure.legend(loc="outside lower center", ncols=len(parts) + 2)
    return chart


def draw_losses(runs: Mapping[str, tuple[int, Sequence[float]]]) -> Chart:
    """name → (samples per optimizer step, the loss of every optimizer step): losses over the samples seen.

    The second run is drawn as dots, so that the first shows beneath it.
    """
    ends = "; ".join(f"{name}: {len(losses)}, {losses[-1]:.3f}" for name, (_, losses) in runs.items())
    chart = Chart(tr(ko="학습한 샘플 수와 손실", en="loss over the samples seen"), ends)
    for i, (name, (count, losses)) in enumerate(runs.items()):
        samples, losses = count * np.arange(1, len(losses) + 1), steady(losses)
        if i == 1:
            chart.ax.plot(samples[::2], losses[::2], "o", markersize=5, label=name, zorder=3)
        else:
            chart.ax.plot(samples, losses, label=name, linewidth=2)
    chart.ax.set_xlabel(tr(ko="학습한 샘플 수", en="samples seen"))
    chart.ax.set_ylabel(tr(ko="손실", en="loss"))
    chart.ax.set_ylim(bottom=0)
    chart.ax.legend()
    return chart
