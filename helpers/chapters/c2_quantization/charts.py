"""Chapter 2's charts of data: errors over bits, who uses which code, a state of Adam, a loss over outliers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

from ...charts import COLORS, Chart, steady
from .quantization import Quantized, method_label


def draw_errors(quantized: Iterable[Quantized]) -> Chart:
    """The relative error over the bits a parameter takes; one line a method, in the order of its bits."""
    chart = Chart(tr(ko="비트와 오차", en="Bits and error"), height=360)
    lines: dict[str, list[tuple[float, float]]] = {}
    for q in quantized:
        lines.setdefault(method_label(q.method), []).append((q.bits_per_parameter, q.relative_error * 100))
    for (label, points), color in zip(lines.items(), COLORS, strict=False):
        chart.ax.plot(*zip(*sorted(points), strict=True), "o-", color=color, label=label, markersize=7)
    chart.ax.set(
        xlabel=tr(ko="파라미터당 비트", en="bits a parameter"), ylabel=tr(ko="상대 오차 (%)", en="relative error (%)")
    )
    if max(q for points in lines.values() for _, q in points) > 10 * min(q for p in lines.values() for _, q in p):
        chart.ax.set_yscale("log")
    chart.ax.legend()
    return chart


def draw_code_stems(*parts: Quantized) -> Chart:
    """Each code as a bar that stands on the number it stands for and is as high as the numbers that use it."""
    alt = "; ".join(map(repr, parts))
    chart = Chart(tr(ko="코드가 뜻하는 값과 쓰는 값의 수", en="Codes, and how many use them"), alt, columns=len(parts))
    for ax, q in zip(chart.axes, parts, strict=True):
        levels, counts = q.levels(), q.counts
        used = counts > 0
        ax.vlines(levels[used].tolist(), 0, counts[used].tolist(), color=svg.BLUE, linewidth=4)
        ax.plot(levels[~used].tolist(), [0] * int((~used).sum()), "o", color=svg.RED)
        ax.set_title(
            tr(ko=f"{method_label(q.method)} · 낭비 {q.wasted_codes}개", en=f"{q.method}: {q.wasted_codes} wasted")
        )
        ax.set(xlabel=tr(ko="코드가 뜻하는 값", en="what a code stands for"), ylim=(-15, None))
    chart.axes[0].set_ylabel(tr(ko="쓰는 값의 수", en="numbers using it"))
    return chart


def draw_state(state: torch.Tensor, codes: dict[str, torch.Tensor]) -> Chart:
    """How the numbers of a state (at least 0) spread over powers of ten, and where the codes of each kind stand.

    codes: name → what the codes stand for, as shares of the largest number.
    """
    chart = Chart(tr(ko="옵티마이저 상태의 분포와 8비트 코드", en="A state's numbers, and 8-bit codes"), height=360)
    shares = (state / state.max()).flatten()
    powers = shares[shares > 0].log10()
    low = float(powers.min().floor()) - 2
    counts, edges = torch.histogram(powers.double().cpu(), bins=60, range=(low, 0.0))
    chart.ax.bar(edges[:-1].tolist(), counts.tolist(), width=float(edges[1] - edges[0]), align="edge", color=svg.SKY)
    top = float(counts.max())
    for row, ((label, values), color) in enumerate(zip(codes.items(), (svg.RED, svg.BLUE), strict=False)):
        places = values[values > 0].log10()
        places = steady(places[places >= low].tolist())
        height = -top * (0.12 + 0.16 * row)
        chart.ax.plot(places, [height] * len(places), "|", color=color, markersize=13, label=label)
    chart.ax.set(
        xlabel=tr(ko="가장 큰 값에 대한 비율 (10의 거듭제곱)", en="share of the largest (powers of ten)"),
        ylabel=tr(ko="값의 수", en="numbers"),
    )
    chart.ax.set_yticks([tick for tick in chart.ax.get_yticks() if 0 <= tick <= top])
    chart.ax.legend(loc="upper left")
    return chart


def draw_outliers(rows: Sequence[dict[str, Any]]) -> Chart:
    """Losses over how many times larger the outlier channels are; each row has "factor" and a loss by name.

    A loss is drawn to three digits: what lies behind them differs from CPU to CPU.
    """
    chart = Chart(tr(ko="이상치의 크기와 손실", en="Outliers and the loss"), height=340)
    factors = [row["factor"] for row in rows]
    for name in [key for key in rows[0] if key != "factor"]:
        chart.ax.loglog(factors, [float(f"{row[name]:.3g}") for row in rows], "o-", label=name)
    chart.ax.set_xticks(factors, [f"{factor:g}" for factor in factors], minor=False)
    chart.ax.set(xlabel=tr(ko="이상치 채널의 배율", en="outlier channels, times"), ylabel=tr(ko="손실", en="loss"))
    chart.ax.legend()
    return chart
