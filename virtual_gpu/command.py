"""The command `virtual-gpu`. Exit status 0: it fits (`replay`: all is equal); 1: it does not; 2: a wrong argument."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .disk_cache import add_no_cache, kept_on_disk
from .errors import WrongValue
from .language import LANGUAGES, tr
from .optional import require
from .terminal import FITS, NOTHING_FITS, Help, Parser, answer, number, say, take_language, tell

_ELSEWHERE = {"fit": ".plan.command", "run": ".program.command", "doctor": ".doctor.command"}
SCHEMA = 1  # of the JSON that `largest` and `shards` print

EXAMPLES = {
    None: """
virtual-gpu run --gpu T4 train.py --batch_size 16
virtual-gpu fit --model meta-llama/Llama-3.1-8B --gpu "RTX 4090" --length 1024 --batch 16
virtual-gpu doctor error.txt
""",
    "run": """
virtual-gpu run --gpu T4 train.py --batch_size 16
virtual-gpu run --gpu T4 --change checkpointing --change eight_bit train.py --batch_size 16
virtual-gpu run --gpu A100-80GB --gpus 8 --html report.html torchrun --nproc_per_node 8 train.py
virtual-gpu run --gpu "24GiB, 8.6" --through-evaluation --json train.py > report.json
""",
    "fit": """
virtual-gpu fit --model EleutherAI/polyglot-ko-5.8b --gpu T4 --length 512 --batch 16
virtual-gpu fit --model meta-llama/Llama-3.1-8B --gpu "RTX 4090" --length 1024 --batch 16 --save plan
virtual-gpu fit --model Qwen/Qwen3-4B --gpu T4 --lengths tokens.txt --selective --picture plans.svg
virtual-gpu fit --model ./my-model --gpu "24GiB, 8.6" --gpus 2 --methods lora,qlora --json
virtual-gpu fit --from qwen3_lora_sft.yaml --gpu "RTX 4090" --save qwen3_lora_4090.yaml
virtual-gpu fit --from training_arguments.json --model Qwen/Qwen3-0.6B --length 1024 --methods lora --gpu T4
""",
    "largest": """
virtual-gpu largest --gpu T4 --peft qlora
virtual-gpu largest --model Qwen/Qwen3-4B --gpu "24GiB, 8.6" --peft qlora --of sequence_length
virtual-gpu largest --gpu T4 --argument --batch_size train.py --epochs 1
""",
    "shards": """
virtual-gpu shards --model meta-llama/Llama-3.1-8B --gpu H100 --gpus 8 --stage 3 --length 4096
virtual-gpu shards --model meta-llama/Llama-3.1-8B --gpu A100-40GB --gpus 4 --stage 2 --checkpointing
virtual-gpu shards --model meta-llama/Llama-3.1-405B --gpu H100 --gpus 1024 --tensor-parallel 8 --json
""",
    "compare": """
virtual-gpu compare before.json after.json
virtual-gpu compare before.json after.json --fail-if-peak-grew 2%
virtual-gpu compare run.json snapshot.pickle --json
virtual-gpu compare run.json snapshot.pickle --again --gpu A100-40GB train.py --epochs 1
""",
    "replay": """
virtual-gpu replay snapshot.pickle
virtual-gpu replay trace.json.gz
virtual-gpu replay snapshot.pickle --json
""",
    "doctor": """
virtual-gpu doctor error.txt
python train.py 2>&1 | tee log.txt; virtual-gpu doctor log.txt
virtual-gpu doctor - --json < error.txt
""",
    "bug-report": """
virtual-gpu bug-report
virtual-gpu bug-report > report.json
python train.py > output.txt 2>&1; virtual-gpu bug-report > report.json
""",
    "completion": """
