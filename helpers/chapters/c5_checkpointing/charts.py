"""Chapter 5's charts of data: what is stored over the number of segments, bytes over extra FLOPs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.units import MiB, human_bytes

from ...charts import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_sweep(ax: Axes, sweep: Any) -> None:
    """The most values stored over the number of segments, both logarithmic, with the lowest and 2√N."""
    segments, peak, _ = sweep.best
    root = 2 * math.sqrt(sweep.nodes)
    ax.loglog([row[0] for row in sweep.rows], [row[1] for row in sweep.rows])
    ax.axhline(root, color=svg.RED, linestyle="--", linewidth=1, label=f"2√N = {root:.1f}")
    ax.plot([segments], [peak], "o", color=svg.INK)
    ax.annotate(f"{segments} → {peak}", (segments, peak), (0, 10), textcoords="offset points", ha="center")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.set_xlabel(tr(ko="구간의 수 (로그 눈금)", en="segments (log scale)"))
    ax.set_ylabel(tr(ko="가장 많이 저장한 값의 수", en="most values stored"))
    ax.legend()


def plot_tradeoff(ax: Axes, ways: list[tuple[str, float, int]]) -> None:
    """(name, extra FLOPs as a share, bytes held): a point each, and a line through those that none beats in both."""
    best = sorted(
        (extra, held)
        for _, extra, held in ways
        if not any(o[1] <= extra and o[2] <= held and o[1:] != (extra, held) for o in ways)
    )
    ax.plot([100 * extra for extra, _ in best], [held / MiB for _, held in best])
    for name, extra, held in ways:
        ax.plot([100 * extra], [held / MiB], "o", color=svg.BLUE if (extra, held) in best else svg.GREY)
        ax.annotate(name, (100 * extra, held / MiB), (7, 5), textcoords="offset points")
    ax.set_xlim(left=-1, right=1 + 118 * max(extra for _, extra, _ in ways))
    ax.set_ylim(bottom=0)
    ax.set_xlabel(tr(ko="추가 연산 (%)", en="extra work (%)"))
    ax.set_ylabel(tr(ko="순전파 뒤에 남은 것 (MiB)", en="held after forward (MiB)"))


def sweep_chart(sweep: Any) -> Chart:
    """`plot_sweep` on a sheet of its own."""
    chart = Chart(repr(sweep), f"2√N = {2 * math.sqrt(sweep.nodes):.1f}")
    plot_sweep(chart.ax, sweep)
    return chart


def tradeoff_chart(ways: list[tuple[str, float, int]]) -> Chart:
    """`plot_tradeoff` on a sheet of its own."""
    alt = "; ".join(f"{name}: {extra:+.1%}, {human_bytes(held)}" for name, extra, held in ways)
    chart = Chart(tr(ko="무엇을 남길까: 바이트와 추가 연산", en="What to keep: bytes and extra work"), alt)
    plot_tradeoff(chart.ax, ways)
    return chart
