"""A program run on a virtual card until it dies, and the traceback that it leaves."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import virtual_gpu
from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

_OURS = str(Path(virtual_gpu.__file__).parent)
_HERE = str(Path(__file__).parent)
_CELL = re.compile(r'"[^"\n]*[/\\]ipykernel_\d+[/\\]\d+\.py"')
_FOLDERS = re.compile(r'(?<=")[^"\n]*[/\\](?=site-packages[/\\]|lib[/\\]python3)')
_AGAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"


class Dead(str):
    """A traceback, as Python prints it."""

    def __repr__(self) -> str:
        return str(self)


class Alive(str):
    """That a program came to its end, and its peak."""

    def __repr__(self) -> str:
        return str(self)


def caught(program: Callable[..., Any], *args: Any, gpu: str = "T4", **kwargs: Any) -> Dead | Alive:
    """The traceback of the out-of-memory error that program(*args, **kwargs) raises on a virtual card.

    Where it raises none, a sentence with its peak. Other errors pass. WrongValue for what cannot be called.
    """
    if not callable(program):
        raise WrongValue(
            tr(
                ko=f"program={program!r:.80}: 부를 수 있는 함수여야 한다.",
                en=f"program={program!r:.80}: must be a function.",
            )
        )
    with virtual_gpu.cuda(gpu):
        try:
            program(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            return Dead(told(error))
        peak = human_bytes(torch.cuda.max_memory_allocated())
        return Alive(tr(ko=f"OOM 없이 끝났다. 최대 {peak}", en=f"It came to its end; peak {peak}"))


def told(error: BaseException) -> str:
    """An error's traceback, without the virtual GPU's own frames, which no real card has, and without folders."""
    found = traceback.TracebackException.from_exception(error)
    before = error.__context__
    head = "" if before is None or error.__suppress_context__ else told(before) + _AGAIN
    lines = ["Traceback (most recent call last):\n"]
    for frame in found.stack:
        if not frame.filename.startswith((_OURS, _HERE)):
            lines.append(found.stack.format_frame_summary(frame))
    text = "".join([*lines, *found.format_exception_only()])
    return head + _FOLDERS.sub("", _CELL.sub('"<ipython-input-1-cell>"', text))
