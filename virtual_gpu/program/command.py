"""`virtual-gpu run --gpu T4 train.py --its --own arguments`."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cards import CATALOG
from ..units import choose
from . import html
from .frames import OURS
from .report import FAILED, FITS, OOM
from .runner import run

EXIT = {FITS: 0, OOM: 1, FAILED: 2}


def add_to(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand `run`."""
    parser = subparsers.add_parser(
        "run", help="run an unchanged program on a GPU that is not there", description=__doc__,
        epilog="Exit status: 0 it fits, 1 out of memory, 2 the program failed by itself.",
    )  # fmt: skip
    _arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="virtual-gpu run", description=__doc__)
    _arguments(parser)
    return execute(parser.parse_args(argv))


def execute(args: argparse.Namespace) -> int:
    """Do what parsed arguments say; the exit status."""
    command = [*args.command]
    if args.module:
        command.insert(0, args.module)
    if not command:
        print("virtual-gpu run: which program?", file=sys.stderr)
        return 2
    try:
        report = run(
            command[0], command[1:], gpu=choose(args.gpu, CATALOG, "GPU"), module=bool(args.module), steps=args.steps,
            through_evaluation=args.through_evaluation, values=args.values, gpus=args.gpus, rank=args.rank,
            limited=not args.unlimited, snapshot_file=args.snapshot,
        )  # fmt: skip
    except (ValueError, FileNotFoundError) as error:
        print(f"virtual-gpu run: {error}", file=sys.stderr)
        return 2
    if report.error is not None:
        print_traceback(report.error)
    if args.html:
        Path(args.html).write_text(html.page(report), encoding="utf-8")
    if args.save:
        Path(args.save).write_text(json.dumps(report.json() | {"trace": report.watch.trace()}), encoding="utf-8")
    print(json.dumps(report.json(), indent=2) if args.json else report.text(), flush=True)
    return EXIT[report.status]


def print_traceback(error: BaseException) -> None:
    """The program's own traceback, without the frames that ran it."""
    shown = traceback.TracebackException.from_exception(error)
    waiting = [shown]
    while waiting:
        part = waiting.pop()
        part.stack = traceback.StackSummary.from_list(
            [line for line in part.stack if not line.filename.startswith((OURS, "<frozen runpy>"))]
        )
        waiting += [other for other in (part.__cause__, part.__context__) if other is not None]
    if not isinstance(error, SystemExit):
        print("".join(shown.format()), file=sys.stderr, end="")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="T4", help="the card: " + ", ".join(CATALOG))
    parser.add_argument("--gpus", type=int, default=1, help="how many cards; the program runs as one rank of as many")
    parser.add_argument("--rank", type=int, default=0, help="which of them")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps after which the run ends (3)")
    parser.add_argument("--through-evaluation", action="store_true", help="go on to evaluation, saving, generation")
    parser.add_argument("--values", default="answer", choices=("answer", "stop"), help="when a value is asked for")
    parser.add_argument("--unlimited", action="store_true", help="never run out of memory: how much would it need?")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="the report as a page")
    parser.add_argument("--save", metavar="TRACE", help="the report and every allocation, as JSON")
    parser.add_argument("--snapshot", metavar="FILE.pickle", help="PyTorch's snapshot, for pytorch.org/memory_viz")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="program …", help="the program and its arguments")