source <(virtual-gpu completion bash)
virtual-gpu completion bash > ~/.local/share/bash-completion/completions/virtual-gpu
virtual-gpu completion zsh > ~/.zfunc/_virtual-gpu
""",
}  # subcommand → lines that can be typed as they are


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, print what was asked for, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    take_language(given)
    asked = subcommand(given)
    if asked == "largest" and any(word.partition("=")[0] == "--argument" for word in given):
        given = _joined(given)
        asked = "largest --argument"
    args = _parser(asked).parse_args(given)
    with kept_on_disk(not getattr(args, "no_cache", True)):  # others run a program, or measure nothing
        return answer(args.execute, args)


def subcommand(given: Sequence[str]) -> str | None:
    """The subcommand that these words ask for; None where none does."""
    return next((word for word in given if word in _commands()), None)


def _joined(given: list[str]) -> list[str]:
    """`--argument --batch_size` as one word: what follows is a value, though it looks like an option."""
    if "--argument" not in given:
        return given
    place = given.index("--argument")
    return [*given[:place], "=".join(given[place : place + 2]), *given[place + 2 :]]


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any):
        super().__init__(option_strings, dest, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .about import versions

        print(versions())
        parser.exit()


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the subcommand that is asked for; to name the others nothing is imported."""
    parser = Parser(
        prog="virtual-gpu",
        description=tr(
            ko="학습에 드는 GPU 메모리를 GPU 없이 센다.", en="Counts the GPU memory of training without the GPU."
        ),
    )
    _teach(parser, None)
    parser.add_argument(
        "--version",
        action=_Version,
        help=tr(ko="이 패키지와 PyTorch와 규칙의 버전", en="versions: ours, PyTorch's, the rules'"),
    )
    parser.add_argument("--language", choices=LANGUAGES, default=None)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in _commands().items():
        if name == "largest" and asked == "largest --argument":
            module = importlib.import_module(".program.command", __package__)
            module.add_largest_to(commands).set_defaults(execute=module.execute_largest)
        elif asked not in (name, "completion"):
            commands.add_parser(name, help=text)
        elif name in (own := _own()):
            own[name](commands.add_parser(name, help=text, description=text))
        else:
            module = importlib.import_module(_ELSEWHERE[name], __package__)
            module.add_to(commands).set_defaults(execute=module.execute)
        _teach(commands.choices[name], name)
    return parser


def _statuses(name: str | None) -> str:
    """What the exit status of a subcommand says, where its own module has not said it."""
    right, wrong = (
        {
            "fit": tr(ko="0 들어가는 방법이 있다, 1 없다", en="0 something fits, 1 nothing does"),
            "largest": tr(ko="0 찾았다, 1 들어가는 것이 없다", en="0 it was found, 1 nothing fits"),
            "shards": tr(ko="0 들어간다, 1 들어가지 않는다", en="0 it fits, 1 it does not"),
            "compare": tr(ko="0 견주었다, 1 한도보다 늘었다", en="0 compared, 1 the peak grew beyond the limit"),
            "replay": tr(ko="0 모두 같다, 1 다른 것이 있다", en="0 all is equal, 1 something is not"),
        }.get(name),
        tr(ko="2 인자가 틀렸다", en="2 a wrong argument"),
    )
    return tr(ko=f"종료 상태: {right}, {wrong}.", en=f"Exit status: {right}, {wrong}.") if right else ""


def _teach(parser: argparse.ArgumentParser, name: str | None) -> None:
    """Put the examples of a subcommand behind its help."""
    lines = "\n  ".join(EXAMPLES[name].strip().splitlines())
    said = "".join(f"{text}\n\n" for text in (parser.epilog or _statuses(name),) if text)
    parser.epilog = said + tr(ko="예:", en="examples:") + f"\n  {lines}"
    parser.formatter_class = Help


def _own() -> dict[str, Callable[[argparse.ArgumentParser], None]]:
    """Subcommand → what adds its arguments, of those that are here."""
    from .about import add_bug_report

    return {
        "largest": _add_largest,
        "shards": _add_shards,
        "compare": _add_compare,
        "replay": _add_replay,
        "bug-report": add_bug_report,
        "completion": _add_completion,
    }


