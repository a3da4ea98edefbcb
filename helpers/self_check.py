"""Exercises that check themselves: `check` says right, close or wrong and by how much; `hint` and `solution` help.

A case is an exercise with a few experiments to find its answer by.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import virtual_gpu
from virtual_gpu.language import tr
from virtual_gpu.units import choose

from . import progress

# Code that no reader wrote: a mistake raised there, with none of his frames above it, is the form of his answer.
_COURSE = (str(Path(__file__).parent), str(Path(virtual_gpu.__file__).parent))
_OURS = (*_COURSE, sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], "<frozen")
_LOOKS = {
    "right": ("#e6f4ec", "#00734f", "✓"),
    "wrong": ("#fdf0e3", "#b34700", "✗"),
    "empty": ("#eef1f4", "#5b6770", "…"),
}


class Verdict(str):
    """A line that a check says: as text its words, in a notebook a box whose sign and colour say right or not."""

    def __new__(cls, words: str, look: str = "wrong"):
        verdict = super().__new__(cls, words)
        verdict.look = look
        return verdict

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        ground, edge, sign = _LOOKS[self.look]
        style = f"background:{ground};color:#1f2933;border-left:4px solid {edge};padding:6px 10px;word-break:keep-all"
        return f'<div style="{style}"><b style="color:{edge}">{sign}</b> {escape(self)}</div>'


@dataclass
class Exercise:
    """One exercise. An answer of None or `...` means that the stub is still empty."""

    number: str
    judge: Callable[[Any], str]
    hints: Callable[[], list[str]]
    answer: str  # code, shown as it is
    verdict: Verdict | None = None  # of the last check
    _shown: int = 0

    def check(self, answer: Any) -> None:
        """Show what is right, close or wrong in the answer, and by how much."""
        self.verdict = self._judged(answer)
        show(Verdict(f"[{self.number}] {self.verdict}", self.verdict.look))
        progress.record(self.number, self.verdict.look == "right")

    def _judged(self, answer: Any) -> Verdict:
        empty = tr(ko="아직 비어 있다. 칸을 채운 뒤 다시 실행한다.", en="Still empty: fill it in and run again.")
        if answer is None or answer is ...:
            return Verdict(empty, "empty")
        if not _has_form(answer, self.answer):
            return Verdict(self._other_form(answer))
        try:
            verdict = self.judge(answer)
        except Empty:
            return Verdict(empty, "empty")
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            if isinstance(error, ValueError) and frames[-1].filename.startswith(_COURSE):
                return Verdict(str(error))  # ours: a name or a value that there is not, and which there are
            if not any(_readers(frame) for frame in frames):
                return Verdict(self._other_form(answer))
            # The reader's own code: what went wrong in it is the answer to the check.
            said = tr(ko="답을 실행하다가 오류가 났다", en="Your answer raised an error")
            return Verdict(f"{said}: {type(error).__name__}: {error}")
        return Verdict(verdict, "right" if verdict.startswith(right()) else "wrong")

    def _other_form(self, answer: Any) -> str:
        got, form = _short(answer), _form(self.answer)
        if isinstance(answer, _KINDS.get(type(_answer_of(self.answer)), ())):
            return tr(
                ko=f"{got}: 답의 꼴은 맞지만 쓸 수 없는 값이 있다.", en=f"{got}: the form is right, a value is not."
            )
        return tr(
            ko=f"답의 꼴이 다르다. {form} 쓸 자리에 {got}이(가) 왔다.",
            en=f"Not an answer's form: {got}, where {form} is expected.",
        )

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
        """One experiment: prints which of how many it is, returns its result.

        A setting that there is not is said in a line, and does not count.
        """
        if self._used >= self.budget:
            text = tr(
                ko=f"실험 {self.budget}번을 모두 썼다. 본 것만으로 답하거나, .restart()로 처음부터 다시 한다.",
                en=f"All {self.budget} experiments are used. Answer from what you saw, or .restart().",
            )
            show(Verdict(f"[{self.number}] {text}"))
            return None
        try:
            named = inspect.signature(self.experiment).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in named.values()):
                for name in settings:
                    choose(name, tuple(named), tr(ko="설정", en="setting"))
            result = self.experiment(**settings)
        except (TypeError, ValueError, AttributeError) as error:
            ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_COURSE)
            if not (ours and isinstance(error, ValueError)):
                given = ", ".join(f"{name}={value!r:.80}" for name, value in settings.items())
                error = tr(ko=f"{given}: 쓸 수 없는 설정이 있다.", en=f"{given}: not to be used.")
            show(Verdict(f"[{self.number}] {error}"))
            return None
        self._used += 1
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        print(f"[{self.number}] {self._used}/{self.budget} {said}")
        return result

    def check(self, answer: Any) -> None:
        """As for an exercise; the right answer is followed by the experiments it took and the thread."""
        super().check(answer)
        if self.verdict.look == "right":
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
    """None when right; else how wrong, as a sentence that does not give the answer. Within 2 % is close."""
    got = filled(got)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return tr(ko=f"{what}: 숫자가 아니라 {got!r}이 나왔다.", en=f"{what}: got {got!r}, not a number.")
    if got == expected:
        return None
    ratio = got / expected if expected else float("inf")
    if abs(ratio - 1) < 0.02:
        return tr(ko=f"{what}: 거의 맞다({ratio - 1:+.2%}).", en=f"{what}: close ({ratio - 1:+.2%}).")
    return tr(ko=f"{what}: 답이 정답의 {ratio:.3g}배다.", en=f"{what}: {ratio:.3g} times the right answer.")


def show(line: Any) -> None:
    """Show a line: rich where there is a notebook, as text elsewhere."""
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(line)
    else:
        display(line)


def _has_form(answer: Any, solution: str) -> bool:
    """Whether it can be called, or is a dict, where the solution is a function or a dict; others are their judge's."""
    node = _answer_of(solution)
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        return callable(answer)
    return isinstance(answer, dict) or not isinstance(node, ast.Dict)


_KINDS = {ast.Dict: dict, ast.List: list, ast.Tuple: tuple, ast.Set: set}


def _form(solution: str) -> str:
    """What kind of thing a solution is, in words, without what it says."""
    node = _answer_of(solution)
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        names = ", ".join(argument.arg for argument in node.args.args)
        return tr(ko=f"인자가 {names}인 함수를", en=f"a function of {names}")
    kinds = {
        ast.Dict: tr(ko="사전(dict)을", en="a dict"),
        ast.List: tr(ko="목록(list)을", en="a list"),
        ast.Tuple: tr(ko="튜플을", en="a tuple"),
        ast.Set: tr(ko="집합(set)을", en="a set"),
    }
    return kinds.get(type(node), tr(ko="수나 이름을", en="a number or a name"))


def _answer_of(solution: str) -> ast.AST:
    """The function or the value that the solution's code ends up with: its last definition or assignment."""
    found = [one for one in ast.parse(solution).body if isinstance(one, ast.FunctionDef | ast.Assign | ast.Expr)]
    return getattr(found[-1], "value", found[-1])


def _readers(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(_OURS)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # an object of the reader's, whose repr may raise what it likes
        text = ""
    return text if 0 < len(text) <= 40 else type(value).__name__


def right(more: str = "") -> str:
    """The verdict of a right answer."""
    return tr(ko="정답!", en="Right!") + (f" {more}" if more else "")
