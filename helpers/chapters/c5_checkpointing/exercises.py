"""Chapter 5: what checkpointing stores and computes again."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from virtual_gpu.language import tr
from virtual_gpu.units import boolean, choose, human_bytes

from ...experiment import predict_memory
from ...self_check import Case, Exercise, filled, right
from ...small_model import Block
from .chain import execute, fewest_recomputations, schedule_by_splitting
from .costs import Levers, both_levers, printed_after_step
from .golf import BLOCKS, MOST_HELD, Keep, play, record
from .steps import Step, compare_steps

_TASK = {"model_id": "meta-llama/Llama-3.2-1B", "sequence_length": 4096, "optimizer": "adamw_8bit", "gpu": "L4"}
_BATCH = 4


@functools.cache
def _ways() -> Levers:
    return both_levers(_BATCH, **_TASK)


def _judge_levers(changes: dict[str, Any]) -> str:
    changes = {"batch_size": 1, "gradient_accumulation_steps": 1, "gradient_checkpointing": False, **filled(changes)}
    for name in changes:
        names = ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
        choose(name, names, tr(ko="설정", en="setting"))
    batch = changes["batch_size"] * changes["gradient_accumulation_steps"]
    if batch != _BATCH:
        return tr(
            ko=f"마이크로 배치 × 누적이 {batch}이다. {_BATCH}이어야 한다.",
            en=f"Micro-batch × accumulation is {batch}, not {_BATCH}.",
        )
    report = predict_memory(**_TASK, **changes)
    if not report.fits:
        return report.excess
    ways = _ways()
    chosen = (changes["batch_size"], changes["gradient_checkpointing"])
    one = next(way for way in ways if (way.micro_batch, way.checkpointing) == chosen)
    extra = one.flops / min(way.flops for way in ways) - 1
    found = tr(
        ko=f"최대 {human_bytes(report.needed_bytes)}, 추가 연산 {extra:.1%}.",
        en=f"Peak {human_bytes(report.needed_bytes)}, {extra:.1%} more work.",
    )
    if one is not ways.best:
        return tr(
            ko=f"들어간다. {found} 연산이 더 적거나, 연산이 같으면서 마이크로 배치가 더 큰 것이 있다.",
            en=f"It fits. {found} There is one with less work, or as much work and a larger micro-batch.",
        )
    return right(found)


_PUZZLES = ((6, 5), (11, 6), (17, 7), (31, 6), (41, 8))


def _judge_split(split: Callable[[int, int, int], int]) -> str:
    done = []
    for nodes, budget in _PUZZLES:
        schedule = schedule_by_splitting(nodes, budget, lambda *part: filled(split(*part)))
        run = execute(schedule, nodes)
        fewest = fewest_recomputations(nodes, budget)
        if run.recomputations > fewest:
            return tr(
                ko=f"노드 {nodes}개, 예산 {budget}개: 재계산 {run.recomputations}번. {fewest}번으로도 된다.",
                en=f"{nodes} nodes, budget {budget}: {run.recomputations} recomputations; {fewest} are enough.",
            )
        done.append(fewest)
    return right(tr(ko=f"재계산 {done}번, 모두 최소다.", en=f"{done} recomputations, the fewest in every case."))


def _judge_golf(keep: Keep) -> str:
    table = play({"yours": lambda block, result: bool(filled(keep(block, result)))})
    held, extra = table["yours"].held_bytes, table.extra("yours")
    found = f"{human_bytes(held)}, {extra:+.2%}."
    if held > MOST_HELD:
        return tr(
            ko=f"{found} {human_bytes(held - MOST_HELD)}를 더 줄여야 한다.",
            en=f"{found} {human_bytes(held - MOST_HELD)} too much is held.",
        )
    if extra > record() + 1e-4:
        return tr(
            ko=f"들어간다. {found} 알려진 가장 좋은 기록은 {record():+.2%}다.",
            en=f"Within the bytes. {found} The best known is {record():+.2%}.",
        )
    return right(tr(ko=f"{found} 알려진 가장 좋은 기록과 같다.", en=f"{found} As good as the best known."))


EXERCISES = {
    "5-1": lambda: Exercise(
        "5-1",
        _judge_split,
        lambda: [
            tr(
                ko="m걸음 뒤의 노드를 보관하면 드는 계산은 m + (뒤쪽을 slots - 1개로) + (앞쪽을 slots개로)이다.",
                en="The node m steps on costs m + (the later part with slots - 1) + (the earlier one with slots).",
            ),
            tr(
                ko="어느 부분이든 fewest_computations(노드 수, 보관 수)가 최소 횟수를 알려 준다. 모든 m을 견준다.",
                en="fewest_computations(nodes, slots) knows the fewest computations of any part. Compare every m.",
            ),
        ],
        "from helpers.chapters.c5_checkpointing.chain import fewest_computations\n\n\n"
        "def split(start, end, slots):\n"
        "    length = end - start + 1\n\n"
        "    def cost(steps):\n"
        "        later = fewest_computations(length - steps, slots - 1)\n"
        "        return steps + later + fewest_computations(steps, slots)\n\n"
        "    return start + min(range(1, length), key=cost)",
    ),
    "5-2": lambda: Exercise(
        "5-2",
        _judge_golf,
        lambda: [
            tr(
                ko="결과마다 아끼는 연산을 바이트로 나누어 본다. 다섯 가운데 어느 것이 가장 알찬가?",
                en="Divide the work that a result saves by its bytes. Which of the five is worth most?",
            ),
            tr(
                ko='"attention"은 모든 블록에서, 나머지는 자리가 되는 만큼 남긴다. "down"은 남겨도 얻는 것이 없다.',
                en='"attention" in every block, others in as many as there is room for; "down" saves nothing.',
            ),
        ],
        "def keep_result(block, result):\n"
        '    return result in ("attention", "query_key_value") or (result == "projection" and block < 2)',
    ),
    "5-3": lambda: Exercise(
        "5-3",
        _judge_levers,
        lambda: [
            tr(
                ko="체크포인팅 없이 마이크로 배치를 1까지 줄여 본다. 그래도 넘치면 무엇이 남는가?",
                en="Go down to a micro-batch of 1 without checkpointing. What is left if that does not fit?",
            ),
            tr(
                ko="both_levers(4, model_id=…, sequence_length=…, optimizer=…, gpu='L4')가 표를 만들어 준다.",
                en="both_levers(4, model_id=…, sequence_length=…, optimizer=…, gpu='L4') makes the table.",
            ),
        ],
        'changes = {"batch_size": 1, "gradient_accumulation_steps": 4}',
    ),
}

# -- cases ---------------------------------------------------------------------------------------------------------


def _reentrant(use_reentrant: bool = False, wrap: str = "whole", input_requires_grad: bool = False) -> Step:
    """One step of nine blocks and a head that is never wrapped."""
    choose(wrap, ("none", "whole", "each"), "wrap")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Block(width=64, heads=4) for _ in range(BLOCKS)])
        model = nn.Sequential(blocks, nn.Linear(64, 64))
        x = torch.randn(8, 64, 64, requires_grad=boolean(input_requires_grad, "input_requires_grad"))
    saving = functools.partial(checkpoint, use_reentrant=boolean(use_reentrant, "use_reentrant"))

    def loss() -> torch.Tensor:
        y = saving(blocks, x) if wrap == "whole" else x
        for block in blocks if wrap != "whole" else ():
            y = saving(block, y) if wrap == "each" else block(y)
        return model[1](y).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's one line names the cause; in a log of training nobody saw it
        return compare_steps(model, step=loss)["step"]


def _judge_reentrant(changes: dict[str, Any]) -> str:
    plain, step = _reentrant(wrap="none"), _reentrant(**filled(changes))
    if len(step.gradients) < len(plain.gradients):
        return tr(
            ko=f"최대 {human_bytes(step.peak_bytes)}. 파라미터 {len(plain.gradients)}개 가운데 "
            f"{len(step.gradients)}개만 그레이디언트를 받았다. 나머지는 학습되지 않는다.",
            en=f"Peak {human_bytes(step.peak_bytes)}, but {len(step.gradients)} of {len(plain.gradients)} parameters "
            "have a gradient; the others do not learn.",
        )
    share = step.peak_bytes / plain.peak_bytes
    found = tr(
        ko=f"모두 그레이디언트를 받았고 최대는 감싸지 않았을 때의 {share:.0%}다.",
        en=f"All have their gradient; the peak is {share:.0%} of the plain one.",
    )
    return right(found) if share < 0.5 else tr(ko=f"{found} 절반 아래여야 한다.", en=f"{found} It must be below half.")


_BOOK = {"use_cache": True, "gradient_checkpointing": False, "batch_size": 16}


def _printed(**changes: Any) -> str:
    for name in changes:
        choose(name, _BOOK, tr(ko="설정", en="setting"))
    printed, peak = (human_bytes(size) for size in printed_after_step(**{**_BOOK, **changes}))
    return tr(ko=f"스텝 직후 {printed}, 최대 {peak}", en=f"{printed} after the step, peak {peak}")


def _judge_printed(answer: tuple[str, str]) -> str:
    answer = filled(answer)
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return tr(ko=f"짝이 아니라 {answer!r}이다.", en=f"{answer!r} is no pair.")
    lowered = choose(answer[0], _BOOK, tr(ko="설정", en="setting"))
    saved = choose(answer[1], ("printed", "peak"), tr(ko="값", en="value"))
    if lowered != "use_cache":
        change = {"gradient_checkpointing": {"gradient_checkpointing": True}, "batch_size": {"batch_size": 4}}[lowered]
        off, on = (_printed(use_cache=False, **more) for more in ({}, change))
        return tr(
            ko=f"캐시를 꺼 두고 {lowered}만 바꾸면: {off} → {on}",
            en=f"With the cache off, {lowered} alone changes: {off} → {on}",
        )
    if saved != "peak":
        return tr(
            ko="캐시를 꺼 둔 채 체크포인팅을 켜고 끄면 스텝 직후의 값이 달라지는가?",
            en="With the cache off, does checkpointing change what is printed?",
        )
    off, on = (_printed(use_cache=False, gradient_checkpointing=on) for on in (False, True))
    return right(
        tr(
            ko=f"캐시를 꺼 두고 체크포인팅만 켜면: {off} → {on}. "
            "캐시(past_key_values)는 outputs에 들어 있어 다음 순전파까지 남는다.",
            en=f"With the cache off, checkpointing alone: {off} → {on}. The cache (past_key_values) lies in `outputs`, "
            "which stays until the next forward.",
        )
    )


CASES = {
    "5-A": lambda: Case(
        "5-A",
        _judge_reentrant,
        lambda: [
            tr(
                ko='run(use_reentrant=True).gradients에는 이름이 몇 개 있는가? wrap="none"과 견준다.',
                en='How many names has run(use_reentrant=True).gradients? Compare with wrap="none".',
            ),
            tr(
                ko="구간이 하나면 다시 계산할 때 전부가 한꺼번에 살아난다(5.4절).",
                en="With one segment everything comes back at once (section 5.4).",
            ),
        ],
        'case("5-A").run(use_reentrant=False, wrap="whole")\nanswer = {"use_reentrant": False, "wrap": "each"}',
        experiment=_reentrant,
        thread="https://github.com/pytorch/pytorch/issues/147449",
    ),
    "5-B": lambda: Case(
        "5-B",
        _judge_printed,
        lambda: [
            tr(
                ko="체크포인팅을 켜면 transformers가 use_cache도 끈다. 둘을 하나씩 바꾸어 본다.",
                en="With checkpointing transformers switches use_cache off as well: change them one by one.",
            ),
            tr(
                ko="스텝 직후에는 순전파 상태가 어차피 사라지고 없다. outputs가 붙들고 있는 것은 무엇인가?",
                en="After the step the activations are gone in any case. What does `outputs` hold?",
            ),
        ],
        'case("5-B").run(use_cache=False)\n'
        'case("5-B").run(use_cache=False, gradient_checkpointing=True)\n'
        'answer = ("use_cache", "peak")',
        experiment=_printed,
        thread="https://github.com/huggingface/transformers/issues/23808",
    ),
}
