"""The frames of a traceback, as Python, IPython, pytest and rich print them, and which of them are the user's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..language import tr

MOST_FRAMES = 2000
_LONGEST = 1000  # characters of a line that are looked at
_SPECIAL = r"<[^<>]{1,80}>"  # "<module>", and Colab's "<cell line: 0>", with its spaces
_PATTERNS = [
    re.compile(rf'\s{{0,40}}File "([^"]{{1,400}})", line (\d{{1,7}})(?:, in ({_SPECIAL}|\S{{1,200}}))?'),  # Python
    re.compile(rf"[│|] (\S{{1,300}}):(\d{{1,7}}) in ({_SPECIAL}|\S{{1,200}})"),  # rich
    re.compile(rf"File (\S{{1,400}}?):(\d{{1,7}}),? in ({_SPECIAL}|[\w.<>]{{1,200}})"),  # IPython 8
    re.compile(r"()(?:Cell )?In ?\[(\d{1,7})\], line (\d{1,7})"),  # a notebook's cell
    re.compile(  # IPython 7, no line number
        rf"(<ipython-input-[\w-]{{1,80}}>|(?<!\S)/\S{{1,400}}\.py) in ({_SPECIAL}|\w{{1,200}})"
    ),
    re.compile(r"(?<!\S)(\S{1,300}\.py):(\d{1,7}): in (\S{1,200})"),  # pytest
]
_ARROW = re.compile(r"(?:[│|]\s{0,4})?(?:-{2,6}>|❱)\s?(\d{1,7})(?!\d)\s?[│|]?\s?(.{0,300})")  # the line that failed
_START = "Traceback (most recent call last)"
_UNDERLINE = re.compile(r"[\s^~]*$")

# The standard library's folder; on Windows it is named after nothing, so the folder over it must be a Python's.
_LIB = (
    r"[/\\]lib[/\\]python3\.\d{1,2}[/\\]|\\(?:Python3\d{1,2}(?:-32)?|PythonSoftwareFoundation\.[^\\]{1,80}"
    r"|cpython-3[^\\]{1,80}|(?:ana|mini)conda3?|miniforge3|mambaforge|envs\\[^\\]{1,80})\\[Ll]ib\\"
)
# What stands before a file's path from its package on.
_ROOT = re.compile(
    rf"(?:site|dist)-packages[/\\]|{_LIB}|[/\\]src[/\\]"
    r"|[/\\](?=torch[/\\](?:nn|optim|autograd|utils)[/\\])"
)
_INSTALLED = re.compile(r"(?:site|dist)-packages[/\\]([\w.-]{1,80})")
_STANDARD = re.compile(rf"^<frozen |{_LIB}|[/\\](?:bin|Scripts)[/\\][\w.-]{{1,40}}$|^<string>$")
LIBRARIES = (
    "transformers", "peft", "accelerate", "deepspeed", "trl", "bitsandbytes", "torch", "lightning", "pytorch_lightning",
    "diffusers", "unsloth", "vllm", "liger_kernel", "sentence_transformers",
)  # fmt: skip
_SOURCE = re.compile(rf"[/\\]({'|'.join(LIBRARIES)})[/\\](?:src[/\\])?\1[/\\]")  # a library's own repository

_MODEL = re.compile(r"[/\\]transformers[/\\]models[/\\](\w{1,80})[/\\]")

_OURS = re.compile(r"[/\\]virtual_gpu[/\\](?:counting|program|rules|trace)[/\\]")  # between the program and its error

# A cell's file is the kernel's own, and its name says nothing: ipykernel's, Colab's, and that of IPython 7.
_CELL = re.compile(r"[/\\]ipykernel_\d{1,10}[/\\]\d{1,20}\.py$|(?:^|[/\\])<?ipython-input-[\w-]{1,80}(?:>|\.py)$")


@dataclass(frozen=True)
class Frame:
    """One line of a traceback; code is "" where it was not printed."""

    file: str
    line: int | None
    function: str
    code: str = ""

    @property
    def library(self) -> str | None:
        """The package that it lies in; "python" for the standard library; None: the user's."""
        if found := _INSTALLED.search(self.file):
            return found[1].removesuffix(".py")
        if found := _SOURCE.search(self.file):
            return found[1]
        if _OURS.search(self.file):
            return "virtual_gpu"
        return "python" if _STANDARD.search(self.file) else None

    @property
    def on_windows(self) -> bool:
        """Whether its file's name is one of Windows."""
        return "\\" in self.file

    @property
    def path(self) -> str:
        """From its package on ("torch/optim/adamw.py"), where it is a library's."""
        return re.sub(r"[/\\]+", "/", _ROOT.split(self.file)[-1])

    @property
    def is_cell(self) -> bool:
        """Whether it is a notebook's cell, which no other program can run by its name."""
        return bool(_CELL.search(self.file))

    @property
    def shown(self) -> str:
        """Where it is, and its code."""
        return ": ".join(filter(None, [str(self), self.code]))

    def __str__(self) -> str:
        parts = self.path.split("/")
        name = "/".join(parts[-3:]) if self.library else parts[-1]
        if self.is_cell:
            name = tr(ko="노트북의 셀", en="a notebook's cell")
        where = name if self.line is None else f"{name}:{self.line}"
        return f"{where} in {self.function}" if self.function else where


def traceback(lines: Sequence[str]) -> list[Frame]:
    """The frames of the last traceback in these lines, outermost first; where its head is cut off, what is there."""
    begin = next((at for at in range(len(lines) - 1, -1, -1) if _START in lines[at][:_LONGEST]), 0)
    found: list[Frame] = []
    for at in range(begin, len(lines)):
        line = lines[at][:_LONGEST]
        if frame := _frame(line, lines, at):
            found.append(frame)
        elif found and (arrow := _ARROW.match(line.lstrip())):
            last = found[-1]
            number = last.line if last.line is not None else int(arrow[1])
            found[-1] = Frame(last.file, number, last.function, arrow[2].strip(" │|"))
    return found[-MOST_FRAMES:]


def _frame(line: str, lines: Sequence[str], at: int) -> Frame | None:
    for number, pattern in enumerate(_PATTERNS):
        found = pattern.match(line) if number == 0 else pattern.search(line)
        if not found:
            continue
        if number == 3:
            return Frame(f"In [{found[2]}]", int(found[3]), "")
        if number == 4:
            return Frame(found[1], None, found[2])
        code = lines[at + 1][:_LONGEST].strip() if number == 0 and at + 1 < len(lines) else ""
        if _UNDERLINE.match(code) or _PATTERNS[0].match(lines[at + 1] if at + 1 < len(lines) else ""):
            code = ""
        return Frame(found[1], int(found[2]), (found[3] or "").split("(")[0].split(".")[-1], code)
    return None


def users_last(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is no library's."""
    return next((frame for frame in reversed(frames) if frame.file and frame.library is None), None)


def libraries(frames: Sequence[Frame]) -> list[str]:
    """The known libraries that the traceback goes through, in its order."""
    return list(dict.fromkeys(frame.library for frame in frames if frame.library in LIBRARIES))


def models(frames: Sequence[Frame]) -> list[str]:
    """transformers' folders of the models that the traceback goes through ("gpt_neox"), in its order."""
    return list(dict.fromkeys(found[1] for frame in frames if (found := _MODEL.search(frame.file))))
