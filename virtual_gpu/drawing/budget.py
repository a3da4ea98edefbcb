"""The curve of an activation budget: the peak over what is computed twice, or goes to the CPU instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..language import tr
from ..units import human_bytes
from . import svg
from .labels import html_table

if TYPE_CHECKING:
    from ..step.budget import Budget, Point

LEFT, RIGHT, TOP, HEIGHT = 70, 740, 76, 280


def draw_budget(budget: Budget) -> svg.Drawing:
    """The points as a line of steps, those that were run as circles; dashed: what no choice betters.

    Numbers stand at the choices of whole results, which are listed below. The red line is the card's capacity.
    """
    points, corners, measured = budget.points, budget.corners, budget.measured
    least, capacity = budget.least_flops, budget.spec.capacity_bytes
    heights = [point.peak_bytes for point in points]
    shown = capacity if capacity <= 2 * max(heights) else 0
    low, most = 0.9 * min(heights), 1.05 * max([*heights, shown])
    widest = max(point.extra_work for point in points) / least or 1.0
    title = f"{budget.title}: {tr(ko='최대 메모리와 추가 연산', en='peak memory over extra work')}"
    drawing = svg.Drawing(760, TOP + HEIGHT + 70 + 20 * len(corners), f"{title}. {budget!r}")
    drawing.text(20, 28, title, svg.fit_size(title, 720, 15), bold=True)

    def at(peak: float, work: float) -> tuple[float, float]:
        return LEFT + work / least / widest * (RIGHT - LEFT), TOP + HEIGHT * (1 - (peak - low) / (most - low))

    _axes(drawing, low, most, widest)
    if shown:
        y = at(capacity, 0)[1]
        drawing.line(LEFT, y, RIGHT, y, svg.RED, stroke_width=1.5)
        text = tr(ko=f"카드의 한도 {human_bytes(capacity)}", en=f"capacity {human_bytes(capacity)}")
        drawing.text(LEFT + 6, y - 6, text, 12, fill=svg.RED, halo=True)
    drawing.polyline([at(one.peak_bytes, one.bound) for one in points], svg.MUTED, stroke_dasharray="4 3")
    drawing.polyline([at(one.peak_bytes, one.extra_work) for one in points], svg.BLUE, stroke_width=2)
    for point in points:
        if point.kept in measured:
            drawing.circle(*at(measured[point.kept].peak_bytes, point.extra_work), 6, svg.ORANGE)
    for number, point in enumerate(corners, 1):
        x, y = at(point.peak_bytes, point.extra_work)
        drawing.circle(x, y, 2.5, svg.BLUE)
        drawing.text(x + 7, y - 7, f"{number}", 12, bold=True, halo=True)
        text = f"{number}. {label_of(point)} → {human_bytes(point.peak_bytes)}, +{point.extra_work / least:.1%}"
        drawing.text(20, TOP + HEIGHT + 62 + 20 * number, text, svg.fit_size(text, 720, 12))
    legend = tr(
        ko="파란 선: 기록 한 벌로 센 값. 주황 점: 그대로 실행해 잰 값. 점선: 어떻게 골라도 넘지 못하는 한계(선형 완화)",
        en="blue: from one set of traces; orange: run so; dashed: no choice lies below (linear relaxation)",
    )
    drawing.text(20, 52, legend, svg.fit_size(legend, 720, 12), fill=svg.MUTED)
    return drawing


def _axes(drawing: svg.Drawing, low: float, most: float, widest: float) -> None:
    step = svg.nice_step((most - low) / 2**30)
    for i in range(int(low / 2**30 / step) + 1, int(most / 2**30 / step) + 1):
        y = TOP + HEIGHT * (1 - (i * step * 2**30 - low) / (most - low))
        drawing.line(LEFT, y, RIGHT, y, svg.GRID)
        drawing.text(LEFT - 8, y + 4, f"{i * step:g} GiB", 12, anchor="end", fill=svg.MUTED)
    step = svg.nice_step(100 * widest, 8)
    for i in range(int(100 * widest / step) + 1):
        x = LEFT + i * step / 100 / widest * (RIGHT - LEFT)
        drawing.text(x, TOP + HEIGHT + 18, f"+{i * step:g}%", 12, anchor="middle", fill=svg.MUTED)
    label = tr(
        ko="한 스텝의 추가 연산(CPU와 주고받는 동안 할 수 있었을 연산도 더했다)",
        en="extra FLOPs of a step, with what could be computed while bytes go to the CPU and back",
    )
    drawing.text((LEFT + RIGHT) / 2, TOP + HEIGHT + 36, label, 12, anchor="middle", fill=svg.MUTED)


def label_of(point: Point) -> str:
    """What is kept, in the reader's language."""
    return ", ".join(point.kept) or tr(ko="모두 다시 계산", en="all computed again")


def budget_table(budget: Budget) -> str:
    """The choices of whole results, and those that were run, as HTML."""
    measured = budget.measured
    heads = [
        tr(ko="남기는 결과", en="kept"),
        tr(ko="최대", en="peak"),
        tr(ko="실행해 잰 최대", en="peak of a run"),
        tr(ko="추가 연산", en="extra FLOPs"),
        tr(ko="CPU로 보내는 양", en="to the CPU"),
        tr(ko="더 줄일 수 있는 몫(한계)", en="at most to gain"),
    ]
    rows = []
    for point in budget.points:
        if point in budget.corners or point.kept in measured:
            run = measured.get(point.kept)
            rows.append(
                [
                    label_of(point),
                    human_bytes(point.peak_bytes),
                    human_bytes(run.peak_bytes) if run else "-",
                    f"+{point.extra_flops / budget.least_flops:.1%}",
                    human_bytes(point.sent_bytes) if point.sent_bytes else "-",
                    f"{budget.beyond_best(point):.1%}",
                ]
            )
    return html_table(heads, rows)
