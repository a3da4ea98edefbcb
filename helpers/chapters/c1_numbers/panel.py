"""Chapter 1's panel: a number's bits in every format."""

from __future__ import annotations

import math
from functools import partial

import ipywidgets as widgets

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

from ...panel import Answer, Panel
from .formats import parse_number
from .pictures import draw_number

PRESETS = ("0.1", "1/3", "2049", "65504", "65520", "70000", "1e-8", "-0.0", "inf", "nan")


class NumberPanel(Panel):
    """Type a number, drag its power of ten, press a preset or a bit: its bits, what is stored, and the error."""

    prefix = "number"

    def __init__(self) -> None:
        super().__init__()
        number, power = tr(ko="숫자", en="number"), tr(ko="10의 거듭제곱", en="power of ten")
        self.text = self.control(widgets.Text, "text", number, value="0.1", continuous_update=True)
        self.controls = {"text": self.text}
        self._place: float | None = None  # where the slider went with a number: there it does not set one
        self.slider = self.control(
            widgets.FloatSlider, "slider", power, self._dragged, value=-1, min=-46, max=39, step=0.1
        )
        self.presets = [
            self.button(f"preset-{index}", text, partial(self._put, text), layout={"width": "70px"})
            for index, text in enumerate(PRESETS)
        ]
        for button in self.presets:
            button.add_class("number-preset")
        self.lay_out([self.text], [self.slider], self.presets)
        self.move(self._changed)

    def answer(self, *, text: str) -> Answer:
        value = parse_number(text)
        kind = tr(ko="파이썬의 float(fp64)으로 읽은 값", en="read as Python's float (fp64)")
        return Answer((f"{kind}: {value!r}",), self._draw(value))

    def _draw(self, value: float) -> svg.Drawing:
        # In a script nobody presses anything.
        return draw_number(value, to="number-text" if self._loop is not None else None)

    def _put(self, text: str) -> None:
        """A preset: the slider goes where the number is, if it has such a place."""
        self.text.value = text
        size = abs(parse_number(text))
        if 10.0**self.slider.min <= size <= 10.0**self.slider.max:
            self._place = round(math.log10(size), 1)
            self.slider.value = self._place

    def _dragged(self) -> None:
        if self._place is not None and abs(self.slider.value - self._place) < 0.05:
            return  # the page may send it back
        self._place = None
        self.text.value = f"{10.0**self.slider.value:.6g}"


def number_panel() -> NumberPanel:
    """Chapter 1: a number, typed, dragged, a preset, or its bits pressed → bits in every format, what is stored."""
    return NumberPanel()
