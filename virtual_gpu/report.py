"""The result of a memory experiment: a report that draws itself, and a table of reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from .drawing import svg
from .language import tr
from .trace.timeline import CATEGORIES, Timeline
from .units import GiB, human_bytes

COLORS = dict(zip(CATEGORIES, (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.GREY), strict=True))


def category_label(category: str) -> str:
    """The category in the reader's language."""
    return {
        "parameters": tr(ko="파라미터", en="parameters"),
        "gradients": tr(ko="그레이디언트", en="gradients"),
        "optimizer": tr(ko="옵티마이저 상태", en="optimizer state"),
        "activations": tr(ko="순전파 상태와 임시 텐서", en="activations and temporaries"),
        "other": tr(ko="버퍼·배치·작업 공간", en="buffers, batch, workspaces"),
    }[category]


def phase_label(phase: str | None) -> str:
    """The phase in the reader's language."""
    return {
        "forward": tr(ko="순전파", en="forward"),
        "backward": tr(ko="역전파", en="backward"),
        "step": tr(ko="스텝", en="step"),
        None: "-",
    }[phase]


@dataclass
class MemoryReport:
    """What one experiment needed. All sizes in bytes; in a notebook it draws itself.

    parameters_bytes, gradients_bytes, optimizer_bytes: their full sizes. activations_bytes: what else is held at the
    peak (activations, temporaries, buffers, workspaces). allocated_bytes: right after the first optimizer step, what
    the book prints. peak_bytes: the most that was held. needed_bytes: what the tensors of the whole experiment need:
    peak_bytes when it fits, more when it does not, None when that is unknown (a real GPU that ran out).
    reserved_bytes: the most that the caching allocator took from the driver for them, None where it was not asked.
    """

    title: str
    gpu_name: str
    is_virtual: bool
    capacity_bytes: int
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    needed_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_phase: str | None = None
    fits: bool = True
    error: str | None = None
    method: str = "run"  # "run": every layer was run; "depth": extrapolated from three depths, proven linear
    setting: dict[str, Any] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline, repr=False)

    @property
    def at_peak(self) -> dict[str, int]:
        """category → bytes at the moment of the peak."""
        return self.timeline.at_peak()

    @property
    def activations_bytes(self) -> int:
        """What is held at the peak besides parameters, gradients and optimizer state."""
        at_peak = self.at_peak
        return at_peak["activations"] + at_peak["other"]

    @property
    def last_phase(self) -> str | None:
        """The phase that was run last: the one that ran out of memory, where one did."""
        return self.timeline.phases[-1].name if self.timeline.phases else None

    def phases(self) -> PhaseTable:
        """Every phase of the run with the bytes at its start, peak and end, as a table."""
        return PhaseTable(self.timeline)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain JSON values, without the timeline."""
        fields = {name: value for name, value in vars(self).items() if name not in ("timeline", "title")}
        return fields | {"activations_bytes": self.activations_bytes, "at_peak": self.at_peak}

    def __str__(self) -> str:
        return f"{self.title}: {self.verdict}"

    __repr__ = __str__

    @property
    def verdict(self) -> str:
        """One line: does it fit, and by how much."""
        capacity, peak = human_bytes(self.capacity_bytes), human_bytes(self.peak_bytes)
        if self.fits:
            reserved = "" if self.reserved_bytes is None else human_bytes(self.reserved_bytes)
            return tr(
                ko=f"들어간다. 최대 {peak}{reserved and f'(예약 {reserved})'}, 한도 {capacity}, "
                f"최대가 되는 때는 {phase_label(self.peak_phase)}",
                en=f"fits. Peak {peak}{reserved and f' ({reserved} reserved)'} of {capacity}, "
                f"in {phase_label(self.peak_phase)}",
            )
        if self.needed_bytes is None:
            return tr(ko=f"메모리 부족. 한도 {capacity}", en=f"out of memory. Capacity {capacity}")
        needed = human_bytes(self.needed_bytes)
        if self.needed_bytes <= self.capacity_bytes:
            return tr(
                ko=f"메모리 부족. 텐서는 {needed}지만, 조각나 못 쓰는 자리까지 합치면 한도 {capacity}를 넘는다",
                en=f"out of memory. Tensors need {needed}, but with what fragmentation loses it is beyond {capacity}",
            )
        return tr(
            ko=f"메모리 부족. {needed}가 필요한데 한도는 {capacity}",
            en=f"out of memory. Needs {needed} of {capacity}",
        )

    @property
    def excess(self) -> str:
        """Why it does not fit: by how much tensors exceed the capacity, or that only the allocator finds no room."""
        over = (self.needed_bytes or 0) - self.capacity_bytes
        if over > 0:
            return tr(
                ko=f"{self.gpu_name}의 한도를 {human_bytes(over)} 넘는다.",
                en=f"{human_bytes(over)} beyond the capacity of {self.gpu_name}.",
            )
        return tr(
            ko=f"텐서는 {self.gpu_name}의 한도보다 {human_bytes(-over)} 작지만, 조각나서 놓을 자리가 없다.",
            en=f"{human_bytes(-over)} below the capacity of {self.gpu_name}, but fragmentation leaves no room.",
        )

    def _repr_svg_(self) -> str:
        return draw_report(self).svg()


class PhaseTable:
    """The phases of a timeline as a table: bytes at the start, at the peak and at the end of each."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline

    def _repr_html_(self) -> str:
        heads = [
            "#",
            tr(ko="단계", en="phase"),
            tr(ko="시작", en="start"),
            tr(ko="최대", en="peak"),
            tr(ko="끝", en="end"),
        ]
        rows = [
            [str(i), phase_label(p.name), *map(human_bytes, (p.total[0], p.peak_bytes, p.total[-1]))]
            for i, p in enumerate(self.timeline.phases, start=1)
        ]
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(f"{p.name}: {human_bytes(p.peak_bytes)}" for p in self.timeline.phases)


