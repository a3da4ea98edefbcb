"""The report's pictures on matplotlib's axes, for those who go on drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..language import tr
from ..optional import require
from ..trace.timeline import CATEGORIES
from ..units import GiB
from .labels import category_label, phase_label
from .report import COLORS, bar_labels
from .svg import RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..report import MemoryReport


def plot_timeline(report: MemoryReport, ax: Axes | None = None) -> Axes:
    """The bytes held over the phases, stacked by category in GiB, under the capacity; every phase is one wide."""
    ax = ax or _new_axes()
    for number, phase in enumerate(report.timeline.phases):
        x = number + np.linspace(0, 1, len(phase.live))
        ax.stackplot(x, phase.live.T / GiB, colors=COLORS.values(), labels=_labels() if not number else ())
    names = [phase_label(phase.name) for phase in report.timeline.phases]
    ax.set_xticks(np.arange(len(names)) + 0.5, names)
    ax.set_xlim(0, max(len(names), 1))
    ax.axhline(report.capacity_bytes / GiB, color=RED)
    return _finished(ax, report.title)


def plot_bars(reports: Sequence[MemoryReport], ax: Axes | None = None) -> Axes:
    """One bar a report at its peak, stacked by category in GiB; what it needs beyond is outlined."""
    ax = ax or _new_axes()
    names, bottom = bar_labels(reports), np.zeros(len(reports))
    for category, label in zip(CATEGORIES, _labels(), strict=True):
        heights = np.array([report.at_peak[category] for report in reports]) / GiB
        ax.bar(names, heights, bottom=bottom, color=COLORS[category], label=label)
        bottom += heights
    for name, report, top in zip(names, reports, bottom, strict=True):
        needed = max(report.needed_bytes or 0, report.peak_bytes) / GiB
        if needed > top:
            ax.bar([name], [needed - top], bottom=[top], fill=False, edgecolor=RED, linestyle="--")
    for capacity in {report.capacity_bytes for report in reports}:
        ax.axhline(capacity / GiB, color=RED)
    return _finished(ax, "")


def _new_axes() -> Axes:
    require("matplotlib")
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def _labels() -> list[str]:
    return [category_label(category) for category in CATEGORIES]


def _finished(ax: Axes, title: str) -> Axes:
    ax.set_ylabel(tr(ko="메모리(GiB)", en="memory (GiB)"))
    ax.set_title(title)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax
