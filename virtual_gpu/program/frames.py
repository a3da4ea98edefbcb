"""Which line of the program is running: the innermost frame that is neither a library's nor ours."""

from __future__ import annotations

import os
import sysconfig
from types import CodeType, FrameType

import torch

from ._core import CORE_FOLDER

OURS = (os.path.dirname(os.path.realpath(__file__)) + os.sep, CORE_FOLDER + os.sep)
_LIBRARIES = tuple(
    {
        *(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")),
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
        os.path.dirname(os.path.realpath(torch.__file__)) + os.sep,
        *OURS,
        "<frozen",
        "<string>",
    }
)
_is_program: dict[CodeType, bool] = {}


def is_program(code: CodeType) -> bool:
    """Whether code is the program's own: a script, its modules, a notebook's cell."""
    known = _is_program.get(code)
    if known is None:
        known = _is_program[code] = not code.co_filename.startswith(_LIBRARIES)
    return known


def program_line(frame: FrameType | None) -> tuple[str, int]:
    """(file, line) of the program's innermost frame; ("", 0) where none is running."""
    while frame is not None:
        if is_program(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def stack(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """(code, line) of every frame but ours, the innermost first."""
    frames = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OURS):
            frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)
