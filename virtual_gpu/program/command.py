"""`virtual-gpu run --gpu T4 train.py --its --own arguments`, and `virtual-gpu largest --argument …`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cores import free_ram_bytes, processes
from ..errors import WrongValue
from ..language import LANGUAGES, tr
from ..terminal import Parser, answer, say, tell
from ..writing import check_folder, write
from . import html
from .again import Run, advice, largest
from .changed import MADE
from .frames import OURS
from .report import FAILED, FITS, INTERRUPTED, OOM, Report
from .runner import run

EXIT = {FITS: 0, OOM: 1, FAILED: 2, INTERRUPTED: 130}
_LONG_SECONDS = 60  # a run that takes longer is not run again without being asked


def add_to(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand `run`."""
    parser = subparsers.add_parser(
        "run",
        help=tr(ko="프로그램을 고치지 않고 실행한다", en="run an unchanged program on a GPU that is not there"),
        description=tr(
            ko="`virtual-gpu run --gpu T4 train.py --its --own arguments`. torchrun이나 accelerate launch로 시작하는 "
            "명령도 그대로 쓴다.",
            en="`virtual-gpu run --gpu T4 train.py --its --own arguments`; the command may begin with torchrun or "
            "accelerate launch.",
        ),
        epilog=tr(
            ko="종료 상태: 0 들어간다, 1 메모리가 모자란다, 2 프로그램이 스스로 실패했다, 130 Ctrl+C.",
            en="Exit status: 0 it fits, 1 out of memory, 2 the program failed by itself, 130 Ctrl+C.",
        ),
    )
    _arguments(parser)
    add = parser.add_argument
    add("--json", action="store_true", help=tr(ko="보고서를 JSON으로", en="the report as JSON"))
    add("--report", metavar="FILE", help=tr(ko="보고서를 JSON 파일로", en="the report as a JSON file"))
    add("--html", metavar="FILE", help=tr(ko="보고서를 HTML 한 장으로", en="the report as a page"))
    add(
        "--save",
        metavar="TRACE.json",
        help=tr(ko="보고서와 모든 할당을 JSON으로", en="the report and every allocation"),
    )
    add("--snapshot", metavar="FILE.pickle", help=tr(ko="PyTorch의 스냅샷", en="PyTorch's, for pytorch.org/memory_viz"))
    add("--force", action="store_true", help=tr(ko="있는 파일을 덮어쓴다", en="write over files that are there"))
    advise = tr(ko="모자라면 바꾸어 다시 실행해 본다", en="out of memory: run again with changes until it fits")
    add("--sent", nargs=2, help=argparse.SUPPRESS)  # of a pipeline's stage, see `pipeline`
    add("--advise", action=argparse.BooleanOptionalAction, default=None, help=advise)
    add("command", nargs=argparse.REMAINDER, metavar="program …", help=tr(ko="프로그램과 인자", en="and its arguments"))
    return parser


