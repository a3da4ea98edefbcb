"""python -m benchmarks.operations record FILE | compare VIRTUAL CARD: see the package's docstring."""

from __future__ import annotations

import argparse
import gzip
import os

import torch

from .cases import PARTS
from .processes import Supervisor, child
from .verdicts import differences, table

SECONDS_A_CASE = 25.0


def record(args: argparse.Namespace) -> None:
    """Run all cases in children, and write what they print."""
    with gzip.open(args.file, "wt") as file:
        supervisor = Supervisor(args, file)
        supervisor.write({"torch": torch.__version__, "gpu": args.gpu or "a card", "parts": args.parts})
        supervisor.run()
    print(f"{args.file}: {os.path.getsize(args.file):,} bytes, {dict(supervisor.rows)}", flush=True)


def compare(args: argparse.Namespace) -> None:
    """Print the table of verdicts, and with --cases what differs in each."""
    found = differences(args.virtual, args.card, args.only or "")
    if args.cases:
        for case, (kind, detail) in found.items():
            if kind not in ("equal", "both raised"):
                print(f"{kind} | {case} | {detail}")
    print(table(found))


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "child"):
        command = commands.add_parser(name)
        command.add_argument("--gpu", help="a virtual GPU's name; without: the machine's own")
        command.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
        command.add_argument("--only", help="cases with this in their name")
        command.add_argument(
            "--against", help="a virtual record: what differs from it is recorded again with C++ stacks"
        )
        command.add_argument("--fraction", type=float, help="of a card's memory that each process may have")
        command.add_argument("--as-card", action="store_true", help="read the virtual GPU as a card is read (a trial)")
        if name == "record":
            command.add_argument("file")
            command.add_argument("--shards", type=int, default=2)
            command.add_argument("--seconds", type=float, default=3600.0)
            command.add_argument("--seconds-a-case", type=float, default=SECONDS_A_CASE)
        else:
            for number in ("--index", "--of", "--start"):
                command.add_argument(number, type=int, required=True)
    command = commands.add_parser("compare")
    command.add_argument("virtual")
    command.add_argument("card")
    command.add_argument("--only", help="cases with this in their name")
    command.add_argument("--cases", action="store_true", help="each case that is not equal, and where it first differs")
    args = parser.parse_args()
    {"record": record, "child": child, "compare": compare}[args.command](args)


if __name__ == "__main__":
    main()