class MemoryTable(list):
    """Reports of a sweep as a table: one row each."""

    def chart(self) -> svg.Drawing:
        """The reports as stacked bars at their peak, under the GPU's capacity line."""
        return draw_bars(self)

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for report in self for name in report.setting if self._varies(name)))
        heads = [
            *(setting_label(name) for name in names),
            category_label("parameters"),
            category_label("gradients"),
            category_label("optimizer"),
            tr(ko="첫 스텝 직후", en="after the first step"),
            tr(ko="최대", en="peak"),
            tr(ko="최대인 때", en="peak in"),
            tr(ko="결과", en="verdict"),
        ]
        rows = []
        for report in self:
            done = report.allocated_bytes > 0
            peak = report.needed_bytes if report.needed_bytes is not None else report.peak_bytes
            rows.append(
                [
                    *(setting_value(report.setting.get(name, "-")) for name in names),
                    human_bytes(report.parameters_bytes),
                    human_bytes(report.gradients_bytes) if done else "-",
                    human_bytes(report.optimizer_bytes) if done else "-",
                    human_bytes(report.allocated_bytes) if done else "-",
                    human_bytes(peak),
                    phase_label(report.peak_phase)
                    if report.fits
                    else tr(
                        ko=f"{phase_label(report.last_phase)}에서 멈춤", en=f"died in {phase_label(report.last_phase)}"
                    ),
                    tr(ko="들어간다", en="fits") if report.fits else tr(ko="메모리 부족", en="out of memory"),
                ]
            )
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(map(str, self))

    def _varies(self, name: str) -> bool:
        return len({str(report.setting[name]) for report in self if name in report.setting}) > 1 or len(self) == 1


def setting_label(name: str) -> str:
    """The name of an experiment's setting in the reader's language."""
    return {
        "model_id": tr(ko="모델", en="model"),
        "batch_size": tr(ko="배치 크기", en="batch size"),
        "gradient_accumulation_steps": tr(ko="누적", en="accumulation"),
        "gradient_checkpointing": tr(ko="체크포인팅", en="checkpointing"),
        "sequence_length": tr(ko="길이", en="length"),
        "precision": tr(ko="정밀도", en="precision"),
        "optimizer": tr(ko="옵티마이저", en="optimizer"),
        "attention": tr(ko="어텐션", en="attention"),
        "peft": "peft",
        "lora_rank": "rank",
        "lora_targets": tr(ko="대상 층", en="target layers"),
        "gpu": "GPU",
    }.get(name, name)


def setting_value(value: Any) -> str:
    """A setting's value in the reader's language: a switch is on or off, and None is none."""
    if value is None:
        return tr(ko="없음", en="none")
    return tr(ko="켬" if value else "끔", en="on" if value else "off") if isinstance(value, bool) else str(value)


def html_table(heads: list[str], rows: list[list[str]]) -> str:
    """A plain HTML table; every cell is escaped."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def draw_report(report: MemoryReport) -> svg.Drawing:
    """The stacked bar at the peak under the GPU's capacity, its numbers, and the timeline."""
    drawing = svg.Drawing(760, 430, f"{report.title}: {report.verdict}")
    drawing.text(20, 30, report.title, size=svg.fit_size(report.title, 720, 16), bold=True)
    drawing.text(20, 52, report.verdict, fill=svg.INK if report.fits else svg.RED, bold=not report.fits)
    _draw_bar(drawing, report, 20, 86, 720)
    _draw_timeline(drawing, report, 62, 216, 678, 170)
    return drawing


