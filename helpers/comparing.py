"""A panel whose picture is a memory report: it answers to the pointer, and compares a setting with another one.

The setting before stays as a thin bar below, with the difference; `hold` keeps one there. The axis stands still until
what is shown needs more, or less than half.
"""

from __future__ import annotations

import ipywidgets as widgets

from virtual_gpu.drawing.report import axis_end, draw_report
from virtual_gpu.language import tr
from virtual_gpu.report import MemoryReport

from .panel import ROW, Panel, status_line


class ReportPanel(Panel):
    """A panel whose answers are memory reports."""

    def __init__(self) -> None:
        super().__init__()
        self.report: MemoryReport | None = None
        self._before: MemoryReport | None = None  # the setting before
        self._held: MemoryReport | None = None
        self._axis = 0.0
        # In a script nobody looks from one setting to the next: there a setting has one picture, the report's own.
        self.compares = self._loop is not None
        hold, look = tr(ko="이 설정을 고정", en="Hold this setting"), tr(ko="텐서 보기", en="Show tensors")
        told = tr(ko="다음 설정들을 이 설정과 비교한다", en="the next settings are compared with this one")
        self.hold = self.control(
            widgets.ToggleButton, "hold", hold, self._hold, value=False, icon="thumb-tack", tooltip=told, layout={}
        )
        told = tr(
            ko="모든 연산을 한 번 더 실행해서, 순간마다 가장 큰 텐서를 찾는다(몇 초)",
            en="runs every operation once more to find the largest tensors of each moment (seconds)",
        )
        self.look = self.button("look", look, self._look, icon="search", tooltip=told)
        self.tools = widgets.HBox([self.hold, self.look], layout=ROW)

    def clear(self) -> None:
        super().clear()
        self.report = self._before = None

    def show(self, *lines: str, picture: MemoryReport) -> None:
        if self.report is not None and self.report.title != picture.title:
            self._before = self.report
        self.report = picture
        end = axis_end(picture)
        if not end <= self._axis <= 2 * end:
            self._axis = end
        self._draw()
        self.status.value = "".join(map(status_line, lines))

    def _hold(self) -> None:
        self._held = self.report if self.hold.value else None
        if self.report is not None:
            self._draw()

    def _look(self) -> None:
        """Find the tensors of the report that is shown; its picture tells of them from then on."""
        if self.report is None:
            return
        self.report.zoom()
        self._draw()

    def _draw(self) -> None:
        self.picture.layout.min_height = None
        if not self.compares:
            self.picture.value = self.report._repr_svg_()
            return
        against = self._held or self._before
        if against is not None and against.title == self.report.title:
            against = None
        axis = max(self._axis, axis_end(against) if against else 0)
        self.picture.value = draw_report(self.report, answers=True, against=against, axis_bytes=axis).svg()