def _commands() -> dict[str, str]:
    """Subcommand → what it does."""
    return {
        "fit": tr(
            ko="모델과 GPU를 주면 들어가는 학습 방법을 순위를 매겨 보여 준다",
            en="a model and a GPU in, ranked ways to train that fit out",
        ),
        "largest": tr(
            ko="GPU에서 학습되는 가장 큰 모델, 또는 한 모델의 가장 큰 배치나 길이",
            en="the largest model that trains on a GPU, or one model's largest batch or length",
        ),
        "shards": tr(
            ko="여러 GPU에 나눈 학습 스텝(ZeRO)이 GPU 하나에서 차지하는 메모리",
            en="what a training step sharded over several GPUs (ZeRO) takes on one of them",
        ),
        "compare": tr(ko="저장한 두 실행을 견준다", en="two saved runs beside each other"),
        "replay": tr(
            ko="카드가 기록한 할당을 이 할당자로 다시 한다",
            en="what a card's allocator recorded, done again by this one",
        ),
        "run": tr(ko="프로그램을 고치지 않고 실행한다", en="run an unchanged program on a GPU that is not there"),
        "doctor": tr(
            ko="메모리 부족 메시지를 읽고 까닭을 말한다", en="read an out-of-memory message and name the cause"
        ),
        "bug-report": tr(
            ko="버그를 알릴 때 물어볼 것을 모은다(사적인 것은 없다)",
            en="gather what a report of a bug needs, and nothing private",
        ),
        "completion": tr(ko="셸의 자동 완성 스크립트를 출력한다", en="print the shell's completion script"),
    }


def _checkpointing() -> str:
    return tr(ko="그레이디언트 체크포인팅을 켠다", en="with gradient checkpointing")