def draw_bars(reports: list[MemoryReport]) -> svg.Drawing:
    """One stacked bar a report, at its peak; what it would need beyond what it got is outlined."""
    table = MemoryTable(reports)
    varying = [name for name in reports[0].setting if table._varies(name)] if len(reports) > 1 else []
    capacity = max(report.capacity_bytes for report in reports)
    gpus = list(dict.fromkeys(report.gpu_name for report in reports))
    labels = [
        ", ".join(
            f"{setting_label(name)} {setting_value(report.setting[name])}" for name in varying if name in report.setting
        )
        or report.title
        for report in reports
    ]
    size = min(svg.fit_size(label, 400, 12) for label in labels)
    left = 30 + max(svg.text_width(label, size) for label in labels)
    top, row, width = 64, 34, 760 - left - 120
    drawing = svg.Drawing(760, top + row * len(reports) + 68, "; ".join(map(str, reports)))
    head = reports[0].title.split(" · ")[0] + (f" · {gpus[0]}" if len(gpus) == 1 else "")
    drawing.text(20, 28, head, size=15, bold=True)
    longest = max(max(report.needed_bytes or 0, report.peak_bytes) for report in reports)
    scale = width / max(longest, capacity * 1.02)
    for i, (label, report) in enumerate(zip(labels, reports, strict=True)):
        y = top + row * i
        drawing.text(left - 10, y + 15, label, size=size, anchor="end")
        x = left
        for category, nbytes in report.at_peak.items():
            drawing.rect(x, y, nbytes * scale, 20, COLORS[category])
            x += nbytes * scale
        needed = max(report.needed_bytes or 0, report.peak_bytes)
        if needed * scale > x - left + 0.5:
            drawing.rect(x, y, left + needed * scale - x, 20, "none", stroke=svg.RED, stroke_dasharray="4 3")
        over = "" if report.fits else tr(ko=" 부족", en=" OOM")
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


def _draw_bar(drawing: svg.Drawing, report: MemoryReport, left: float, top: float, width: float) -> None:
    at_peak = report.at_peak
    scale = width / max(sum(at_peak.values()), report.needed_bytes or 0, report.capacity_bytes * 1.06)
    x = left
    for category, nbytes in at_peak.items():
        drawing.rect(x, top, nbytes * scale, 30, COLORS[category])
        x += nbytes * scale
    if report.needed_bytes is not None and report.needed_bytes > sum(at_peak.values()):
        rest = (report.needed_bytes - sum(at_peak.values())) * scale
        drawing.rect(x, top, rest, 30, "none", stroke=svg.RED, stroke_dasharray="4 3")
    limit = left + report.capacity_bytes * scale
    drawing.line(limit, top - 8, limit, top + 38, svg.RED, stroke_width=2)
    label = f"{report.gpu_name} {human_bytes(report.capacity_bytes)}"
    room = limit - left > svg.text_width(label, 12)
    x, anchor = (limit - 4, "end") if room else (limit + 4, "start")
    drawing.text(x, top - 10, label, size=12, anchor=anchor, fill=svg.RED)
    for i, (category, nbytes) in enumerate(at_peak.items()):
        column, row = i % 3, i // 3
        cx, cy = left + column * 245, top + 58 + row * 22
        drawing.rect(cx, cy - 10, 11, 11, COLORS[category])
        drawing.text(cx + 17, cy, f"{category_label(category)} {human_bytes(nbytes)}", size=12)


def _draw_timeline(
    drawing: svg.Drawing, report: MemoryReport, left: float, top: float, width: float, height: float
) -> None:
    phases = report.timeline.phases
    if not phases:
        return
    highest = max(report.timeline.peak_bytes, report.capacity_bytes) * 1.08
    step = svg.nice_step(highest / GiB) * GiB

    def y_of(nbytes: float) -> float:
        return top + height * (1 - nbytes / highest)

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
                edge = [*zip(xs, upper[:, c], strict=True), *zip(xs[::-1], lower[::-1, c], strict=True)]
                drawing.polygon([(x, y_of(v)) for x, v in edge], COLORS[category])
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
    drawing.text(
        peak_x + (-8 if on_right else 8),
        peak_y - 7,
        f"{name} {human_bytes(report.timeline.peak_bytes)}",
        size=12,
        anchor="end" if on_right else "start",
        bold=True,
    )
    caption = tr(ko="학습이 진행되는 순서 →", en="training goes on →")
    drawing.text(left + width, top + height + 36, caption, size=11, anchor="end", fill=svg.MUTED)


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
