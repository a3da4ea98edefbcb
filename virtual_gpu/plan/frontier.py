"""The frontier of a search as a picture: what each measured plan needs of a GPU over the work of its step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..drawing import svg
from ..language import tr
from ..units import human_bytes
from .plans import Plan
from .recipes import METHODS, method_label

if TYPE_CHECKING:
    from .search import Plans

LEFT, RIGHT, TOP, HEIGHT = 70, 740, 70, 280
COLORS = dict(zip(METHODS, (svg.BLUE, svg.ORANGE, svg.GREEN), strict=True))


def frontier(plans: Iterable[Plan]) -> list[Plan]:
    """The plans that no other betters in both peak and FLOPs, by FLOPs, the fewest first."""
    best: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.flops, plan.needed_bytes)):
        if not best or plan.needed_bytes < best[-1].needed_bytes:
            best.append(plan)
    return best


def draw_frontier(plans: Plans) -> svg.Drawing:
    """Each measured plan as a mark: its shape is the method, where it fits it is filled and has its number.

    The line joins those that no other betters in both; the red lines are the capacity and what fits for certain.
    """
    request = plans.request
    numbers = {plan: str(place) for place, plan in enumerate(plans.plans, 1)}
    missed = [*plans.losers, *plans.refused.values()]
    shown = [*plans.plans, *(plan for plan in dict.fromkeys(missed) if not plan.at_least)]
    capacity, limit = request.spec.capacity_bytes, request.limit_bytes
    shown = [plan for plan in shown if plan.needed_bytes <= 2 * capacity]
    alt = "; ".join([plans.verdict, *(f"{plan!r}, {plan.flops / 1e12:,.0f} TFLOP" for plan in shown)])
    drawing = svg.Drawing(760, TOP + HEIGHT + 70 + 20 * len(plans.plans), alt)
    title = tr(ko="최대 메모리와 한 스텝의 연산", en="peak memory over the work of a step")
    drawing.text(20, 28, f"{request.title}: {title}", svg.fit_size(f"{request.title}: {title}", 720, 15), bold=True)
    most = max([plan.needed_bytes for plan in shown] + [capacity]) * 1.08
    works = [plan.flops for plan in shown] or [1]
    low, high = 0.9 * min(works), 1.05 * max(works)

    def at(plan: Plan) -> tuple[float, float]:
        return LEFT + (plan.flops - low) / (high - low) * (RIGHT - LEFT), TOP + HEIGHT * (1 - plan.needed_bytes / most)

    _axes(drawing, most, low, high)
    for size, dashes in ((limit, "4 3"), (capacity, None)):
        y = TOP + HEIGHT * (1 - size / most)
        drawing.line(LEFT, y, RIGHT, y, svg.RED, stroke_width=1.5, stroke_dasharray=dashes)
    said = tr(
        ko=f"카드의 한도 {human_bytes(capacity)}, 점선: 판정 한도 {human_bytes(limit)}",
        en=f"capacity {human_bytes(capacity)}, dashed: {human_bytes(limit)} fits for certain",
    )
    middle = (LEFT + RIGHT) / 2
    drawing.text(middle, TOP + HEIGHT * (1 - capacity / most) - 6, said, 12, anchor="middle", fill=svg.RED)
    joined = [at(plan) for plan in frontier(shown)]
    drawing.polyline([p for a, b in itertools.pairwise(joined) for p in (a, (b[0], a[1]))] + joined[-1:],
                     svg.MUTED, stroke_width=1.2)  # fmt: skip
    for plan in reversed(shown):  # those that do not fit below, the first ranked on top
        x, y = at(plan)
        _mark(drawing, x, y, plan.recipe.method, plan.fits)
        if plan in numbers:
            drawing.text(x, y + 4, numbers[plan], 11, anchor="middle", bold=True,
                         fill=svg.ink_on(COLORS[plan.recipe.method]))  # fmt: skip
    _legend(drawing, [method for method in METHODS if any(plan.recipe.method == method for plan in shown)])
    for place, plan in enumerate(plans.plans, 1):
        text = f"{place}. {plan.title}: {plan.needed}" + (" ⚠" if plan.recipe.caution else "")  # in full: the table
        drawing.text(20, TOP + HEIGHT + 62 + 20 * place, text, svg.fit_size(text, 720, 12))
    return drawing


def _axes(drawing: svg.Drawing, most: float, low: float, high: float) -> None:
    step = svg.nice_step(most / 2**30)
    for i in range(int(most / 2**30 / step) + 1):
        y = TOP + HEIGHT * (1 - i * step * 2**30 / most)
        drawing.line(LEFT, y, RIGHT, y, svg.GRID)
        drawing.text(LEFT - 8, y + 4, f"{i * step:g} GiB", 12, anchor="end", fill=svg.MUTED)
    step = svg.nice_step((high - low) / 1e12, 8)
    for i in range(math.ceil(low / 1e12 / step), int(high / 1e12 / step) + 1):
        x = LEFT + (i * step * 1e12 - low) / (high - low) * (RIGHT - LEFT)
        text = f"{i * step:,.0f}" if step >= 1 else f"{i * step:g}"
        drawing.text(x, TOP + HEIGHT + 18, text, 12, anchor="middle", fill=svg.MUTED)
    label = tr(ko="한 스텝의 연산(TFLOP), 모든 GPU 합쳐서", en="TFLOP of a step, all GPUs together")
    drawing.text((LEFT + RIGHT) / 2, TOP + HEIGHT + 36, label, 12, anchor="middle", fill=svg.MUTED)


def _mark(drawing: svg.Drawing, x: float, y: float, method: str, fits: bool) -> None:
    """A circle, a square or a triangle, hollow where it does not fit."""
    color = COLORS[method]
    look = {"fill": color if fits else svg.PAPER, "stroke": color, "stroke_width": 2}
    if method == "full":
        drawing.circle(x, y, 9 if fits else 6, **look)
    elif method == "lora":
        half = 8 if fits else 5.5
        drawing.rect(x - half, y - half, 2 * half, 2 * half, **look)
    else:
        half = 11 if fits else 7
        drawing.polygon([(x, y - half), (x + half, y + 0.7 * half), (x - half, y + 0.7 * half)], **look)


def _legend(drawing: svg.Drawing, methods: list[str]) -> None:
    x = 30.0
    for method in methods:
        _mark(drawing, x, 48, method, True)
        drawing.text(x + 16, 52, method_label(method), 12)
        x += 46 + svg.text_width(method_label(method), 12)
    text = tr(
        ko="비어 있으면 들어가지 않는다. 선: 둘 다 나은 것이 없는 계획", en="hollow: does not fit; line: unbettered"
    )
    drawing.text(x, 52, text, 12, fill=svg.MUTED)
