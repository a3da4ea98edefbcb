"""Chapter 10's panel: a traceback is pasted, the doctor answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ipywidgets as widgets

from virtual_gpu.doctor import Diagnosis, diagnose
from virtual_gpu.language import tr

from ...panel import Panel, status_line
from .broken import PROGRAMS, dead

MOST = 200_000  # characters: of a longer text the end is read, where the error stands

# Other panels' tables hold numbers, whose lines do not break; the cells of this one are sentences.
_SENTENCES = """<style>
.doctor-panel .course-shown table { white-space: normal }
.doctor-panel .course-shown td:has(pre, code) { min-width: 13em }
.doctor-panel .course-shown tr:has(pre, code) > td:first-child { min-width: 9em }
</style>"""


class DoctorPanel(Panel):
    """Paste an error, press: the diagnosis. What is pasted is data; nothing of it is executed or sent anywhere."""

    prefix = "doctor"

    def __init__(self) -> None:
        super().__init__()
        names = [(tr(ko="(직접 붙여 넣는다)", en="(paste your own)"), 0)]
        names += [(tr(ko=f"프로그램 {n}", en=f"program {n}"), n) for n in PROGRAMS]
        self.controls = {
            "example": self.control(
                widgets.Dropdown, "example", tr(ko="예", en="example"), self._fill, options=names, value=0
            ),
            "text": self.control(
                widgets.Textarea, "text", tr(ko="오류", en="error"),
                layout={"width": "100%", "max_width": "760px", "height": "220px"},
                placeholder=tr(ko="traceback을 통째로 붙여 넣는다", en="paste the whole traceback"),
            ),
        }  # fmt: skip
        self.ask = self.button(
            "ask", tr(ko="진단", en="Diagnose"), self._ask, button_style="primary", icon="stethoscope"
        )
        self.diagnosis: Diagnosis | None = None
        self.lay_out([self.controls["example"]], [self.ask], [self.controls["text"]])
        self._changed()
        self.ahead.begin(None)

    def nearby(self, moved: Any = None) -> Iterator[dict[str, Any]]:
        """Every example; a text is read in no time."""
        yield from (self.values() | {"example": number} for number in PROGRAMS)

    def pieces(self, *, example: int, text: str) -> Iterator[Callable[[], Any]]:
        yield partial(dead, example)

    def clear(self) -> None:
        self.diagnosis = None
        super().clear()

    def _fill(self) -> None:
        if number := self.controls["example"].value:
            self.clear()
            running = tr(
                ko=f"프로그램 {number}: 가상 T4에서 실행하는 중이다.", en=f"Program {number} runs on a virtual T4."
            )
            self.status.value = status_line(running)
            self.controls["text"].value = dead(number)
            self._ask()

    def _changed(self) -> None:
        """Another text: what was said of the one before does not stay."""
        self.clear()
        self.status.value = status_line(tr(ko="'진단'을 누른다.", en="Press 'Diagnose'."))

    def _ask(self) -> None:
        text = self.controls["text"].value
        if not text.strip():
            self.clear()
            said = tr(
                ko="비어 있다. 오류 메시지나 traceback을 붙여 넣는다.", en="Empty: paste an error or its traceback."
            )
            self.status.value = status_line(said)
            return
        self.diagnosis = diagnose(text[-MOST:], cut=len(text) > MOST)
        self.picture.value = _SENTENCES + self.diagnosis._repr_html_()
        self.status.value = status_line(
            tr(ko="읽었다. 아무 데도 보내지 않았다.", en="Read; nothing was sent anywhere.")
        )


def doctor_panel() -> DoctorPanel:
    """Chapter 10: a pasted traceback → the cause, how sure, what it is not, what to try."""
    return DoctorPanel()
