"""Pasted or logged text made readable: bytes to lines, without colours, and a stream of lines for each rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import BinaryIO

MOST_BYTES = 4 * 2**20  # of a longer log the end is read: what killed the run stands there

_CHUNK = 2**16
_COLOURS = re.compile(r"\x1b\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|\x1b.?")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # also 8-bit, and direction
_RANK = re.compile(r"\s{0,8}\[(?:rank|default)(\d{1,5})\]:? ?")
# A log that is JSON has a whole traceback in one line; a Windows path has `\n` too, so what follows must look like one.
_ESCAPED = re.compile(r"\\n\s{0,16}(?:File |Traceback|torch\.|\w{0,40}Error|return )|last\):\\n")
_ESCAPE = re.compile(r'\\(?:u001b\[[0-9;]{0,40}m|x1b\[[0-9;]{0,40}m|033\[[0-9;]{0,40}m|[nrt"\'\\])')
_MEANS = {"n": "\n", "r": "\n", "t": "\t"}


@dataclass(frozen=True)
class Stream:
    """The lines of one rank in their order; rank None: lines that name no rank."""

    rank: int | None
    lines: tuple[str, ...]


def read_end(file: BinaryIO, most: int = MOST_BYTES) -> tuple[bytes, bool]:
    """(the last `most` bytes of a file or a pipe, whether something stood before them)."""
    held, cut = bytearray(), False
    while chunk := file.read(_CHUNK):
        held += chunk
        if len(held) > 2 * most:
            del held[:-most]
            cut = True
    return bytes(held[-most:]), cut or len(held) > most


def decode(raw: bytes) -> str:
    """UTF-8 whatever it is, UTF-16 where its mark says so (what `>` writes in Windows' PowerShell)."""
    utf_16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    return raw.decode("utf-16" if utf_16 else "utf-8", errors="replace").removeprefix("\ufeff")


def streams(text: str) -> list[Stream]:
    """The lines of each rank, the unnamed ones first where there are any."""
    found: dict[int | None, list[str]] = {}
    for line in _lines(text):
        rank = _RANK.match(line)
        found.setdefault(int(rank[1]) if rank else None, []).append(line[rank.end() :] if rank else line)
    return [Stream(rank, tuple(found[rank])) for rank in sorted(found, key=lambda rank: -1 if rank is None else rank)]


def _lines(text: str) -> list[str]:
    lines = [part for line in re.split(r"\r\n|\n|\r", text) for part in _unescaped(line).split("\n")]
    return [_CONTROL.sub("", _COLOURS.sub("", line)) for line in lines]


def _unescaped(line: str) -> str:
    if "\\n" not in line or not _ESCAPED.search(line):
        return line
    return _ESCAPE.sub(lambda found: _MEANS.get(found[0][1], found[0][1] if len(found[0]) == 2 else ""), line)