def add_largest_to(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand `largest`, of a program's own argument."""
    what = tr(
        ko="프로그램을 되풀이해 실행하며 그 인자 하나의, 들어가는 가장 큰 값을 찾는다. 적어 준 값(없으면 1)에서 "
        "시작해 두 배씩 늘린 다음 그 사이를 반씩 좁힌다.",
        en="Run a program again and again for the largest value of one of its arguments that fits: from the value "
        "that is written (or 1) by doubling and then by halving the interval.",
    )
    parser = subparsers.add_parser("largest", description=what)
    parser.add_argument("--argument", required=True, help=tr(ko="프로그램의 인자", en="an argument of the program"))
    parser.add_argument("--most", type=int, default=2**20, help=tr(ko="여기까지만 본다", en="do not look beyond"))
    parser.add_argument("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    _arguments(parser)
    said = tr(ko="프로그램과 인자", en="and its arguments")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="program …", help=said)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`virtual-gpu run` by itself; the exit status."""
    parser = Parser(prog="virtual-gpu")
    add_to(parser.add_subparsers())
    return answer(execute, parser.parse_args(["run", *(sys.argv[1:] if argv is None else argv)]))


def execute(args: argparse.Namespace) -> int:
    """Run the program and show the report; the exit status."""
    command = _command(args)
    for path in map(Path, filter(None, (args.report, args.html, args.save, args.snapshot))):
        folder = check_folder(path.parent, [path.name], args.force)  # before the program takes its time
        folder.mkdir(parents=True, exist_ok=True)
    tell(
        tr(
            ko=f"{command[0]}, 가상 {args.gpu}: 옵티마이저 스텝 {args.steps}번까지 실행한다. Ctrl+C를 누르면 멈추고 "
            "거기까지를 보인다.",
            en=f"{command[0]} on a virtual {args.gpu}, up to {args.steps} optimizer steps; Ctrl+C ends it and shows "
            "what it saw.",
        )
    )
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        report = run(
            command[0], command[1:], gpu=args.gpu, module=bool(args.module), steps=args.steps,
            through_evaluation=args.through_evaluation, values=args.values, gpus=args.gpus,
            visible_gpus=args.visible_gpus, rank=args.rank,
            limited=not args.unlimited, host=args.host, writes=args.write_files, snapshot_file=args.snapshot,
            without=args.without, changes=args.change,
            sent=None if args.sent is None else (int(args.sent[0]), args.sent[1]), report_interrupted=True,
        )  # fmt: skip
    if report.error is not None:
        print_traceback(report.error)
    if report.status == OOM and not report.host.killed:
        if report.seconds < _LONG_SECONDS if args.advise is None else args.advise:
            try:
                for one in advice(_options(args), command, report, told=_tell_again, at_once=_at_once()):
                    report.tried.append(one.row())
                if not report.tried:
                    report.notes.append(
                        tr(
                            ko="--change의 것 가운데 이 프로그램에 들어맞으면서 메모리를 충분히 줄일 것이 없다",
                            en="no change of --change has a place in this program and could make enough room",
                        )
                    )
            except KeyboardInterrupt:
                pass  # it ends the attempts, not the report
            except WrongValue as error:
                report.notes.append(str(error))
        elif args.advise is None:
            report.notes.append(
                tr(
                    ko=f"{_LONG_SECONDS}초가 넘게 걸려 다시 실행해 보지 않았다. --advise를 주면 바꾸어 해 본다",
                    en=f"took more than {_LONG_SECONDS} s, so nothing else was tried: --advise runs it again with "
                    "changes",
                )
            )
    for name, text in (
        (args.report, lambda: json.dumps(report.json())),
        (args.html, lambda: html.page(report)),
        (args.save, lambda: json.dumps({"report": report.json(), "trace": report.watch.saved().json()})),
    ):
        if name:
            write({Path(name).name: text()}, Path(name).parent, args.force)
    say(json.dumps(report.json(), ensure_ascii=False, indent=2) if args.json else report.text())
    return exit_status(report)


def _at_once() -> int:
    """Two where there is a core for another run and, for what this one took of the RAM, room for two."""
    free = free_ram_bytes()
    if free is None:  # not Linux, which alone says so
        return 1
    import resource

    taken = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return min(2, processes()) if free > 2 * taken else 1


def _tell_again(change: str) -> None:
    tell(tr(ko=f"모자란다. 다시 실행해 본다: {change}", en=f"Out of memory; running again with {change}"))


def exit_status(report: Report) -> int:
    """0 where it fits, 1 where memory is missing, 2 where the program failed, 130 after Ctrl+C."""
    return EXIT.get(report.judgement, EXIT[report.status] if report.judgement == "tight" else EXIT[OOM])


def execute_largest(args: argparse.Namespace) -> int:
    """Look for the largest value of a program's argument; the exit status."""

    def told(run: Run) -> None:
        tell(f"{run.change}: {run.report['judgement']}, {run.report['seconds']:.1f} s")

    tell(tr(ko="찾는 중이다. Ctrl+C를 누르면 멈춘다.", en="Searching; Ctrl+C stops."))
    best = largest(args.argument, _options(args), _command(args), most=args.most, told=told)
    if args.json:
        found = None if best is None else best.row()
        say(json.dumps({"schema": 1, "gpu": args.gpu, "largest": found}, ensure_ascii=False, indent=2))
    else:
        nothing = tr(ko="들어가는 것이 없다.", en="Nothing fits.")
        say(nothing if best is None else tr(ko=f"가장 큰 것: {best.change}", en=f"largest: {best.change}"))
    return EXIT[OOM] if best is None else EXIT[FITS]


def _command(args: argparse.Namespace) -> list[str]:
    command = args.command[1:] if args.command[:1] == ["--"] else list(args.command)
    command = [*(args.module or []), *command]
    if not command:
        raise WrongValue(tr(ko="어느 프로그램을 실행할지 없다.", en="Which program?"))
    return command


def _options(args: argparse.Namespace) -> list[str]:
    """The options of another run of the same program."""
    options = ["--gpu", str(args.gpu), "--steps", str(args.steps), "--gpus", str(args.gpus), "--rank", str(args.rank)]
    options += ["--visible-gpus", str(args.visible_gpus)] if args.visible_gpus > 1 else []
    options += ["--host", args.host] if args.host else []
    options += ["--values", args.values, *(["--through-evaluation"] if args.through_evaluation else [])]
    options += [*(["--unlimited"] if args.unlimited else []), *(f"--without={rule}" for rule in args.without)]
    options += [text for name in args.change for text in ("--change", name)]
    return options + (["-m"] if args.module else [])


def same_again(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options, command) of a run that was started as `virtual-gpu run` with these arguments, to run it again."""
    parser = Parser(prog="virtual-gpu compare --again")
    _arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="program …")
    args = parser.parse_args(arguments)
    return _options(args), _command(args)


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
    texts = {
        "gpu": tr(ko="GPU의 이름이나 '24GiB, 8.6' 같은 크기", en='a name, or a size as "24GiB, 8.6"'),
        "host": tr(
            ko="이 기계의 RAM도 한도로 둔다: Colab, Kaggle, 또는 '32GB' 같은 크기",
            en='the machine whose RAM ends too: Colab, Kaggle, or a size as "32GB"',
        ),
        "visible_gpus": tr(
            ko='프로세스 하나가 보는 GPU 수(device_map="auto")',
            en='how many the one process sees and spreads its model over (device_map="auto")',
        ),
        "gpus": tr(ko="GPU 수. 그 가운데 한 rank로 실행한다", en="how many; the program runs as one rank of as many"),
        "rank": tr(ko="어느 rank인가", en="which of them"),
        "steps": tr(ko="이만큼의 optimizer 스텝 뒤에 끝낸다", en="optimizer steps, after which the run ends"),
        "evaluation": tr(ko="평가, 저장, 생성까지 간다", en="go on to evaluation, saving, generation"),
        "values": tr(
            ko="텐서의 값을 물으면: 1로 답하거나(answer) 그 줄에서 멈추거나(stop) 이 수로 답한다",
            en="when a value of a tensor is asked for: answer 1, stop at that line, or answer this number",
        ),
        "writes": tr(
            ko="체크포인트를 파일로 쓰게 한다. 가상 텐서에는 값이 없으므로 1을 적는다",
            en="let it write checkpoints; values that are not there are 1",
        ),
        "unlimited": tr(ko="한도 없이 센다", en="never run out: how much would it need?"),
        "without": tr(ko="CUDA의 이 규칙을 뺀다(여러 번 쓸 수 있다)", en="leave out a rule of CUDA's; may be repeated"),
        "change": tr(
            ko=f"프로그램에서 이것을 바꾼다(여러 번 쓸 수 있다): {', '.join(MADE)}",
            en=f"change this in the program; may be repeated: {', '.join(MADE)}",
        ),
        "module": tr(ko="python -m처럼 모듈을 실행한다", en="run a module, as python -m does"),
    }
    add = parser.add_argument
    add("--gpu", default="T4", help=texts["gpu"])
    add("--host", default=None, metavar="MACHINE", help=texts["host"])
    add("--gpus", type=int, default=1, help=texts["gpus"])
    add("--visible-gpus", type=int, default=1, help=texts["visible_gpus"])
    add("--rank", type=int, default=0, help=texts["rank"])
    add("--steps", type=int, default=3, help=texts["steps"])
    add("--through-evaluation", action="store_true", help=texts["evaluation"])
    add("--values", default="answer", metavar="answer|stop|NUMBER", help=texts["values"])
    add("--write-files", action="store_true", help=texts["writes"])
    add("--unlimited", action="store_true", help=texts["unlimited"])
    add("--change", action="append", default=[], metavar="NAME", help=texts["change"])
    add("--without", action="append", default=[], metavar="RULE", help=texts["without"])
    add("--language", choices=LANGUAGES, default=None)
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help=texts["module"])
