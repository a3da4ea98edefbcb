"""Chapter 3's charts of data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.report import MemoryReport
from virtual_gpu.units import GiB

from ...charts import Chart

Losses = Mapping[str, Sequence[float]]  # what was trained → its loss at every step


def losses_chart(by_rate: Mapping[float, Losses]) -> Chart:
    """One axes for each learning rate, a line for each run; the legend says the last loss, to three digits."""
    title = tr(ko="자료형과 구현에 따른 손실", en="Losses by dtype and implementation")
    ended = [
        f"{rate:g} {name} {losses[-1]:.3f}" for rate, runs in by_rate.items() for name, losses in runs.items()
    ]  # fmt: skip
    chart = Chart(title, ", ".join(ended), columns=len(by_rate), height=400)
    for ax, (rate, runs) in zip(chart.axes, by_rate.items(), strict=True):
        for name, losses in runs.items():
            finite = [round(loss, 3) for loss in losses if math.isfinite(loss)]
            stopped = len(finite) < len(losses)
            # Lines that lie on each other stay visible: each later one is thinner.
            width = 5 - len(ax.lines)
            ax.plot(range(len(finite)), finite, "x" if stopped else "-", lw=width, label=f"{name}: {losses[-1]:.3f}")
        ax.set_title(tr(ko=f"학습률 {rate:g}", en=f"learning rate {rate:g}"))
        ax.set_xlabel(tr(ko="스텝", en="step"))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return chart


def lengths_chart(runs: Mapping[tuple[int, str], MemoryReport]) -> Chart:
    """What (length, attention) needs over the length, and the GPU's limit."""
    title = tr(ko="길이와 필요한 메모리", en="Length and the memory needed")
    ended = [f"{length} {how} {report.needed_bytes / GiB:.2f}" for (length, how), report in runs.items()]
    chart = Chart(title, ", ".join(ended))
    on_paper = {"facecolor": svg.PAPER, "edgecolor": "none", "pad": 1}  # the limit's line does not cross a number
    for how, place in zip(dict.fromkeys(how for _, how in runs), (9, -18), strict=True):  # words above, words below
        points = [(length, report.needed_bytes / GiB) for (length, of), report in runs.items() if of == how]
        chart.ax.plot(*zip(*points, strict=True), "o-", label=how)
        for length, needed in points:
            where = dict(xytext=(0, place), textcoords="offset points", ha="center", bbox=on_paper)
            chart.ax.annotate(f"{needed:.2f}", (length, needed), **where)
    report = next(iter(runs.values()))
    limit = report.capacity_bytes / GiB
    chart.ax.axhline(limit, color=svg.RED, ls="--", label=tr(ko=f"한도 {limit:.2f}", en=f"limit {limit:.2f}"))
    chart.ax.set_xticks(sorted({length for length, _ in runs}))
    chart.ax.set_xlabel(tr(ko="길이", en="length"))
    chart.ax.set_ylabel("GiB")
    chart.ax.set_ylim(0, None)
    chart.ax.legend(loc="upper left")
    return chart
