"""Which line of the program is running: the innermost frame that is neither a library's nor ours."""

from __future__ import annotations

import os
import sysconfig
from types import CodeType, FrameType
from typing import Any

import torch

OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_LIBRARIES = tuple(
    {
        *(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")),
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
        os.path.dirname(os.path.realpath(torch.__file__)) + os.sep,
        OURS,
        "<eval_with_key>",  # a graph of torch.fx
        "<inductor>",
        "<frozen",
        "<string>",
    }
)


# Of another place than the interpreter's own (`pip install --target`, `--user`, a distribution's).
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class _OfPrograms(dict[str, bool]):
    def __missing__(self, file: str) -> bool:
        self[file] = not (file.startswith(_LIBRARIES) or any(place in file for place in _PACKAGES))
        return self[file]


_OF_PROGRAMS = _OfPrograms()


def is_program(code: CodeType) -> bool:
    """Whether code is the program's own: a script, its modules, a notebook's cell."""
    return _OF_PROGRAMS[code.co_filename]


def program_line(frame: FrameType | None) -> tuple[str, int]:
    """(file, line) of the program's innermost frame; ("", 0) where none is running."""
    while frame is not None:
        if is_program(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


class Stacks:
    """Stacks as PyTorch's snapshot has them; one list for each, however often it comes."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[CodeType, int], ...], list[dict[str, Any]]] = {}

    def of(self, frame: FrameType | None) -> list[dict[str, Any]]:
        """Every frame but ours, the innermost first."""
        frames = []
        while frame is not None:
            if not frame.f_code.co_filename.startswith(OURS):
                frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        stack = tuple(frames)
        if stack not in self._known:
            self._known[stack] = [
                {"name": getattr(code, "co_qualname", code.co_name), "filename": code.co_filename, "line": line}
                for code, line in stack
            ]
        return self._known[stack]
