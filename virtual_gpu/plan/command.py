"""The planner in a terminal. Exit status 0: something fits; 1: nothing does; 2: a wrong argument."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ..language import LANGUAGES, set_language, tr
from .pictures import extra_label, seconds_label
from .plans import MARGIN, METHODS
from .search import Plans, plan_training

FITS, NOTHING_FITS, WRONG = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, print the ranked plans (or JSON), and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for code in LANGUAGES:  # before the help is made
        if f"--language={code}" in given or ("--language" in given and code in given):
            set_language(code)
    args = _parser().parse_args(given)
    try:
        plans = plan_training(
            args.model,
            args.gpu,
            _number(args.gpus),
            length=_number(args.length),
            batch=_number(args.batch),
            methods=tuple(filter(None, args.methods.split(","))),
            precision=args.precision,
            optimizer=args.optimizer,
            margin=_number(args.margin),
            lora_rank=_number(args.lora_rank),
            lora_targets=args.lora_targets,
        )
        if args.save and plans.best:
            plans.best.save(args.save)
    except (ValueError, ImportError, OSError) as error:
        print(tr(ko=f"오류: {error}", en=f"error: {error}"), file=sys.stderr)
        return WRONG
    print(json.dumps(plans.to_dict(), ensure_ascii=False, indent=2) if args.json else _text(plans, args.save))
    return FITS if plans.plans else NOTHING_FITS


def _number(text: str) -> int | float | str:
    """A number as Python reads it; anything else as it is, so that the check of the value itself names it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(plans: Plans, folder: str | None) -> str:
    lines = [plans.verdict]
    for i, plan in enumerate(plans.plans, 1):
        lines.append(f"{i:2}. {plan!r}")
        bound = seconds_label(plan.seconds)
        lines.append(
            tr(
                ko=f"    추가 연산 {extra_label(plan)}, 스텝 시간의 하한 {bound} (예상이 아니다)",
                en=f"    extra work {extra_label(plan)}, lower bound on a step {bound} (not a forecast)",
            )
        )
    for change in plans.changes:
        lines.append(f"  - {change}")
    lines += [tr(ko="진 것:", en="Losers:"), *(f"  - {line}" for line in repr(plans.why()).splitlines())]
    if folder and plans.best:
        lines.append(tr(ko=f"1번을 {folder}에 저장했다.", en=f"Number 1 was written to {folder}."))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.planner",
        description=tr(
            ko="모델과 GPU를 주면 들어가는 학습 방법을 순위를 매겨 보여 준다.",
            en="A model and a GPU in, ranked ways to train that fit out.",
        ),
    )
    add = parser.add_argument
    add("--model", required=True, help=tr(ko="모델의 이름, 허브 id나 폴더", en="a known name, a hub id or a folder"))
    add("--gpu", default="T4", help=tr(ko="GPU의 이름", en="the GPU's name"))
    add("--gpus", default="1", help=tr(ko="GPU 수", en="how many"))
    add("--length", default="512", help=tr(ko="시퀀스 길이(토큰)", en="sequence length in tokens"))
    add("--batch", default="16", help=tr(ko="옵티마이저 스텝 하나의 샘플", en="samples of one optimizer step"))
    add("--methods", default=",".join(METHODS), help=tr(ko="허용하는 방법, 쉼표로 잇는다", en="allowed, by commas"))
    add("--precision", default=None, help=tr(ko="mixed_fp16, mixed_bf16, bf16, fp32", en="the precision"))
    add("--optimizer", default=None, help=tr(ko="옵티마이저", en="the optimizer"))
    add("--margin", default=str(MARGIN), help=tr(ko="최대 메모리에 더할 여유", en="free share beside the peak"))
    add("--lora-rank", default="8", help="rank")
    add("--lora-targets", default="attention", help="attention, all-linear")
    add("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    add("--save", metavar="FOLDER", help=tr(ko="1번의 파일을 여기에 쓴다", en="write the best plan's files here"))
    add("--language", choices=LANGUAGES, default=None)
    return parser


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = FITS
    sys.exit(status)
