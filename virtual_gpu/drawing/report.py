"""The picture of a memory report: a bar under the capacity, and the timeline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..language import tr
from ..trace.timeline import CATEGORIES
from ..units import GiB, human_bytes
from . import svg
from .labels import category_label, phase_label, setting_label, setting_value, varies
from .moments import Area, draw_moments

if TYPE_CHECKING:
    from ..report import MemoryReport

COLORS = dict(zip(CATEGORIES, (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.GREY), strict=True))


def draw_report(
    report: MemoryReport,
    *,
    answers: bool = False,
    against: MemoryReport | None = None,
    axis_bytes: float | None = None,
) -> svg.Drawing:
    """The stacked bar at the peak under the GPU's capacity, its numbers, and the timeline.

    answers: for a page that shows SVG as a part of itself, where the timeline answers to a pointer and to the keyboard
    (`moments`). against: another report, whose bar lies below, with the difference. axis_bytes: where the axes end, if
    they shall stand still.
    """
    alt = f"{report.title}: {report.verdict}"
    drawing = svg.Drawing(760, 430, alt if against is None else f"{alt}. {difference(report, against)}")
    drawing.text(20, 30, report.title, size=svg.fit_size(report.title, 720, 16), bold=True)
    size, fill = svg.fit_size(report.verdict, 720, 13), svg.INK if report.fits else svg.RED
    drawing.text(20, 52, report.verdict, size=size, fill=fill, bold=not report.fits)
    axis_bytes = axis_bytes or 0
    _draw_bar(drawing, report, 20, 86, 720, max(axis_bytes, axis_end(report)), against)
    if report.timeline.phases:
        highest = max(report.timeline.peak_bytes, report.capacity_bytes) * 1.08
        area = Area(62, 216, 678, 170, max(highest, axis_bytes * 1.02))
        _draw_timeline(drawing, report, area)
        if answers:
            draw_moments(drawing, report, area)
    return drawing


def axis_end(report: MemoryReport) -> float:
    """Where a report's axis ends, in bytes: behind all that it needs, and behind the capacity."""
    return max(sum(report.at_peak.values()), report.needed_bytes or 0, report.capacity_bytes * 1.06)


def difference(report: MemoryReport, other: MemoryReport) -> str:
    """By how much the peak differs from another report's, in words."""
    text = _signed(report, other)
    return tr(ko=f"{other.title}보다 {text}", en=f"{text} against {other.title}")


def _signed(report: MemoryReport, other: MemoryReport) -> str:
    more = (report.needed_bytes or report.peak_bytes) - (other.needed_bytes or other.peak_bytes)
    return f"{'+' if more > 0 else '−' if more < 0 else '±'}{human_bytes(abs(more))}"