def _add_largest(parser: argparse.ArgumentParser) -> None:
    from .step.optimizers import OPTIMIZERS
    from .step.setting import PRECISIONS

    add = parser.add_argument
    add("--gpu", default="T4", help=tr(ko="GPU의 이름이나 크기", en="the GPU's name or size"))
    of_a_program = "virtual-gpu largest --argument --batch_size --help"
    add(
        "--argument",
        metavar="NAME program …",
        help=tr(
            ko="모델 대신 내 프로그램에서 찾는다: 이 인자의 가장 큰 값. 맨 뒤에 프로그램과 인자를 적는다. 그때 쓸 수 "
            f"있는 옵션은 `{of_a_program}`",
            en="look into a program of yours in place of a model: the largest value of this argument of it. The "
            f"program and its arguments come last. What else may be said then: `{of_a_program}`",
        ),
    )
    add("--model", help=tr(ko="모델: 없으면 들어 있는 모델 모두", en="a model; without it all that are bundled"))
    add("--of", default="batch_size", help=tr(ko="찾을 것", en="what to look for") + ": batch_size, sequence_length")
    add("--peft", help=tr(ko="없으면 전체 미세 조정", en="without it full fine-tuning") + ": lora, qlora")
    add("--precision", default="auto", help=", ".join(PRECISIONS))
    add("--optimizer", default="adamw", help=", ".join(OPTIMIZERS))
    add("--length", default="256", help=tr(ko="시퀀스 길이(토큰)", en="sequence length in tokens"))
    add("--batch", default="1", help=tr(ko="배치(샘플)", en="samples"))
    add("--checkpointing", action="store_true", help=_checkpointing())
    add("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    add_no_cache(parser)
    add("--language", choices=LANGUAGES, default=None)
    parser.set_defaults(execute=_largest)


def _largest(args: argparse.Namespace) -> int:
    from .step.largest import largest_fitting, largest_model, of_pure_fp16
    from .units import human_bytes

    if args.argument is not None:  # an abbreviation of it, by which it is not known in time
        raise WrongValue(tr(ko="--argument를 줄이지 않고 적는다.", en="--argument has to be written in full."))
    tell(tr(ko="찾는 중이다. Ctrl+C를 누르면 멈춘다.", en="Searching; Ctrl+C stops."))
    settings = {
        "precision": args.precision,
        "optimizer": args.optimizer,
        "sequence_length": number(args.length),
        "batch_size": number(args.batch),
        "gradient_checkpointing": args.checkpointing,
    }
    if args.model is None:
        found = largest_model(args.gpu, args.peft, progress=tell, **settings)
        name, parameters, needed = found or (None, 0, 0)
        result = {"model": name, "parameters": parameters, "tensors_bytes": needed}
        said = tr(ko=f"파라미터 {parameters:,}개", en=f"{parameters:,} parameters")
        text = f"{name}: {said}, {human_bytes(needed)}" if found else None
    else:
        if args.of in settings:
            del settings[args.of]
        count = largest_fitting(
            args.of, gpu=args.gpu, model_id=args.model, peft=args.peft, progress=tell, **settings
        )  # fmt: skip
        result, text = {"model": args.model, args.of: count}, f"{args.of} {count:,}" if count else None
        found, name = count, args.model
    result["caution"] = ""
    if found and args.peft is None and of_pure_fp16(name, args.precision):
        result["caution"] = tr(
            ko="순수 fp16으로 전체 미세 조정한다고 보고 셌는데, 그렇게는 제대로 배우지 못한다. 학습할 때의 크기는 "
            "--precision mixed_fp16으로 다시 찾는다.",
            en="counted as full fine-tuning in pure fp16, which does not learn well. For what trains, search again "
            "with --precision mixed_fp16.",
        )
        text = f"{text}\n⚠ {result['caution']}"
    say(
        json.dumps({"schema": SCHEMA, "gpu": args.gpu, **result}, ensure_ascii=False, indent=2)
        if args.json
        else text or tr(ko="들어가는 것이 없다.", en="Nothing fits.")
    )
    return FITS if found else NOTHING_FITS


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("before", help=tr(ko="run --save의 파일이나 PyTorch의 스냅샷", en="of run --save, or PyTorch's snapshot"))
    add("after", help=tr(ko="그것과 견줄 파일", en="the same, of the run beside it"))
    add("--fail-if-peak-grew", metavar="2%", help=tr(ko="이보다 늘면 종료 상태 1", en="exit status 1 beyond it"))
    add("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    add("--language", choices=LANGUAGES, default=None)
    add(
        "--again",
        nargs=argparse.REMAINDER,
        metavar="…",
        help=tr(
            ko="맨 끝에, 첫째의 `virtual-gpu run` 인자: 규칙을 하나씩 빼고 다시 실행해 차이가 나는 까닭을 찾는다",
            en="last, the arguments of `virtual-gpu run` that made the first: run again without one rule at a time, to "
            "name the one that explains the difference",
        ),
    )
    parser.set_defaults(execute=_compare)


def _compare(args: argparse.Namespace) -> int:
    from .trace.compare import compare

    limit = None
    if args.fail_if_peak_grew is not None:
        limit = number(args.fail_if_peak_grew.removesuffix("%"))
        if isinstance(limit, str) or not limit >= 0:
            given = f"--fail-if-peak-grew {args.fail_if_peak_grew:.80}"
            raise WrongValue(tr(ko=f"{given}: '2%'처럼 0 이상이어야 한다.", en=f"{given}: must be 0 or more, as 2%."))
    without = None
    if args.again is not None:
        from .program.again import saved_without
        from .program.command import same_again

        again = same_again(args.again)

        def without(rule: str) -> Any:
            tell(tr(ko=f"규칙 {rule} 없이 다시 실행한다", en=f"running again without the rule {rule}"))
            return saved_without(rule, *again)

    tell(tr(ko="견주는 중이다. Ctrl+C를 누르면 멈춘다.", en="Comparing; Ctrl+C stops."))
    found = compare(args.before, args.after, without=without)
    text = json.dumps({"schema": SCHEMA, **found.json()}, ensure_ascii=False, indent=2) if args.json else found.text()
    say(text)
    return NOTHING_FITS if limit is not None and found.growth > limit / 100 else FITS


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", help=tr(ko="PyTorch의 스냅샷이나 줄인 기록", en="PyTorch's snapshot, or a reduced trace"))
    add("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    add("--language", choices=LANGUAGES, default=None)
    parser.set_defaults(execute=_replay)


def _replay(args: argparse.Namespace) -> int:
    from .trace.replay import replay

    tell(tr(ko="다시 하는 중이다. Ctrl+C를 누르면 멈춘다.", en="Replaying; Ctrl+C stops."))
    found = replay(args.file)
    if args.json:
        say(json.dumps({"schema": SCHEMA, "devices": [one.json() for one in found]}, indent=2))
    else:
        say("\n\n".join(one.text() for one in found))
    return FITS if all(one.exact for one in found) else NOTHING_FITS


def _add_shards(parser: argparse.ArgumentParser) -> None:
    from .shards.layout import CONVENTIONS

    add = parser.add_argument
    add("--model", required=True, help=tr(ko="모델의 이름, 허브 id나 폴더", en="a known name, a hub id or a folder"))
    add("--gpu", default="H100", help=tr(ko="GPU의 이름이나 크기", en="the GPU's name or size"))
    add("--gpus", default="8", help=tr(ko="GPU 수", en="how many"))
    add("--stage", default="3", help=tr(ko="ZeRO의 단계", en="ZeRO's stage"))
    add("--tensor-parallel", default="1", help=tr(ko="텐서 병렬의 GPU 수", en="GPUs that share each layer"))
    add("--precision", default="mixed", help=", ".join(CONVENTIONS))
    add("--length", default="1024", help=tr(ko="시퀀스 길이(토큰)", en="sequence length in tokens"))
    add("--batch", default="1", help=tr(ko="GPU 하나의 마이크로 배치", en="one GPU's micro-batch"))
    add("--checkpointing", action="store_true", help=_checkpointing())
    add("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    add_no_cache(parser)
    add("--language", choices=LANGUAGES, default=None)
    parser.set_defaults(execute=_shards)


def _shards(args: argparse.Namespace) -> int:
    from .plan.request import MOST_GPUS
    from .shards.rank_step import rank_step
    from .units import positive_int

    gpus = positive_int(number(args.gpus), "gpus")
    if gpus > MOST_GPUS:
        raise WrongValue(tr(ko=f"gpus={gpus}: {MOST_GPUS}까지다.", en=f"gpus={gpus}: at most {MOST_GPUS}."))
    tell(tr(ko="스텝 하나를 센다. Ctrl+C를 누르면 멈춘다.", en="Counting one step; Ctrl+C stops."))
    step = rank_step(
        args.model, gpus, number(args.stage), tensor_parallel=number(args.tensor_parallel), precision=args.precision,
        batch_size=number(args.batch), sequence_length=number(args.length), gradient_checkpointing=args.checkpointing,
        gpu=args.gpu, exact=False,
    )  # fmt: skip
    result = {
        "model": step.model,
        "gpu": step.gpu_name,
        "gpus": gpus,
        "stage": number(args.stage),
        "fits": step.fits,
        "tensors_bytes": step.total,
        "at_peak": step.at_peak,
    }
    text = "\n".join([repr(step), *step.notes])
    say(json.dumps({"schema": SCHEMA, **result}, ensure_ascii=False, indent=2) if args.json else text)
    return FITS if step.fits else NOTHING_FITS


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.add_argument("--language", choices=LANGUAGES, default=None)
    parser.set_defaults(execute=_completion)


def _completion(args: argparse.Namespace) -> int:
    require("shtab")
    import shtab

    print(shtab.complete(_parser("completion"), args.shell))
    return FITS
