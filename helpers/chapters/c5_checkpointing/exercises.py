"""Chapter 5: what checkpointing stores and computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.step.flops import training_flops
from virtual_gpu.units import choose, human_bytes

from ...experiment import predict_memory
from ...self_check import Exercise, compare, filled, right
from .chain import execute, fewest_recomputations, record_chain, schedule_by_splitting

_CHAINS = ((16, 4), (64, 8), (60, 5), (1024, 32))


def _judge_segments(function: Callable[[int, int], tuple[int, int]]) -> str:
    for nodes, segments in _CHAINS:
        answer = filled(function(nodes, segments))
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            return tr(
                ko=f"(최대 저장 수, 재계산 횟수) 두 수를 돌려주어야 한다. 지금은 {answer!r}이다.",
                en=f"Return two numbers, (peak, recomputations); got {answer!r}.",
            )
        run = record_chain(nodes, segments=segments)
        name = f"N={nodes}, s={segments}"
        wrong = compare(answer[0], run.peak, f"{name}, " + tr(ko="최대 저장 수", en="peak")) or compare(
            answer[1], run.recomputations, f"{name}, " + tr(ko="재계산", en="recomputations")
        )
        if wrong:
            return wrong
    return right()


_TASK = {"model_id": "meta-llama/Llama-3.2-1B", "sequence_length": 2048, "optimizer": "adamw_8bit"}
_BATCH = 8


def _judge_levers(changes: dict[str, Any]) -> str:
    changes = {"batch_size": 1, **filled(changes)}
    for name in changes:
        names = ("batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
        choose(name, names, tr(ko="설정", en="setting"))
    batch = changes["batch_size"] * changes.get("gradient_accumulation_steps", 1)
    if batch != _BATCH:
        return tr(
            ko=f"마이크로 배치 × 누적이 {batch}이다. {_BATCH}이어야 한다.",
            en=f"Micro-batch × accumulation is {batch}, not {_BATCH}.",
        )
    report = predict_memory(**_TASK, **changes, gpu="T4")
    if not report.fits:
        return report.excess
    micro = {**_TASK, "batch_size": changes["batch_size"]}
    plain = training_flops(**micro).total
    extra = training_flops(**micro, gradient_checkpointing=changes.get("gradient_checkpointing", False)).total / plain
    return right(
        tr(
            ko=f"최대 {human_bytes(report.needed_bytes)}, 추가 연산 {extra - 1:.1%}.",
            en=f"Peak {human_bytes(report.needed_bytes)}, {extra - 1:.1%} more work.",
        )
    )


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


EXERCISES = {
    "5-1": lambda: Exercise(
        "5-1",
        _judge_segments,
        lambda: [
            tr(
                ko="record_chain(16, segments=4)를 그려 본다. 최대인 순간에 파란 것과 주황색인 것은 몇 개씩인가?",
                en="Look at record_chain(16, segments=4): how many blue and orange nodes at the peak?",
            ),
            tr(
                ko="구간의 첫 노드 s개는 다시 계산하지 않는다. 마지막 노드(손실)도 다시 계산하지 않는다.",
                en="The s first nodes of segments are not computed again, nor is the last node, the loss.",
            ),
        ],
        "def segments_cost(nodes, segments):\n    return segments + nodes // segments, nodes - segments - 1",
    ),
    "5-2": lambda: Exercise(
        "5-2",
        _judge_levers,
        lambda: [
            tr(
                ko="체크포인팅 없이 마이크로 배치를 1까지 줄여 본다. 그래도 넘치면 무엇이 남는가?",
                en="Go down to a micro-batch of 1 without checkpointing. What is left if that does not fit?",
            ),
            tr(
                ko="both_levers(8, model_id=…, sequence_length=…, optimizer=…, gpu='T4')가 표를 만들어 준다.",
                en="both_levers(8, model_id=…, sequence_length=…, optimizer=…, gpu='T4') makes the table.",
            ),
        ],
        'changes = {"batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}',
    ),
    "5-3": lambda: Exercise(
        "5-3",
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
}
