"""Chapter 4: what fits, what each micro-batch counts for, how often the optimizer steps; two cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.splits import equal_splits, split_setting
from virtual_gpu.units import choose, human_bytes

from ...experiment import predict_memory
from ...self_check import Case, Exercise, compare, filled, right
from . import cases

_GROUPS = ([6, 6, 6, 6], [19, 24, 28, 31], [5, 100], [7])


def _judge_factors(function: Callable[[list[int]], list[float]]) -> str:
    for counts in _GROUPS:
        answer = filled(function(list(counts)))
        if not isinstance(answer, (list, tuple)) or len(answer) != len(counts):
            return tr(
                ko=f"{counts}: 수 {len(counts)}개의 목록을 돌려주어야 한다. 지금은 {answer!r}이다.",
                en=f"{counts}: return a list of {len(counts)} numbers; got {answer!r}.",
            )
        for factor, count in zip(answer, counts, strict=True):
            expected = count / sum(counts)
            if not isinstance(factor, (int, float)) or abs(factor - expected) > 1e-9:
                return tr(
                    ko=f"{counts}: 토큰 {count}개인 마이크로 배치에 {factor}을(를) 곱했다. {expected:.4f}이어야 한다.",
                    en=f"{counts}: the micro-batch of {count} tokens is multiplied by {factor}, not {expected:.4f}.",
                )
    return right()


_EPOCHS = ((64, 4, 4), (100, 8, 4), (1000, 3, 7), (5, 8, 2))


def _judge_steps(function: Callable[[int, int, int], int]) -> str:
    for samples, micro, accumulation in _EPOCHS:
        expected = math.ceil(math.ceil(samples / micro) / accumulation)
        what = tr(
            ko=f"샘플 {samples}개, 마이크로 배치 {micro}, 누적 {accumulation}",
            en=f"{samples} samples, micro-batch {micro}, accumulation {accumulation}",
        )
        if wrong := compare(function(samples, micro, accumulation), expected, what):
            return wrong
    return right()


_BATCH, _LENGTH = 32, 512


def _judge_split(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    for name in changes:
        choose(name, ("batch_size", "gradient_accumulation_steps"), tr(ko="설정", en="setting"))
    setting = Setting(**{"batch_size": 1, **changes}, sequence_length=_LENGTH)
    steps = setting.gradient_accumulation_steps
    if setting.batch_size * steps != _BATCH:
        return tr(
            ko=f"마이크로 배치 × 누적이 {setting.batch_size * steps}이다. {_BATCH}이어야 한다.",
            en=f"Micro-batch × accumulation is {setting.batch_size * steps}, not {_BATCH}.",
        )

    def predicted(micro: int, steps: int) -> Any:
        return predict_memory(split_setting(micro, steps, sequence_length=_LENGTH), gpu="T4")

    report = predicted(setting.batch_size, steps)
    if not report.fits:
        return report.excess
    larger = [(micro, fewer) for micro, fewer in equal_splits(_BATCH) if micro > setting.batch_size]
    if larger and predicted(*larger[-1]).fits:
        micro, fewer = larger[-1]
        return tr(
            ko=f"들어간다. 그런데 {micro} × {fewer}도 들어간다. 나누는 횟수를 줄여 본다.",
            en=f"It fits, and so does {micro} × {fewer}: split less often.",
        )
    return right(tr(ko=f"최대 {human_bytes(report.needed_bytes)}.", en=f"Peak {human_bytes(report.needed_bytes)}."))


EXERCISES = {
    "4-1": lambda: Exercise(
        "4-1",
        _judge_split,
        lambda: [
            tr(
                ko="길이가 두 배면 순전파 상태도 두 배다. 길이 256에서 들어간 마이크로 배치의 절반쯤에서 시작한다.",
                en="Twice the length, twice the activations: begin at half of what fitted at length 256.",
            ),
            tr(
                ko="virtual_gpu의 splits(32, gpu='T4', sequence_length=512)가 나누는 방법마다 메모리를 알려 준다.",
                en="splits(32, gpu='T4', sequence_length=512) of virtual_gpu knows every split's memory.",
            ),
        ],
        "changes = {'batch_size': 4, 'gradient_accumulation_steps': 8}",
    ),
    "4-2": lambda: Exercise(
        "4-2",
        _judge_factors,
        lambda: [
            tr(
                ko="큰 배치의 손실은 (모든 토큰의 합) ÷ (모든 토큰의 수)다. 평균에 무엇을 곱하면 합이 되는가?",
                en="The big batch's loss is the sum over all tokens by their number. What turns a mean into a sum?",
            ),
            tr(
                ko="자기 토큰 수 ÷ 모든 토큰 수다. 모두 더하면 1이 된다.",
                en="Own tokens / all tokens; they add up to 1.",
            ),
        ],
        "def factors(token_counts):\n    return [count / sum(token_counts) for count in token_counts]",
    ),
    "4-3": lambda: Exercise(
        "4-3",
        _judge_steps,
        lambda: [
            tr(
                ko="마이크로 배치는 몇 개인가? 마지막 것은 덜 차 있을 수 있다.",
                en="How many micro-batches are there? The last may be smaller.",
            ),
            tr(
                ko="마이크로 배치 accumulation개마다 한 스텝이고, 남은 것으로도 한 번 더 한다. 두 번 올림한다.",
                en="A step for every `accumulation` micro-batches, and one more for the rest: round up twice.",
            ),
        ],
        "import math\n\n\ndef optimizer_steps(samples, micro_batch, accumulation):\n"
        "    return math.ceil(math.ceil(samples / micro_batch) / accumulation)",
    ),
}

CASES = {
    "4-A": lambda: Case(
        "4-A",
        cases.judge_memory,
        lambda: [
            tr(
                ko="누적 1, 2, 3에서 필요한 크기를 나란히 적는다. 늘어나는 것은 몇 번인가?",
                en="Write down what 1, 2 and 3 need. How often does it grow?",
            ),
            tr(
                ko="단계별 기록(.phases())에서 두 번째 순전파가 시작하는 높이를 첫 번째와 비교한다.",
                en="In .phases(), compare where the second forward begins with the first.",
            ),
        ],
        "one = case('4-A').run(gradient_accumulation_steps=1)\n"
        "two = case('4-A').run(gradient_accumulation_steps=2)\n"
        "three = case('4-A').run(gradient_accumulation_steps=3)\n"
        "assert one.needed_bytes < two.needed_bytes == three.needed_bytes\n"
        "needed = two.needed_bytes / 2**30",
        experiment=cases.memory_of,
        thread="young-geng/EasyLM #36",
    ),
    "4-B": lambda: Case(
        "4-B",
        cases.judge_loop,
        lambda: [
            tr(
                ko="한 번에 하나만 바꾼다. 아무것도 바꾸지 않고 차이가 0이라면, 누가 용의선상에서 빠지는가?",
                en="Change one thing at a time. Who is cleared by a difference of 0 with nothing changed?",
            ),
            tr(
                ko="lengths='mixed', micro_batches=6, max_norm=1.0을 하나씩 켠다.",
                en="Turn on lengths='mixed', micro_batches=6, max_norm=1.0, one at a time.",
            ),
        ],
        "print(case('4-B').run())\n"
        "print(case('4-B').run(lengths='mixed'))\n"
        "print(case('4-B').run(micro_batches=6))\n"
        "print(case('4-B').run(max_norm=1.0))\n"
        "guilty = {'mean_of_means', 'clipped_inside'}",
        experiment=cases.submitted_loop,
        thread="huggingface/transformers #34191, #1563",
    ),
}
