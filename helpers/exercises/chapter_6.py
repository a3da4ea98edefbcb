"""Chapter 6: several GPUs, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable

from ..distributed.rank_step import RankStep, rank_step
from ..language import tr
from ..units import human_bytes, positive_int
from . import Exercise, compare, filled, right

_SIZES = {"7.5B": 7_500_000_000, "Llama-3.1-70B": 70_553_706_496}


def _judge_bytes_per_rank(function: Callable[[int, int, int], float]) -> str:
    for model, parameters in _SIZES.items():
        for stage in range(4):
            for n in (4, 64):
                shares = (16 * parameters, (4 + 12 / n) * parameters, (2 + 14 / n) * parameters, 16 * parameters / n)
                got = filled(function(stage, parameters, n))
                if abs(got - shares[stage]) < 1:  # the order of the divisions is the reader's
                    continue
                return compare(got, shares[stage], f"{model}, stage={stage}, n={n}")
    return right()


FOR_70B = {"batch_size": 1, "sequence_length": 4096, "gradient_checkpointing": True, "gpu": "H200"}


def _judge_smallest_cluster(ranks: int) -> str:
    def step(number: int) -> RankStep:
        return rank_step("Llama-3.1-70B", number, **FOR_70B)

    ranks = positive_int(filled(ranks), "smallest")
    here = step(ranks)
    total, capacity = human_bytes(here.total), human_bytes(here.capacity_bytes)
    if not here.fits:
        over = human_bytes(here.total - here.capacity_bytes)
        return tr(
            ko=f"{ranks}개: GPU마다 {total}가 필요해 {over}만큼 넘친다.",
            en=f"{ranks}: each GPU needs {total}, {over} too much.",
        )
    if ranks > 1 and step(ranks - 1).fits:
        return tr(
            ko=f"{ranks}개: 들어간다({total}). 하나 줄여도 들어간다.",
            en=f"{ranks} fit ({total}), and so does one less.",
        )
    return right(tr(ko=f"GPU마다 {total}, 한도 {capacity}.", en=f"{total} of {capacity} on each GPU."))


EXERCISES = {
    "6-3": lambda: Exercise(
        "6-3",
        _judge_bytes_per_rank,
        lambda: [
            tr(
                ko="파라미터 하나에 16바이트다. 가중치 2, 그레이디언트 2, 옵티마이저 상태 12.",
                en="16 bytes a parameter: 2 weights, 2 gradients, 12 optimizer state.",
            ),
            tr(
                ko="1단계는 12를, 2단계는 12와 그레이디언트 2를, 3단계는 16을 모두 n으로 나눈다.",
                en="Stage 1 divides the 12 by n, stage 2 the 12 and the gradients' 2, stage 3 all 16.",
            ),
        ],
        "def bytes_per_rank(stage, parameters, n):\n"
        "    weights = 2 / n if stage >= 3 else 2\n"
        "    gradients = 2 / n if stage >= 2 else 2\n"
        "    optimizer = 12 / n if stage >= 1 else 12\n"
        "    return (weights + gradients + optimizer) * parameters",
    ),
    "6-4": lambda: Exercise(
        "6-4",
        _judge_smallest_cluster,
        lambda: [
            tr(
                ko='rank_step("Llama-3.1-70B", GPU 수, …).fits가 True인 가장 작은 수를 찾는다.',
                en='Find the smallest number for which rank_step("Llama-3.1-70B", number, …).fits is True.',
            ),
            tr(
                ko="모델의 몫(16Ψ/N)만 한도와 견주면 N이 얼마인가? 거기서 시작해 하나씩 늘린다.",
                en="Which N does the model's share alone (16Ψ/N) give? Go up from there, one by one.",
            ),
        ],
        "from helpers import rank_step\n\n"
        "smallest = 7\n"
        'while not rank_step("Llama-3.1-70B", smallest, batch_size=1, sequence_length=4096,\n'
        '                    gradient_checkpointing=True, gpu="H200").fits:\n'
        "    smallest += 1",
    ),
}
