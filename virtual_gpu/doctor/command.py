"""`virtual-gpu doctor FILE`: what an out-of-memory message says, which cause it shows, and what to try."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..changes import what
from ..errors import WrongValue
from ..language import LANGUAGES, tr
from ..terminal import FITS, NOTHING_FITS, say
from .answer import diagnose
from .diagnosis import CANNOT_TELL, as_json, first_changes
from .report import change_of, command, text
from .text import read_end

SCHEMA = 1


def add_to(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help=tr(ko="메모리 부족 메시지를 읽고 까닭을 말한다", en="read an out-of-memory message and name the cause"),
        description=tr(
            ko="메모리 부족 오류나 traceback, 기록을 읽고 까닭과 해 볼 것을 말한다. 아무 데도 보내지 않는다.",
            en="Reads an out-of-memory error, its traceback or a whole log, and says which cause it shows, how sure, "
            "and what to try first. Nothing is sent anywhere.",
        ),
        epilog=tr(
            ko="종료 상태: 0 까닭을 말했다, 1 알 수 없다, 2 틀린 인자.",
            en="Exit status: 0 a cause was named, 1 it cannot tell, 2 a wrong argument.",
        ),
    )
    add = parser.add_argument
    add("file", help=tr(ko="기록 파일. -는 표준 입력", en="a file; -: standard input"))
    add("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    add("--language", choices=LANGUAGES, default=None)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Read, diagnose, print; the exit status."""
    diagnosis = diagnose(*_read(args.file))
    if args.json:
        changes = [
            {"change": key, "what": what(key), "trainer": change.trainer or change.subclass, "loop": change.loop,
             "shell": change.shell, "command": command(diagnosis, key)}
            for key in first_changes(diagnosis) for change in [change_of(diagnosis, key)]
        ]  # fmt: skip
        say(json.dumps({"schema": SCHEMA, **as_json(diagnosis), "try": changes}, ensure_ascii=False, indent=2))
    else:
        say(text(diagnosis))
    return NOTHING_FITS if diagnosis.verdict == CANNOT_TELL else FITS


def _read(path: str) -> tuple[bytes, bool]:
    if path == "-":
        return read_end(sys.stdin.buffer)
    try:
        with open(path, "rb") as file:
            return read_end(file)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        raise WrongValue(f"{path!r:.200}: {getattr(error, 'strerror', None) or error}") from error
