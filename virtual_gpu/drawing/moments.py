"""A timeline that answers: of the moment under the pointer or the focus, the bytes by category and the largest tensors.

No script: CSS shows the text of the one moment, and of the peak where none is meant, as a still picture does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..language import tr
from ..trace.details import Details, Held
from ..trace.timeline import CATEGORIES, PhaseCurve
from ..units import human_bytes
from . import svg
from .labels import category_label, phase_label

if TYPE_CHECKING:
    from ..report import MemoryReport

SLICES = 48  # about so many moments of a timeline
TENSORS = 4
_STYLE = """<style>
.vg-told, .vg-here { visibility: hidden; pointer-events: none }
.vg-moment { outline: none }
.vg-moment:hover .vg-told, .vg-moment:focus .vg-told, .vg-moment:hover .vg-here, .vg-moment:focus .vg-here
{ visibility: visible }
.vg-moments:hover .vg-rest, .vg-moments:focus-within .vg-rest { visibility: hidden }
</style>"""


class Area(NamedTuple):
    """Where a timeline lies on its sheet, in pixels, and the bytes at its upper end."""

    left: float
    top: float
    width: float
    height: float
    highest: float

    def y_of(self, nbytes: Any) -> Any:
        """The height at which so many bytes lie; of an array one by one."""
        return self.top + self.height * (1 - nbytes / self.highest)


def draw_moments(drawing: svg.Drawing, report: MemoryReport, area: Area) -> None:
    """Slices over the timeline, each with what it tells, and below it the place for that."""
    phases, details = report.timeline.phases, report.details
    base = drawing.height
    drawing.height += 74 + (18 * TENSORS + 20 if details else 0)
    drawing.role = "group"  # its parts can be reached
    drawing.open("g", class_="vg-moments")
    drawing.raw(_STYLE)
    wide, (peak_phase, peak_moment) = area.width / len(phases), report.timeline.peak
    for number, phase in enumerate(phases):
        count = max(4, SLICES // len(phases))
        for column in range(count):
            moment, is_top = _moment(phase, column, count)
            lines = [*_lines(report, number, moment), *_tensors(details, number, moment)]
            # The keyboard goes from one phase's highest moment to the next.
            stop = {"tabindex": 0, "role": "img", "aria_label": ". ".join(filter(None, lines))} if is_top else {}
            drawing.open("g", class_="vg-moment", **stop)
            x = area.left + wide * (number + column / count)
            drawing.rect(x, area.top, wide / count, area.height, svg.PAPER, fill_opacity=0)
            at = area.left + wide * (number + moment / max(len(phase.live) - 1, 1))
            drawing.line(at, area.top, at, area.top + area.height, svg.INK, class_="vg-here", stroke_width=1.5)
            _tell(drawing, lines, base, "vg-told")
            drawing.close("g")
    lines = [*_lines(report, peak_phase, peak_moment), *_tensors(details, peak_phase, peak_moment)]
    _tell(drawing, lines, base, "vg-rest")
    drawing.close("g")


def _moment(phase: PhaseCurve, column: int, count: int) -> tuple[int, bool]:
    """The highest moment of a column of a phase, and whether it is the phase's highest."""
    last = len(phase.live) - 1
    low, high = column / count * last, (column + 1) / count * last
    inside = np.arange(int(np.ceil(low)), int(high) + 1)
    moment = int(inside[phase.total[inside].argmax()]) if len(inside) else round((low + high) / 2)
    top = int(phase.total.argmax())
    return moment, column == min(int(top / max(last, 1) * count), count - 1)


def _lines(report: MemoryReport, number: int, moment: int) -> Iterator[str]:
    """Which moment, and its bytes by category."""
    phase = report.timeline.phases[number]
    live = dict(zip(CATEGORIES, phase.live[moment].tolist(), strict=True))
    total = sum(live.values())
    rest = report.capacity_bytes - total
    left = tr(ko=f"한도까지 {human_bytes(rest)}", en=f"{human_bytes(rest)} below the capacity")
    over = tr(ko=f"한도를 {human_bytes(-rest)} 넘는다", en=f"{human_bytes(-rest)} beyond the capacity")
    yield f"{number + 1}. {phase_label(phase.name)}: {human_bytes(total)}, {left if rest >= 0 else over}"
    parts = [f"{category_label(name)} {human_bytes(nbytes)}" for name, nbytes in live.items() if nbytes]
    yield " · ".join(parts[:3])
    yield " · ".join(parts[3:])


def _tensors(details: Details | None, number: int, moment: int) -> Iterator[str]:
    """The tensors that take most, alike ones together."""
    if details is None:
        return
    groups: dict[tuple, list[Held]] = {}
    for held in details.at(int(details.trace.moments(number)[moment])):
        groups.setdefault((held.category, *_named(held)), []).append(held)
    most = sorted(groups.items(), key=lambda item: -sum(held.held for held in item[1]))
    for (category, name, shape), alike in most[:TENSORS]:
        nbytes = sum(held.held for held in alike)
        count = f" × {len(alike)}" if len(alike) > 1 else ""
        yield f"{human_bytes(nbytes)} {category_label(category)}: {name} {shape}{count}"


def _named(held: Held) -> tuple[str, str]:
    """A tensor's name or the operation that made it, a layer's number left open; its dtype and shape."""
    origin, module = held.origin, held.place.module
    name = ".".join(filter(None, (module, origin.name))) if origin.name else f"{module or '-'}, {held.place.operation}"
    shape = "" if origin.shape is None else f"{origin.dtype} {'×'.join(map(str, origin.shape))}"
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", name), shape


def _tell(drawing: svg.Drawing, lines: list[str], base: int, kind: str) -> None:
    drawing.open("g", class_=kind, aria_hidden="true")
    for number, line in enumerate(line for line in lines if line):
        y = base + 14 + 19 * number
        drawing.text(20, y, line, size=max(svg.fit_size(line, 720, 12), 9), bold=number == 0)
    drawing.close("g")
