"""Chapter 3: what lies in GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from virtual_gpu.drawing.labels import phase_label
from virtual_gpu.language import tr
from virtual_gpu.units import GiB, choose, human_bytes

from ...experiment import predict_memory
from ...self_check import Exercise, compare, filled, right

_MODELS = {"polyglot-ko-1.3b": 1_331_810_304, "polyglot-ko-5.8b": 5_885_059_072, "Llama-3.1-8B": 8_030_261_248}


def _judge_bytes_of_training(function: Callable[[int, bool], int]) -> str:
    for model, parameters in _MODELS.items():
        for mixed in (False, True):
            name = f"{model}, mixed={mixed}"
            wrong = compare(function(parameters, mixed), parameters * (16 if mixed else 8), name)
            if wrong:
                return wrong
    return right()


def _judge_largest_batch(batch: int) -> str:
    def fits(size: int) -> bool:
        return predict_memory(batch_size=size, sequence_length=512, gpu="T4").fits

    batch = filled(batch)
    here = predict_memory(batch_size=batch, sequence_length=512, gpu="T4")
    if not here.fits:
        return tr(ko=f"배치 크기 {batch}: {here.excess}", en=f"Batch {batch}: {here.excess}")
    if fits(batch + 1):
        left = human_bytes(here.capacity_bytes - here.needed_bytes)
        return tr(
            ko=f"배치 크기 {batch}: 들어간다. 아직 {left}가 남아 더 키울 수 있다.",
            en=f"Batch {batch} fits; {left} are left, so a larger one does too.",
        )
    return right(tr(ko=f"{batch + 1}부터는 넘친다.", en=f"{batch + 1} does not fit."))


BUDGET = 8 * GiB


def _judge_budget(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    allowed = {"gradient_checkpointing", "optimizer", "precision", "attention"}
    for name in changes:
        choose(name, allowed, tr(ko="설정", en="setting"))
    if not str(changes.get("optimizer", "adamw")).startswith("adamw"):
        return tr(ko="이 문제에서는 Adam 계열 옵티마이저만 쓴다.", en="Only Adam's family counts here.")
    report = predict_memory(batch_size=8, gpu="T4", **changes)
    peak = human_bytes(report.needed_bytes)
    if report.needed_bytes > BUDGET:
        over = human_bytes(report.needed_bytes - BUDGET)
        return tr(
            ko=f"최대 {peak}, 예산을 {over} 넘는다. 최대가 되는 단계: {phase_label(report.peak_phase)}",
            en=f"Peak {peak}, {over} over the budget, in {report.peak_phase}.",
        )
    return right(
        tr(ko=f"최대 {peak}, 바꾼 설정 {len(changes)}개.", en=f"Peak {peak}, {len(changes)} settings changed.")
    )


EXERCISES = {
    "3-1": lambda: Exercise(
        "3-1",
        _judge_bytes_of_training,
        lambda: [
            tr(
                ko="fp16 숫자 하나는 2바이트다. 파라미터, 그레이디언트, AdamW의 두 상태를 더한다.",
                en="An fp16 number has 2 bytes. Add parameters, gradients and AdamW's two states.",
            ),
            tr(
                ko="혼합 정밀도에서는 가중치, 그레이디언트, 옵티마이저 상태가 모두 fp32(4바이트)다.",
                en="In mixed precision weights, gradients and both states are fp32 (4 bytes).",
            ),
        ],
        "def bytes_of_training(parameters, mixed):\n    return parameters * 4 * (4 if mixed else 2)",
    ),
    "3-2": lambda: Exercise(
        "3-2",
        _judge_largest_batch,
        lambda: [
            tr(
                ko="predict_memory(batch_size=…, sequence_length=512, gpu='T4').fits가 True인 가장 큰 수를 찾는다.",
                en="Find the largest batch for which predict_memory(…).fits is True.",
            ),
            tr(
                ko="한 번에 하나씩 늘려도 되고, 반씩 나누어 찾아도 된다.",
                en="Go up one by one, or bisect.",
            ),
        ],
        "largest_batch = 1\n"
        'while predict_memory(batch_size=largest_batch + 1, sequence_length=512, gpu="T4").fits:\n'
        "    largest_batch += 1",
    ),
    "3-3": lambda: Exercise(
        "3-3",
        _judge_budget,
        lambda: [
            tr(
                ko="무엇이 최대를 만드는지 먼저 본다: 스텝의 임시 텐서인가, 옵티마이저 상태인가, 순전파 상태인가?",
                en="See first what makes the peak: the step's temporaries, the state, or activations?",
            ),
            tr(
                ko="옵티마이저 상태를 줄이면 최대가 역전파로 옮겨 간다. 그때 남는 것은 순전파 상태다.",
                en="With a smaller state the peak moves to backward; what is left are activations.",
            ),
        ],
        'changes = {"optimizer": "adamw_8bit", "gradient_checkpointing": True}',
    ),
}
