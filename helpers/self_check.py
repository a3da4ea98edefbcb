"""Exercises that check themselves: `check` says right, close or wrong and by how much; `hint` and `solution` help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from virtual_gpu.language import tr


@dataclass
class Exercise:
    """One exercise. An answer of None or `...` means that the stub is still empty."""

    number: str
    judge: Callable[[Any], str]
    hints: Callable[[], list[str]]
    answer: str  # code, shown as it is
    _shown: int = 0

    def check(self, answer: Any) -> None:
        """Print what is right, close or wrong in the answer, and by how much."""
        try:
            verdict = self.judge(answer)
        except Empty:
            verdict = tr(ko="아직 비어 있다. 칸을 채운 뒤 다시 실행한다.", en="Still empty: fill it in and run again.")
        except Exception as error:  # the reader's own code: what went wrong in it is the answer to the check
            verdict = tr(ko="답을 실행하다가 오류가 났다", en="Your answer raised an error")
            verdict += f": {type(error).__name__}: {error}"
        print(f"[{self.number}] {verdict}")

    def hint(self) -> None:
        """Print the next hint; after the last one, it again."""
        hints = self.hints()
        self._shown = min(self._shown + 1, len(hints))
        print(f"[{self.number}] {self._shown}/{len(hints)} {hints[self._shown - 1]}")

    def solution(self) -> None:
        """Print a solution."""
        print(self.answer)


class Empty(Exception):
    """The reader has not filled in the stub."""


def filled(value: Any) -> Any:
    """`value`, unless the stub is still empty."""
    if value is None or value is ...:
        raise Empty
    return value


def compare(got: Any, expected: float, what: str) -> str | None:
    """None when right; else how wrong, as a sentence. Within 2 % is close."""
    got = filled(got)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return tr(ko=f"{what}: 숫자가 아니라 {got!r}이 나왔다.", en=f"{what}: got {got!r}, not a number.")
    if got == expected:
        return None
    ratio = got / expected if expected else float("inf")
    shown = f"{got:,.0f} / {expected:,.0f}"
    if abs(ratio - 1) < 0.02:
        return tr(ko=f"{what}: 거의 맞다. {shown} ({ratio - 1:+.2%})", en=f"{what}: close. {shown} ({ratio - 1:+.2%})")
    return tr(ko=f"{what}: 답이 정답의 {ratio:.3g}배다. {shown}", en=f"{what}: {ratio:.3g} times too large. {shown}")


def right(more: str = "") -> str:
    """The verdict of a right answer."""
    return tr(ko="정답!", en="Right!") + (f" {more}" if more else "")
