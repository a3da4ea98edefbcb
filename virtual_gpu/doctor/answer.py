"""`diagnose(error)`: the doctor from Python; its answer prints itself, in a notebook as a page."""

from __future__ import annotations

import traceback

from ..errors import WrongValue
from ..language import tr
from .diagnosis import Diagnosis, read
from .html import page
from .report import text


class Answer(Diagnosis):
    """A diagnosis that prints as the whole report, and in a notebook as a page."""

    def __repr__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return page(self)


def diagnose(error: str | bytes | BaseException, cut: bool = False) -> Answer:
    """What an out-of-memory error, its traceback or a whole log shows: cause, how sure, what it is not, what to try.

    error: text, or the exception itself; `cut`: something stood before it. Any text is taken; nothing in it is
    executed, and no error is raised for what it says. WrongValue for what is neither text nor an exception.
    """
    if isinstance(error, BaseException):
        error = "".join(traceback.format_exception(error))
    if not isinstance(error, str | bytes):
        raise WrongValue(
            tr(
                ko=f"오류 메시지(문자열)나 예외를 준다. 받은 것: {type(error).__name__}",
                en=f"A text or an exception is diagnosed, not {type(error).__name__}.",
            )
        )
    return Answer(**vars(read(error, cut)))
