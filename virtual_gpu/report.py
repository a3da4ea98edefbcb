"""The result of a memory experiment: a report that draws itself, and a table of reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .drawing import svg
from .drawing.frames import frame_of
from .drawing.labels import category_label, html_table, phase_label, setting_label, setting_value, varies
from .drawing.plots import plot_bars, plot_timeline
from .drawing.report import draw_bars, draw_report
from .drawing.zoom import Zoom
from .errors import WrongValue
from .language import tr
from .room import FITS, TIGHT, TOO_MUCH, Room
from .trace.details import Details
from .trace.timeline import CATEGORIES, Timeline
from .units import human_bytes

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclass
class MemoryReport:
    """What one experiment needed. All sizes in bytes; in a notebook it draws itself.

    parameters_bytes, gradients_bytes, optimizer_bytes: their full sizes. activations_bytes: what else is held at the
    peak (activations, temporaries, buffers, workspaces). allocated_bytes: right after the first optimizer step, what
    the book prints. peak_bytes: the most that was held. needed_bytes: what the tensors of the whole experiment need:
    peak_bytes when it fits, more when it does not, None when that is unknown (a real GPU that ran out).
    reserved_bytes: the most that the caching allocator took from the driver for them, None where it was not asked.
    fits: whether it gets through in capacity_bytes, the card's published value. Whoever must be sure asks `judgement`,
    which looks at the range around that value: FITS or TIGHT where `fits`, TOO_MUCH where not.
    paged_bytes: optimizer state in CUDA's managed memory, in none of the others (see `models.pages`).
    offloaded_bytes: what an optimizer step sends to the CPU's RAM, and gets back; pinned_bytes: what a micro-batch
    of it takes there.
    run_again: the same run with the tensor behind each block, for `zoom`; None where it cannot be had.
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
    paged_bytes: int = 0
    offloaded_bytes: int = 0
    pinned_bytes: int = 0
    peak_phase: str | None = None
    fits: bool = True
    error: str | None = None
    method: str = "run"  # "run": every layer was run; "depth": continued from two shallow runs
    setting: dict[str, Any] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline, repr=False)
    room: Room | None = field(default=None, repr=False)  # of the card, where it is one of the catalogue
    run_again: Callable[[], Details] | None = field(default=None, repr=False, compare=False)

    @property
    def judgement(self) -> str:
        """FITS (whatever the unknowns of `room` are), TIGHT (by the published values alone) or TOO_MUCH."""
        if not self.fits:
            return TOO_MUCH
        sure = self.room is None or self.reserved_bytes is None or self.room.verdict(self.reserved_bytes) == FITS
        return FITS if sure else TIGHT

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

    def zoom(self, phase: int | None = None) -> Zoom:
        """The bar opened: what was held at the peak, by category, phase, layer, module and tensor; bytes sum exactly.

        phase: its number in `phases()`, to see the highest moment of that one. It runs all of it once more, looking at
        every operation: a few seconds for a large model, kept for the next call. WrongValue for a real GPU's report,
        for a run that shared its GPU with other tensors, and for a prediction of GRPO's.
        """
        if phase is None:
            phase = self.timeline.peak[0] + 1 if self.timeline.phases else 0
        numbers = range(1, len(self.timeline.phases) + 1)
        if isinstance(phase, bool) or phase not in numbers:
            raise WrongValue(
                tr(
                    ko=f"phase={phase!r}: phases()의 번호(1~{len(numbers)})여야 한다.",
                    en=f"phase={phase!r}: must be a number of phases(), 1 to {len(numbers)}.",
                )
            )
        return Zoom(self.title, self._details, phase - 1)

    @property
    def details(self) -> Details | None:
        """The tensors behind the bytes, where `zoom` has looked at them already."""
        return vars(self).get("_details")

    @cached_property
    def _details(self) -> Details:
        details = None if self.run_again is None else self.run_again()
        if details is None and self.setting.get("objective") == "grpo":
            raise WrongValue(
                tr(
                    ko="objective='grpo': 답을 만드는 단계의 텐서는 기록하지 않으므로 열어 볼 수 없다. 단계마다의 "
                    "바이트는 phases()가 보여 준다.",
                    en="objective='grpo': no tensors of the generation are recorded, so there is none to zoom into. "
                    "phases() has the bytes of each phase.",
                )
            )
        same = details is not None and details.trace.names == self.timeline.trace.names
        if not same or details.trace.timeline().at_peak() != self.at_peak:
            raise WrongValue(
                tr(
                    ko="이 보고서에는 텐서의 기록이 없다(진짜 GPU이거나, GPU에 다른 텐서가 있었다). "
                    "predict_memory로 예측한 보고서를 연다.",
                    en="This report knows no tensors (a real GPU, or other tensors lay on it): zoom into a prediction.",
                )
            )
        return details

    def to_frame(self) -> pandas.DataFrame:
        """The phases as rows, numbered as in `phases()`: bytes at the start, peak and end, at the peak by category."""
        rows = (
            {"phase": phase.name}
            | {"start": int(phase.total[0]), "peak": phase.peak_bytes, "end": int(phase.total[-1])}
            | dict(zip(CATEGORIES, phase.live[phase.total.argmax()].tolist(), strict=True))
            for phase in self.timeline.phases
        )
        return frame_of(rows, first=1)

    def plot(self, ax: Axes | None = None) -> Axes:
        """The timeline on matplotlib's axes, new ones where none are given."""
        return plot_timeline(self, ax)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain JSON values, without the timeline."""
        left_out = ("timeline", "title", "room", "run_again")
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
        numbers |= {"judgement": self.judgement, "room": self.room and self.room.to_dict()}
        return numbers | {"activations_bytes": self.activations_bytes, "at_peak": self.at_peak}

    def __str__(self) -> str:
        return f"{self.title}: {self.verdict}"

    __repr__ = __str__

    @property
    def verdict(self) -> str:
        """One line: does it fit, and by how much; and the pages, which are beside that."""
        pages = human_bytes(self.paged_bytes)
        beside = tr(
            ko=f". 옵티마이저 상태의 페이지 {pages}는 이 밖에 있다", en=f"; pages of state, {pages}, are beside it"
        )
        return self._fits_or_not + (beside if self.paged_bytes else "")

    @property
    def _fits_or_not(self) -> str:
        capacity, peak = human_bytes(self.capacity_bytes), human_bytes(self.peak_bytes)
        if self.fits:
            reserved = "" if self.reserved_bytes is None else human_bytes(self.reserved_bytes)
            card = self.room.line(self.reserved_bytes) if self.room and self.reserved_bytes else ""
            card = card and f". {card}"
            tight = self.judgement == TIGHT
            fits = tr(ko="빠듯하게 들어간다" if tight else "들어간다", en="tight" if tight else "fits")
            return tr(
                ko=f"{fits}. 최대 {peak}{reserved and f'(예약 {reserved})'}, 한도 {capacity}, "
                f"최대 시점: {phase_label(self.peak_phase)}{card}",
                en=f"{fits}. Peak {peak}{reserved and f' ({reserved} reserved)'} of {capacity}, "
                f"in {phase_label(self.peak_phase)}{card}",
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

    def chart(self, marked: int | None = None) -> svg.Drawing:
        """The reports as stacked bars at their peak, under the GPU's capacity line; marked: all others are pale."""
        return draw_bars(self, marked)

    def plot(self, ax: Axes | None = None) -> Axes:
        """The reports as stacked bars on matplotlib's axes, new ones where none are given."""
        return plot_bars(self, ax)

    def to_frame(self) -> pandas.DataFrame:
        """The reports as rows: their settings, then their numbers, in bytes."""
        return frame_of(
            report.setting
            | {name: value for name, value in report.to_dict().items() if name not in ("setting", "at_peak", "room")}
            for report in self
        )

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for report in self for name in report.setting if varies(name, self)))
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
                    {
                        FITS: tr(ko="들어간다", en="fits"),
                        TIGHT: tr(ko="빠듯하다", en="tight"),
                        TOO_MUCH: tr(ko="메모리 부족", en="out of memory"),
                    }[report.judgement],
                ]
            )
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(map(str, self))