def draw_bars(reports: Sequence[MemoryReport], marked: int | None = None) -> svg.Drawing:
    """One stacked bar a report, at its peak; what it would need beyond what it got is outlined.

    marked: the number of the report that is meant; its label is bold, its segments are named, the others are pale.
    """
    capacity = max(report.capacity_bytes for report in reports)
    labels = bar_labels(reports)
    size = min(svg.fit_size(label, 400, 12) for label in labels)
    left = 30 + max(svg.text_width(label, size) for label in labels)
    top, row, width = 64, 34, 760 - left - 120
    drawing = svg.Drawing(760, top + row * len(reports) + 68, "; ".join(map(str, reports)))
    titles = [report.title.split(" · ") for report in reports]
    common = [part for part in titles[0] if all(part in parts for parts in titles)]
    head = " · ".join([tr(ko="최대 메모리", en="peak memory"), *common])
    drawing.text(20, 28, head, size=svg.fit_size(head, 720, 15), bold=True)
    longest = max(max(report.needed_bytes or 0, report.peak_bytes) for report in reports)
    scale = width / max(longest, capacity * 1.02)
    # Letters on a pale bar have no contrast.
    named = [*range(len(reports))] if marked is None else [marked]
    widest = {c: max(named, key=lambda i: reports[i].at_peak[c]) for c in CATEGORIES}
    for i, (label, report) in enumerate(zip(labels, reports, strict=True)):
        y = top + row * i
        drawing.text(left - 10, y + 15, label, size=size, anchor="end", bold=i == marked)
        parts = [  # each name once, where its segment is widest
            (nbytes * scale, COLORS[c], category_label(c) if widest[c] == i else "")
            for c, nbytes in report.at_peak.items()
        ]
        x = drawing.bar(left, y, 20, parts, size=11)
        if marked not in (None, i):
            drawing.rect(left, y, x - left, 20, svg.PAPER, fill_opacity=0.45)
        needed = max(report.needed_bytes or 0, report.peak_bytes)
        if needed * scale > x - left + 0.5:
            drawing.rect(x, y, left + needed * scale - x, 20, "none", stroke=svg.RED, stroke_dasharray="4 3")
        over = "" if report.fits else tr(ko=" 필요", en=" needed")
        fill = svg.INK if report.fits else svg.RED
        drawing.text(
            750, y + 15, f"{human_bytes(needed)}{over}", size=12, anchor="end", fill=fill, bold=not report.fits
        )
    if min(report.capacity_bytes for report in reports) > 0.99 * capacity:  # a real GPU's moves a little
        limit = left + capacity * scale
        drawing.line(limit, top - 8, limit, top + row * len(reports) - 8, svg.RED, stroke_width=2)
        drawing.text(limit, top - 12, human_bytes(capacity), size=12, anchor="middle", fill=svg.RED)
    for i, category in enumerate(CATEGORIES):
        cx, cy = 20 + (i % 3) * 245, top + row * len(reports) + 20 + (i // 3) * 22
        drawing.rect(cx, cy - 10, 11, 11, COLORS[category])
        drawing.text(cx + 17, cy, category_label(category), size=12)
    return drawing


def bar_labels(reports: Sequence[MemoryReport]) -> list[str]:
    """What tells each report from the others: the settings that vary, or its title."""
    varying = [name for name in reports[0].setting if varies(name, reports)] if len(reports) > 1 else []
    return [
        ", ".join(
            f"{setting_label(name)} {setting_value(report.setting[name])}" for name in varying if name in report.setting
        )
        or report.title
        for report in reports
    ]


def _draw_bar(
    drawing: svg.Drawing,
    report: MemoryReport,
    left: float,
    top: float,
    width: float,
    axis_bytes: float,
    against: MemoryReport | None,
) -> None:
    at_peak = report.at_peak
    scale = width / axis_bytes
    x = drawing.bar(left, top, 30, [(n * scale, COLORS[c], category_label(c)) for c, n in at_peak.items()])
    if report.needed_bytes is not None and report.needed_bytes > sum(at_peak.values()):
        rest = (report.needed_bytes - sum(at_peak.values())) * scale
        drawing.rect(x, top, rest, 30, "none", stroke=svg.RED, stroke_dasharray="4 3")
    limit = left + report.capacity_bytes * scale
    drawing.line(limit, top - 8, limit, top + 38, svg.RED, stroke_width=2)
    label = f"{report.gpu_name} {human_bytes(report.capacity_bytes)}"
    room = limit - left > svg.text_width(label, 12)
    x, anchor = (limit - 4, "end") if room else (limit + 4, "start")
    drawing.text(x, top - 10, label, size=12, anchor=anchor, fill=svg.RED)
    if against is not None:
        drawing.bar(left, top + 33, 7, [(n * scale, COLORS[c], "") for c, n in against.at_peak.items()])
        text, wide = difference(report, against), svg.text_width(label, 12)
        on_left, on_right = limit - 4 - wide * room - 30, 740 - (limit + 4 + wide * (not room)) - 10
        place, free = (20, on_left) if on_left > min(svg.text_width(text, 12), on_right) else (740, on_right)
        if svg.fit_size(text, free, 12) < 9:  # no room to say against what: the number alone
            text = _signed(report, against)
        drawing.text(place, top - 10, text, size=svg.fit_size(text, free, 12), anchor="start" if place == 20 else "end",
                     fill=svg.MUTED, halo=True)  # fmt: skip
    for i, (category, nbytes) in enumerate(at_peak.items()):
        column, row = i % 3, i // 3
        cx, cy = left + column * 245, top + 58 + row * 22
        drawing.rect(cx, cy - 10, 11, 11, COLORS[category])
        drawing.text(cx + 17, cy, f"{category_label(category)} {human_bytes(nbytes)}", size=12)


def _draw_timeline(drawing: svg.Drawing, report: MemoryReport, area: Area) -> None:
    phases, y_of = report.timeline.phases, area.y_of
    left, top, width, height, highest = area
    step = svg.nice_step(highest / GiB) * GiB
    for tick in np.arange(0, highest, step):
        drawing.line(left, y_of(tick), left + width, y_of(tick), svg.GRID)
        drawing.text(left - 6, y_of(tick) + 4, f"{tick / GiB:g}", size=11, anchor="end", fill=svg.MUTED)
    drawing.text(left - 6, top - 6, "GiB", size=11, anchor="end", fill=svg.MUTED)
    phase_width = width / len(phases)
    peak_index, peak_moment = report.timeline.peak
    for i, phase in enumerate(phases):
        x0 = left + i * phase_width
        moments = np.arange(len(phase.live))
        xs = x0 + phase_width * moments / max(moments[-1], 1)
        xs, live = _thin(xs, phase.live, peak_moment if i == peak_index else None)
        upper = np.cumsum(live, axis=1)
        lower = upper - live
        for c, category in enumerate(CATEGORIES):
            if live[:, c].any():
                above, below = (_corners([*zip(xs, y_of(edge[:, c]), strict=True)]) for edge in (upper, lower))
                drawing.polygon([*above, *below[::-1]], COLORS[category])
                if lower[:, c].any():  # told apart without their colours too
                    drawing.polyline(below, svg.PAPER, stroke_width=0.8)
        drawing.line(x0, top, x0, top + height, svg.GRID)
        drawing.text(
            x0 + phase_width / 2, top + height + 18, phase_label(phase.name), size=11, anchor="middle", fill=svg.MUTED
        )
        if i == peak_index:
            peak_x = x0 + phase_width * moments[peak_moment] / max(moments[-1], 1)
    drawing.line(left, y_of(report.capacity_bytes), left + width, y_of(report.capacity_bytes), svg.RED, stroke_width=2)
    peak_y = y_of(report.timeline.peak_bytes)
    drawing.circle(peak_x, peak_y, 4, svg.INK)
    name = tr(ko="최대", en="peak")
    on_right = peak_x > left + width * 0.75
    label_y, limit_y = peak_y - 7, y_of(report.capacity_bytes)
    if label_y - 14 < limit_y < label_y + 6:  # above the line that it would lie on
        label_y = max(limit_y - 6, top - 4)
    drawing.text(
        peak_x + (-8 if on_right else 8),
        label_y,
        f"{name} {human_bytes(report.timeline.peak_bytes)}",
        size=12,
        anchor="end" if on_right else "start",
        bold=True,
        halo=True,
    )
    caption = tr(ko="학습이 진행되는 순서 →", en="training goes on →")
    drawing.text(left + width, top + height + 36, caption, size=11, anchor="end", fill=svg.MUTED)


def _corners(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of a line without those that lie on the straight way from one neighbour to the other."""
    kept = points[:1]
    for (x, y), (after_x, after_y) in itertools.pairwise(points[1:]):
        before_x, before_y = kept[-1]
        if abs((y - before_y) * (after_x - before_x) - (after_y - before_y) * (x - before_x)) > 1e-6:
            kept.append((x, y))
    return kept + points[-1:]


def _thin(xs: np.ndarray, live: np.ndarray, keep: int | None, bins: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """At most about two points in each of `bins` columns, the highest among them; the ends and `keep` stay."""
    if len(xs) <= 2 * bins:
        return xs, live
    columns = np.minimum(((xs - xs[0]) / max(xs[-1] - xs[0], 1e-9) * bins).astype(int), bins - 1)
    total = live.sum(axis=1)
    chosen = {0, len(xs) - 1} | ({keep} if keep is not None else set())
    for column in range(bins):
        inside = np.flatnonzero(columns == column)
        if len(inside):
            chosen |= {int(inside[total[inside].argmax()]), int(inside[0])}
    index = np.array(sorted(chosen))
    return xs[index], live[index]
