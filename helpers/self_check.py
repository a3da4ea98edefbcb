"""Exercises that check themselves: `check` says right, close or wrong and by how much; `hint` and `solution` help.

A case is an exercise with a few experiments to find its answer by.
"""

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
    verdict: str = ""  # of the last check
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
        self.verdict = verdict
        print(f"[{self.number}] {verdict}")

    def hint(self) -> None:
        """Print the next hint; after the last one, it again."""
        hints = self.hints()
        self._shown = min(self._shown + 1, len(hints))
        print(f"[{self.number}] {self._shown}/{len(hints)} {hints[self._shown - 1]}")

    def solution(self) -> None:
        """Print a solution."""
        print(self.answer)


@dataclass
class Case(Exercise):
    """A symptom that somebody reported: find what it comes from, with at most `budget` experiments.

    experiment: settings → what they give (a memory report, a number), raising for a setting that is not to be varied.
    thread: where it was reported, shown with the right answer.
    """

    experiment: Callable[..., Any] | None = None
    thread: str = ""
    budget: int = 5
    _used: int = 0

    def run(self, **settings: Any) -> Any:
        """One experiment: prints which of how many it is, returns its result. One that is refused does not count."""
        if self._used >= self.budget:
            text = tr(
                ko=f"실험 {self.budget}번을 모두 썼다. 본 것만으로 답하거나, .restart()로 처음부터 다시 한다.",
                en=f"All {self.budget} experiments are used. Answer from what you saw, or .restart().",
            )
            print(f"[{self.number}] {text}")
            return None
        result = self.experiment(**settings)
        self._used += 1
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        print(f"[{self.number}] {self._used}/{self.budget} {said}")
        return result

    def check(self, answer: Any) -> None:
        """As for an exercise; the right answer is followed by the experiments it took and the thread."""
        super().check(answer)
        if self.verdict.startswith(right()):
            used = tr(ko=f"실험 {self._used}번", en=f"{self._used} experiments")
            print(f"[{self.number}] {used} · {self.thread}")

    def restart(self) -> None:
        """Give the experiments back."""
        self._used = 0


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
