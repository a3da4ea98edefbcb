"""What every command of this package does alike: language, numbers, errors as one line, exit statuses."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import VirtualGPUError
from .language import LANGUAGES, set_language, tr

FITS, NOTHING_FITS, WRONG = 0, 1, 2  # exit statuses: something fits, nothing does, a wrong argument


# What a terminal would obey instead of showing it: escapes, 8-bit ones too, marks that turn text around; and halves of
# characters, which it cannot show. They may stand in a file's name, in a log, in another's trace.
_NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def say(text: str, file: Any = None) -> None:
    """Print a text whatever is in it; what is no text stands there as its number, which JSON takes as well."""
    print(_NOT_SHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text), file=file, flush=True)


def tell(text: str) -> None:
    """Say how far something is that takes its time, to somebody who watches: on a terminal, and nowhere else."""
    if sys.stderr.isatty():
        say(text, sys.stderr)


class Help(argparse.RawDescriptionHelpFormatter):
    """Text that was laid out by hand stays so; an option says what it is where nothing is given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or isinstance(action.default, bool) or action.default == argparse.SUPPRESS
        if not action.help or not action.option_strings or plain:
            return action.help
        return f"{action.help} ({tr(ko='기본값', en='default')}: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser of arguments whose messages are printed by `say`: they repeat what was given."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            say(message.removesuffix("\n"), file or sys.stderr)


def run(program: Callable[[], int]) -> int:
    """A program: that the reader of its output has gone, as in `| head`, is no error."""
    try:
        status = program()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = FITS
    return status


def take_language(given: Sequence[str]) -> None:
    """Switch to the language that `--language` says, before any help is made."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--language", choices=LANGUAGES)
    before = list(given[: given.index("run")]) if "run" in given else list(given)  # a program's arguments are its own
    if code := parser.parse_known_args(before)[0].language:
        set_language(code)


def answer(execute: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """The status of a subcommand; an error of ours as one line."""
    try:
        return execute(args)
    except (VirtualGPUError, ImportError) as error:
        say(tr(ko=f"오류: {error}", en=f"error: {error}"), sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print(tr(ko="중단했다.", en="interrupted."), file=sys.stderr)
        return 130


def number(text: Any) -> Any:
    """A number as Python reads it; anything else as it is, so that the check of the value itself names it."""
    for kind in (int, float):
        try:
            return kind(text)
        except (ValueError, TypeError):
            continue
    return text
