"""`virtual-gpu fit`: the planner in a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..disk_cache import add_no_cache
from ..drawing.svg import Drawing
from ..errors import NotSupported, WrongValue
from ..language import LANGUAGES, tr
from ..models.pages import pages_label
from ..room import TIGHT, TOO_MUCH
from ..step.budget import check_counted
from ..step.completions import GENERATIONS
from ..step.optimizers import OPTIMIZERS, optimizer_named
from ..step.own_code import OURS
from ..step.setting import OBJECTIVES
from ..terminal import FITS, NOTHING_FITS, Parser, answer, number, say, take_language, tell
from ..units import human_bytes
from ..writing import check_folder, write
from . import by_deepspeed
from .files import KINDS, check_kind, default_kind, names_of
from .host import host_need
from .keeping import curve_of, why_not_kept
from .lengths import Lengths, read_lengths
from .pictures import extra_label, seconds_label
from .plans import Plan
from .recipes import METHODS
from .request import MARGIN, PRECISIONS, Request
from .search import Plans, plan_training
from .start.terminal import execute as execute_start

_OF_THE_SEARCH = (  # options that say nothing of a file
    "picture", "budget", "lengths", "completion_length", "generations", "beta", "iterations", "vllm", "prefer",
    "selective", "cpu_offload", "tensor_parallel", "no_sequence_parallel", "context_parallel", "replicas", "device_map",
    "pipeline_parallel", "expert_parallel", "price_per_hour",
)  # fmt: skip


def add_to(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `fit`."""
    parser = commands.add_parser("fit", help=_what(), description=_what())
    _arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """`fit` as a program of its own: read the arguments, print, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    take_language(given)
    parser = Parser(prog="python -m helpers.planner", description=_what())
    _arguments(parser)
    return answer(execute, parser.parse_args(given))


def execute(args: argparse.Namespace) -> int:
    """Search, print the ranked plans (or JSON), save the best one's files, and return the exit status."""
    if args.name and args.model not in (None, args.name):
        raise WrongValue(
            tr(
                ko=f"모델이 둘이다: {args.name}, --model {args.model}. 하나만 준다.",
                en=f"Two models, {args.name} and --model {args.model}: give one of them.",
            )
        )
    args.model = args.model or args.name
    for name in _OF_THE_SEARCH:
        if args.start and getattr(args, name):
            name = name.replace("_", "-")
            raise WrongValue(tr(ko=f"--{name}: --model과 함께 쓴다.", en=f"--{name} goes with --model."))
    if args.start:
        return execute_start(args)
    if not args.model:
        raise WrongValue(tr(ko="--model이나 --from 가운데 하나는 있어야 한다.", en="Give --model or --from."))
    objective = args.objective or OBJECTIVES[0]
    kind = args.files or default_kind(objective)
    names = names_of(check_kind(kind, objective))  # before the work, not after it
    pictures = [Path(name) for name in (args.picture, args.budget) if name]
    for picture in pictures:
        check_folder(picture.parent, [picture.name], args.force)
    if args.save:
        check_folder(args.save, names, args.force)
    elif args.files:
        raise WrongValue(tr(ko="--files는 --save와 함께 쓴다.", en="--files says what --save writes: give --save too."))
    if args.lengths and objective != "sft":
        raise WrongValue(
            tr(
                ko=f"--lengths: 글 하나가 샘플일 때의 것이다. --objective {objective}에는 --length를 준다.",
                en=f"--lengths is of samples that are texts; with --objective {objective} give --length.",
            )
        )
    if args.budget:
        check_counted(objective, optimizer_named(args.optimizer or "adamw_fused"), args.optim_args or "")
    lengths = read_lengths(args.lengths) if args.lengths else None
    length = number(args.length) if args.length is not None else lengths.longest if lengths else 512
    tell(tr(ko="찾는 중이다. Ctrl+C를 누르면 멈춘다.", en="Searching; Ctrl+C stops."))
    plans = plan_training(
        args.model,
        args.gpu,
        number(args.gpus),
        length=length,
        batch=number(args.batch),
        methods=tuple(filter(None, args.methods.split(","))),
        precision=args.precision,
        optimizer=args.optimizer,
        optim_args=args.optim_args or "",
        optim_target_modules=tuple(filter(None, (args.optim_target_modules or "").split(","))),
        margin=number(args.margin),
        lora_rank=number(args.lora_rank),
        lora_targets=args.lora_targets,
        modules_to_save=tuple(filter(None, args.modules_to_save.split(","))),
        host=args.host,
        prefer=args.prefer or "fidelity",
        selective=args.selective,
        cpu_offload=args.cpu_offload,
        objective=objective,
        completion_length=None if args.completion_length is None else number(args.completion_length),
        generations=None if args.generations is None else number(args.generations),
        beta=None if args.beta is None else number(args.beta),
        iterations=None if args.iterations is None else number(args.iterations),
        vllm=args.vllm,
        tensor_parallel=None if args.tensor_parallel is None else number(args.tensor_parallel),
        sequence_parallel=not args.no_sequence_parallel,
        context_parallel=None if args.context_parallel is None else number(args.context_parallel),
        pipeline_parallel=None if args.pipeline_parallel is None else number(args.pipeline_parallel),
        expert_parallel=None if args.expert_parallel is None else number(args.expert_parallel),
        replicas=None if args.replicas is None else number(args.replicas),
        device_map=args.device_map,
        price_per_hour=None if args.price_per_hour is None else number(args.price_per_hour),
        progress=_tell,
    )
    if args.json:
        found = plans.to_dict() | ({"lengths": lengths.to_dict(plans.request.length)} if lengths else {})
        say(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        say(_text(plans, lengths))
    if args.picture:
        _draw(plans.frontier(), args.picture, args)
    if args.save and plans.best:
        plans.best.save(args.save, args.force, kind if args.files else None)
        if not args.json:
            say(tr(ko=f"1번을 {args.save}에 저장했다.", en=f"Number 1 was written to {args.save}."))
            if kind == "deepspeed":
                say(_by_its_engine(plans.best))
    if args.budget and plans.best:
        whole = [plan for plan in plans.plans if not why_not_kept(plan.request, plan.recipe)]
        if not whole:
            raise NotSupported(
                tr(
                    ko="--budget: 들어가는 계획이 모두 층이나 글을 나누거나, 학습 상태를 CPU에 둔다. 그런 계획에서는 "
                    "블록이 무엇을 남길지를 세지 않는다.",
                    en="--budget: all plans that fit split their layers or texts, or keep their states on the CPU; of "
                    "such ones it is not counted what blocks could keep.",
                )
            )
        curve = curve_of(min(whole, key=lambda plan: not plan.recipe.checkpointing))
        if not args.json:
            say(f"{curve.title}: {curve!r}")
        _draw(curve.chart(), args.budget, args)
    return FITS if plans.plans else NOTHING_FITS


def _by_its_engine(plan: Plan) -> str:
    """What DeepSpeed's own engine takes of the plan, whose figures are FSDP2's."""
    tell(by_deepspeed.waiting())
    try:
        card = by_deepspeed.of_plan(plan).card
    except NotSupported as error:
        more = tr(ko="재는 명령은 train.py에 있다", en="train.py has the command that measures it")
        return f"{by_deepspeed.as_fsdp(str(error))}. {more}."
    room, name = plan.request.room, by_deepspeed.named()
    verdict = {
        TIGHT: tr(ko=" 빠듯하다.", en=" That is tight."),
        TOO_MUCH: tr(ko=" 들어가지 않는다.", en=" That does not fit."),
    }
    fits = verdict.get(room.verdict(int(card * (1 + plan.request.margin))), "")
    return tr(
        ko=f"계획은 FSDP2를 센 것이다. {name}의 엔진을 가상 GPU에서 실행하면: {room.needs(card)}.{fits}",
        en=f"The plan counts FSDP2. {name}'s own engine on a virtual GPU: {room.needs(card)}.{fits}",
    )


def _draw(drawing: Drawing, name: str, args: argparse.Namespace) -> None:
    path = Path(name)
    write({path.name: drawing.svg()}, path.parent, args.force)
    if not args.json:
        say(tr(ko=f"그림을 {path}에 저장했다.", en=f"The picture was written to {path}."))


def _tell(plans: Plans) -> None:
    best = f": {plans.best!r}" if plans.best else ""
    found = len(plans)
    if plans.settled:
        tell(tr(ko=f"1번은 정해졌다{best} (더 찾는 중, {found}가지)", en=f"number 1 is settled{best} ({found} so far)"))
    else:
        tell(tr(ko=f"찾는 중, {found}가지{best}", en=f"searching, {found} so far{best}"))


def _text(plans: Plans, lengths: Lengths | None = None) -> str:
    dollars = "$" if plans.request.price_per_hour is None else ""
    lines = [plans.verdict, *([lengths.line(plans.request.length)] if lengths else [])]
    for i, plan in enumerate(plans.plans, 1):
        lines.append(f"{i:2}. {plan!r}")
        lines.append(f"    {plan.request.room.line(plan.needed_bytes)}")
        lines.append(f"    {host_need(plan).line(plans.request.host)}")
        extra, bound, sent = extra_label(plan), _bound(plan.seconds), human_bytes(plan.sent_bytes)
        ko, en = (f", 보내는 양 {sent}", f", sent {sent}") if plans.request.gpus > 1 else ("", "")
        if plan.between_nodes_bytes:
            between = human_bytes(plan.between_nodes_bytes)
            ko, en = f"{ko}(노드마다 다른 노드로 {between})", f"{en} ({between} from each node to others)"
        lines.append(
            tr(
                ko=f"    추가 연산 {extra}{ko}, 스텝 시간의 하한 {bound}",
                en=f"    extra work {extra}{en}, step: {bound}",
            )
        )
        if plan.generation_bytes:
            made, learned = human_bytes(plan.generation_bytes), human_bytes(plan.training_bytes)
            lines.append(
                tr(
                    ko=f"    텐서의 최대: 답을 만들 때 {made}, 학습할 때 {learned}",
                    en=f"    tensors at most: {made} while generating, {learned} while training",
                )
            )
        if plan.engine:
            lines.append(f"    {plan.engine.line(plan.request)}")
        if lengths:
            lines.append(f"    {lengths.line_of(plan.micro_batch, plans.request.batch, plans.request.length)}")
        if plan.recipe.kept:
            kept = ", ".join(plan.recipe.kept)
            lines.append(tr(ko=f"    블록이 남기는 결과: {kept}", en=f"    blocks keep the results of: {kept}"))
        if plan.beyond_best is not None:
            lines.append(
                tr(
                    ko=f"    결과를 달리 골라도 연산은 많아야 {plan.beyond_best:.1%} 준다(선형 완화)",
                    en=f"    no other choice of results computes over {plan.beyond_best:.1%} less (linear relaxation)",
                )
            )
        if plan.offloaded_bytes:
            sent = human_bytes(plan.offloaded_bytes)
            ko, en = ("체크포인트", "checkpoints") if plan.recipe.offload else ("블록의 결과", "blocks' results")
            lines.append(
                tr(
                    ko=f"    스텝마다 {ko} {sent}를 CPU로 보내고 다시 받는다",
                    en=f"    a step sends {sent} of {en} to the CPU and back",
                )
            )
        if plan.states_to_card_bytes:
            there, back = human_bytes(plan.states_to_card_bytes), human_bytes(plan.states_to_cpu_bytes)
            lines.append(
                tr(
                    ko=f"    스텝마다 GPU마다 파라미터 {there}를 받고 그레이디언트 {back}를 CPU로 보낸다. "
                    "옵티마이저 스텝은 CPU가 한다(그 시간은 하한에 없다)",
                    en=f"    a step copies {there} of parameters to each GPU and {back} of gradients to the CPU, which "
                    "runs the optimizer (not in the bound)",
                )
            )
        lines += [f"    {pages_label(plan.paged_bytes, plan.evicted_bytes)}"] if plan.paged_bytes else []
        if plan.to_cpu_bytes and plan.request.spec.link_bytes_per_s is None:
            why = tr(
                ko="    그 시간은 하한에 없다(링크의 속도를 모른다)", en="    the bound leaves that out (no link rate)"
            )
            lines.append(why)
        if plan.price is not None:
            lines.append(
                tr(
                    ko=f"    백만 토큰에 적어도 {dollars}{plan.price:,.4g} (시간의 하한에서 센 하한이다)",
                    en=f"    a million tokens: at least {dollars}{plan.price:,.4g} (a bound, from the bound on time)",
                )
            )
    lines += [_rent(plans.request)] if dollars and plans.best and plans.best.price is not None else []
    lines += [f"⚠ {plans.request.caution}"] if plans.request.caution else []
    for change in plans.changes:
        lines.append(f"  - {change}")
    lines += [tr(ko="탈락한 것:", en="Losers:"), *(f"  - {line}" for line in repr(plans.why()).splitlines())]
    return "\n".join(lines)


def _rent(request: Request) -> str:
    """By which rate prices are counted where the reader gives none."""
    rent, most_ko, most_en = request.spec.rent, "이다", ""
    if rent.high > rent.low:
        most_ko = f"이고, 가장 비싼 것은 ${rent.high:g}다({rent.high_at})"
        most_en = f", ${rent.high:g} the most ({rent.high_at})"
    return tr(
        ko=f"비용은 {request.gpu} 하나의 대여료를 시간당 ${rent.low:g}로 놓고 셌다. 찾은 대여료 가운데 가장 싼 "
        f"것({rent.low_at}, {rent.date}){most_ko}. 내 대여료는 --price-per-hour로 준다.",
        en=f"Prices: ${rent.low:g} an hour of one {request.gpu}, the least found ({rent.low_at}, {rent.date})"
        f"{most_en}. Give yours by --price-per-hour.",
    )


def _bound(seconds: float | None) -> str:
    if seconds is None:
        return tr(ko="없음 (공개된 속도가 없다)", en="no lower bound (no published rate)")
    label = seconds_label(seconds)
    return tr(ko=f"{label} (예상이 아니다)", en=f"at least {label} (not a forecast)")


def _what() -> str:
    return tr(
        ko="모델과 GPU를 주면 들어가는 학습 방법을 순위를 매겨 보여 준다.",
        en="A model and a GPU in, ranked ways to train that fit out.",
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    add, free = parser.add_argument, tr(ko="없으면 플래너가 고른다: ", en="without it the planner chooses: ")
    add(
        "--from",
        dest="start",
        metavar="FILE",
        help=tr(
            ko="TrainingArguments, TRL, axolotl, LLaMA-Factory, torchtune의 설정 파일이 들어가는지, 어느 줄을 바꿀지",
            en="a configuration of TrainingArguments, TRL, axolotl, LLaMA-Factory or torchtune: does it fit as it is, "
            "and which of its lines to change",
        ),
    )
    add("name", nargs="?", metavar="MODEL", help=tr(ko="--model과 같다", en="what --model says"))
    add("--model", help=tr(ko="모델의 이름, 허브 id나 폴더", en="a known name, a hub id or a folder"))
    add("--gpu", default="T4", help=tr(ko="GPU의 이름이나 크기, '2 x T4'", en="the GPU's name or size, '2 x T4'"))
    add("--gpus", default="1", help=tr(ko="GPU 수", en="how many"))
    add(
        "--host",
        default=None,
        metavar="MACHINE",
        help=tr(ko="RAM도 본다: Colab, Kaggle, '32GB'", en="its RAM too: Colab, Kaggle, '32GB'"),
    )
    add("--length", help=tr(ko="시퀀스 길이(토큰). 없으면 512", en="sequence length in tokens, 512 without it"))
    add(
        "--lengths",
        metavar="FILE",
        help=tr(
            ko="내 데이터의 샘플마다 토큰 수: 줄마다 하나, 또는 length나 input_ids가 있는 JSONL. --length가 없으면 "
            "가장 긴 것으로 센다",
            en="tokens of each sample of your data: one number a line, or JSONL with length or input_ids; without "
            "--length the longest counts",
        ),
    )
    add(
        "--objective",
        default=None,
        help=tr(
            ko="sft(없으면), dpo(TRL의 DPOTrainer: --batch는 쌍, --length는 프롬프트와 답 하나), "
            "grpo(TRL의 GRPOTrainer: --batch는 만든 답, --length는 프롬프트와 답 하나)",
            en="sft (without it), dpo (TRL's DPOTrainer: --batch counts pairs, --length a prompt with one answer), "
            "grpo (TRL's GRPOTrainer: --batch counts completions, --length a prompt with one)",
        ),
    )
    add(
        "--completion-length",
        metavar="N",
        help=tr(
            ko="grpo: --length 가운데 모델이 만드는 토큰(max_completion_length). 없으면 절반",
            en="grpo: tokens of --length that the model generates (max_completion_length), half without it",
        ),
    )
    add(
        "--generations",
        metavar="N",
        help=tr(
            ko=f"grpo: 프롬프트 하나에 만드는 답(num_generations). 없으면 {GENERATIONS}. --batch는 그 배수",
            en=f"grpo: completions of a prompt (num_generations), {GENERATIONS} without it; --batch is a multiple",
        ),
    )
    add(
        "--beta",
        metavar="B",
        help=tr(
            ko="grpo: KL 항의 계수(없으면 0). 0보다 크면 기준 모델을 둔다",
            en="grpo: the weight of the KL term; over 0 (without it) there is a reference",
        ),
    )
    add(
        "--iterations",
        metavar="N",
        help=tr(
            ko="grpo: 같은 답으로 옵티마이저 스텝을 하는 횟수(num_iterations). 없으면 1",
            en="grpo: optimizer steps on the same completions (num_iterations), 1 without it",
        ),
    )
    add(
        "--vllm",
        metavar="MODE",
        help=tr(
            ko="grpo: 답을 같은 카드의 vLLM이 만든다. colocate, asleep(학습하는 동안 재우는 것만). 없으면 generate",
            en="grpo: vLLM on the same card makes the completions: colocate, or asleep (only with the engine asleep "
            "while the model is trained); without it generate does",
        ),
    )
    add("--batch", default="16", help=tr(ko="옵티마이저 스텝 하나의 샘플", en="samples of one optimizer step"))
    add("--methods", default=",".join(METHODS), help=tr(ko="허용하는 방법, 쉼표로 잇는다", en="allowed, by commas"))
    add("--precision", default=None, help=free + ", ".join(PRECISIONS))
    more = tr(
        ko="그리고 TrainingArguments의 optim에 적을 수 있는 모든 이름",
        en="and every name of TrainingArguments' optim",
    )
    add("--optimizer", default=None, help=f"{free}{', '.join((*OPTIMIZERS, *OURS))}, {more}")
    of_optimizer = tr(
        ko="그 옵티마이저의 설정. TrainingArguments처럼 적는다: ",
        en="of that optimizer, as TrainingArguments: ",
    )
    add("--optim-args", default=None, metavar="ARGS", help=of_optimizer + "rank=128,scale=0.25")
    add("--optim-target-modules", default=None, metavar="NAMES", help=of_optimizer + "all-linear, q_proj,v_proj")
    add(
        "--margin",
        default=str(MARGIN),
        help=tr(ko="모르는 것 말고 더 남길 몫", en="share to keep free besides"),
    )
    add("--lora-rank", default="8", help=tr(ko="LoRA의 rank", en="LoRA's rank"))
    add("--lora-targets", default="attention", help="attention, all-linear")
    whole = tr(ko="어댑터 옆에서 통째로 학습할 모듈: ", en="modules trained whole beside adapters: ")
    add("--modules-to-save", default="", metavar="NAMES", help=f"{whole}embed_tokens,lm_head")
    preferences = tr(
        ko="순위의 기준: fidelity(없으면), speed, margin", en="what ranks: fidelity (without it), speed, margin"
    )
    add("--prefer", default=None, help=preferences)
    add(
        "--selective",
        action="store_true",
        help=tr(
            ko="남는 메모리로 체크포인팅의 재계산을 줄인다(찾는 시간이 두 배쯤 든다)",
            en="spend what is left on results that checkpointing would compute again (the search takes twice as long)",
        ),
    )
    add(
        "--cpu-offload",
        action="store_true",
        help=tr(
            ko="전체 미세 조정의 파라미터, 그레이디언트, 옵티마이저 상태를 CPU에 두는 것도 센다(FSDP2)",
            en="also count full fine-tuning with parameters, gradients and optimizer state in the CPU's RAM (FSDP2)",
        ),
    )
    add(
        "--tensor-parallel",
        default=None,
        metavar="N",
        help=tr(
            ko="텐서 병렬: GPU N개가 층 하나를 나누어 계산하는 전체 미세 조정만 찾는다. 없으면 달리 들어가지 "
            "않거나 배치가 GPU 수보다 작을 때만 해 본다",
            en="only full fine-tuning in which N GPUs compute each layer together; without it, tried where it matters",
        ),
    )
    add(
        "--no-sequence-parallel",
        action="store_true",
        help=tr(
            ko="텐서 병렬에서 토큰과 로짓은 나누지 않는다(없으면 나눌 수 있는 모델에서 나눈다)",
            en="tensor parallelism without splitting tokens and logits too (done where the model allows it)",
        ),
    )
    add(
        "--context-parallel",
        default=None,
        metavar="N",
        help=tr(
            ko="컨텍스트 병렬: GPU N개가 글 하나를 나누어 계산하는 전체 미세 조정만 찾는다. 없으면 글을 나누지 않고는 "
            "들어가지 않거나 배치가 GPU 수보다 작을 때만 해 본다",
            en="only full fine-tuning in which N GPUs share each text; without it, tried where whole texts do not fit",
        ),
    )
    add(
        "--pipeline-parallel",
        default=None,
        metavar="N",
        help=tr(
            ko="파이프라인 병렬: 층을 스테이지 N개에 나누고 마이크로 배치를 차례로 보내는 전체 미세 조정만 찾는다",
            en="only full fine-tuning in N stages, each with a part of the layers, through which micro-batches go one "
            "behind the other (1F1B)",
        ),
    )
    add(
        "--expert-parallel",
        default=None,
        metavar="N",
        help=tr(
            ko="전문가 병렬: GPU N개가 층마다 전문가를 나누어 갖고 토큰을 주고받는 전체 미세 조정만 찾는다",
            en="only full fine-tuning of a mixture of experts whose experts lie on N GPUs, to which tokens travel",
        ),
    )
    add(
        "--device-map",
        action="store_true",
        help=tr(
            ko="한 프로세스에서 층을 GPU들에 나누어 올리는 계획도 찾는다(device_map)",
            en="also with the layers spread over the GPUs of one process (device_map)",
        ),
    )
    add(
        "--replicas",
        default=None,
        metavar="N",
        help=tr(
            ko="HSDP: 모델 N벌을 GPU에 나누어 두는 전체 미세 조정만 찾는다(벌 사이에서는 그레이디언트만 더한다). "
            "없으면 노드(GPU 8개)가 여럿일 때, 들어가는 것 가운데 벌 수가 가장 많은 것을 찾는다",
            en="only full fine-tuning with N copies of the model, each split over a part of the GPUs (HSDP); without "
            "it, with several nodes of 8 the most that fit are looked for",
        ),
    )
    add(
        "--price-per-hour",
        default=None,
        metavar="RATE",
        help=tr(
            ko="GPU 하나의 시간당 대여료. 없으면 찾은 것 가운데 가장 싼 대여료(달러)로 센다",
            en="of one GPU; without it the least rent found, in dollars",
        ),
    )
    add("--json", action="store_true", help=tr(ko="JSON으로 출력한다", en="print JSON"))
    add(
        "--save",
        metavar="FOLDER",
        help=tr(
            ko="1번의 파일을 여기에 쓴다(--from이면 줄을 바꾼 파일을 이 이름으로)",
            en="write the best plan's files here (with --from: the changed file under this name)",
        ),
    )
    add(
        "--picture",
        metavar="FILE.svg",
        help=tr(ko="계획마다 필요한 메모리와 한 스텝의 연산을 그림으로", en="what each plan needs over a step's work"),
    )
    add(
        "--budget",
        metavar="FILE.svg",
        help=tr(
            ko="체크포인팅을 쓰는 첫 계획(없으면 첫 계획에 켜고)에서 블록이 무엇을 남기고, 다시 계산하고, CPU로 "
            "보낼지: 최대 메모리와 추가 연산의 곡선 전체를 그림으로",
            en="of the first plan with checkpointing (or of the first, with it), what its blocks keep, recompute or "
            "send to the CPU: the whole curve of peak over extra work",
        ),
    )
    kinds = tr(ko=f"--save가 쓰는 파일의 종류: {', '.join(KINDS)}", en=f"what --save writes: {', '.join(KINDS)}")
    add("--files", metavar="KIND", help=kinds)
    add("--force", action="store_true", help=tr(ko="있는 파일을 덮어쓴다", en="write over files that are there"))
    add_no_cache(parser)
    add("--language", choices=LANGUAGES, default=None)
