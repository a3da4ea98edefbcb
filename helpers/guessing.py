"""The reader's guesses: written before a run, drawn beside what came out, counted at the end of a chapter."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from virtual_gpu.drawing.svg import BLUE, GREY, INK, MUTED, Drawing, text_width
from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import GB, GiB, MiB, choose

from .environment import html_rows

# What one of a unit is in what a run returns: bytes, a share of 1, a plain number.
_ONE = {"MiB": MiB, "GiB": GiB, "MB": 10**6, "GB": GB, "%": 0.01}
CLOSE = 0.2  # of the truth, either way
_made: dict[str, Guess] = {}


class Sentence(str):
    """A text that a notebook shows as it reads, without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


class Guess:
    """One guess. value: None until the reader writes his; unit: its unit, or the names to choose from."""

    def __init__(self, name: str, value: Any, unit: str | tuple[str, ...]):
        self.name, self.unit, self.truth = name, unit, None
        if value is None or value is ...:
            self.value = None
        elif isinstance(unit, tuple):
            self.value = choose(value, unit, tr(ko="예상", en="guess"))
        elif isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
            raise WrongValue(
                tr(ko=f"예상 {value!r}: 0 이상의 숫자여야 한다.", en=f"guess {value!r}: must be a number, 0 or more.")
            )
        else:
            self.value = value

    def against(self, truth: Any) -> Drawing | str:
        """The guess beside what came out: bytes for a unit of bytes, a share of 1 for %, else a number or a name."""
        if isinstance(self.unit, tuple):
            self.truth = choose(truth, self.unit, tr(ko="결과", en="result"))
            return Sentence(self._told())
        self.truth = float(truth) / _ONE.get(self.unit, 1)
        return _drawn(self)

    def _told(self) -> str:
        if self.value is None:
            return tr(ko=f"결과는 {self.truth}.", en=f"It is {self.truth}.")
        said = tr(ko="맞혔다", en="Right") if self.is_close else tr(ko="빗나갔다", en="Wrong")
        return tr(
            ko=f"{said}. 예상 {self.value}, 결과 {self.truth}.",
            en=f"{said}: {self.value} guessed, {self.truth} found.",
        )

    @property
    def is_close(self) -> bool:
        """Written, and within a fifth of what came out (a name: the same)."""
        if self.value is None or self.truth is None:
            return False
        if isinstance(self.unit, tuple):
            return self.value == self.truth
        return abs(self.value - self.truth) <= CLOSE * abs(self.truth)

    def said(self, value: Any) -> str:
        """A value with its unit; "–" for none."""
        if value is None:
            return "–"
        if isinstance(value, str):
            return value
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return f"{number}{'%' if self.unit == '%' else f' {self.unit}' if self.unit else ''}"

    def __repr__(self) -> str:
        if self.value is None:
            choices = " | ".join(self.unit) if isinstance(self.unit, tuple) else self.unit or tr(ko="숫자", en="number")
            return tr(
                ko=f"[{self.name}] 아직 비어 있다. None 자리에 예상을 적고 다시 실행한다. ({choices})",
                en=f"[{self.name}] Still empty: write your guess where None stands. ({choices})",
            )
        return f"[{self.name}] {self.said(self.value)}"


def guess(name: str, value: Any, unit: str | tuple[str, ...] = "") -> Guess:
    """A guess before a run. `.against(result)` draws it beside the result.

    value: a number in `unit` ("GiB", "MiB", "GB", "MB", "%", any other word, or none), or one of the names where `unit`
    is a tuple of names. None: not written yet. Raises WrongValue or UnknownName for what is neither.
    """
    _made[name] = Guess(name, value, unit)
    return _made[name]


class Tally(list):
    """The guesses that were set against a result, in their order."""

    def _rows(self) -> list[list[str]]:
        return [[one.name, one.said(one.value), one.said(one.truth), _off(one)] for one in self]

    def __repr__(self) -> str:
        written, close = sum(one.value is not None for one in self), sum(one.is_close for one in self)
        lines = [" · ".join(row) for row in self._rows()]
        ko, en = self._counted_as()
        lines.append(
            tr(
                ko=f"예상 {len(self)}개 가운데 {written}개를 적었고, {close}개{ko}.",
                en=f"{written} of {len(self)} guesses written, {close} of them {en}.",
            )
        )
        return "\n".join(lines)

    def _counted_as(self) -> tuple[str, str]:
        """What was counted, in Korean and English: of a name there is no near."""
        kinds = {isinstance(one.unit, tuple) for one in self}
        if kinds == {True}:
            return "가 맞았다", "right"
        if kinds == {True, False}:
            return "를 맞혔다(수는 20% 안이면 맞힌 것으로 센다)", "right (a number: within 20 %)"
        return "가 20% 안에 들었다", "within 20 %"

    def _repr_html_(self) -> str:
        heads = ("", tr(ko="예상", en="guess"), tr(ko="결과", en="result"), tr(ko="차이", en="off by"))
        return html_rows(heads, self._rows()) + f"<p>{repr(self).splitlines()[-1]}</p>"


def guesses() -> Tally:
    """All guesses of this session that have met their result."""
    return Tally(one for one in _made.values() if one.truth is not None)


def _off(one: Guess) -> str:
    if one.value is None:
        return "–"
    if isinstance(one.unit, tuple):
        return tr(ko="맞음", en="right") if one.is_close else tr(ko="다름", en="wrong")
    return f"{one.value / one.truth - 1:+.0%}" if one.truth else ("0%" if one.value == 0 else "–")


def _drawn(one: Guess) -> Drawing:
    guessed, found = tr(ko="내 예상", en="my guess"), tr(ko="결과", en="result")
    bars = [(guessed, one.value, GREY), (found, one.truth, BLUE)]
    said = f"{guessed} {one.said(one.value)}, {found} {one.said(one.truth)}"
    if one.value is None:
        said = tr(
            ko=f"결과 {one.said(one.truth)}. 예상은 적지 않았다", en=f"{one.said(one.truth)}; nothing was guessed"
        )
    drawing = Drawing(640, 74, f"{one.name}: {said}")
    longest = max(one.value or 0, one.truth, 1e-12)
    for row, (label, value, color) in enumerate(bars):
        y = 12 + 30 * row
        drawing.text(74, y + 15, label, 13, "end", MUTED)
        if value is None:
            drawing.text(84, y + 15, tr(ko="적지 않았다", en="not written"), 13, fill=MUTED)
            continue
        width = 400.0 * value / longest
        drawing.rect(84, y, width, 20, color)
        text = one.said(value)
        drawing.text(92 + width, y + 15, text, 13, fill=INK, bold=True)
        if row == 0:
            drawing.text(100 + width + text_width(text), y + 15, f"({_off(one)})", 13, fill=MUTED)
    return drawing
