"""Chapter 6: several GPUs, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable

from virtual_gpu.language import tr
from virtual_gpu.shards.rank_step import RankStep, rank_step
from virtual_gpu.units import human_bytes, positive_int

from ...self_check import Exercise, compare, filled, right

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


_SHARES = (
    ([3000.0, 1000.0], [48, 16]),
    ([1000.0, 2000.0, 3000.0, 4000.0], [32, 16, 8, 8]),
    ([500.0, 1500.0], [32, 32]),
)


def _judge_whole_gradient(function: Callable[[list[float], list[int]], float]) -> str:
    for means, rows in _SHARES:
        expected = sum(mean * number for mean, number in zip(means, rows, strict=True)) / sum(rows)
        wrong = compare(function([*means], [*rows]), expected, f"means={means}, rows={rows}")
        if wrong:
            return wrong
    return right()


def _judge_micro_batches(function: Callable[[int, float], int]) -> str:
    for stages, most in ((4, 0.21), (8, 0.11), (16, 0.07)):
        expected = next(m for m in range(1, 10**4) if (stages - 1) / (m + stages - 1) <= most)
        wrong = compare(function(stages, most), expected, f"stages={stages}, most={most}")
        if wrong:
            return wrong
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
    "6-1": lambda: Exercise(
        "6-1",
        _judge_whole_gradient,
        lambda: [
            tr(
                ko="rank 하나가 구한 평균에 그 rank의 행 수를 곱하면 무엇이 되는가?",
                en="What do you get if you multiply a rank's mean by its number of rows?",
            ),
            tr(
                ko="그 합을 모두 더한 다음 전체 행 수로 나눈다.",
                en="Add these sums up and divide by the number of all rows.",
            ),
        ],
        "def whole_gradient(means, rows):\n"
        "    return sum(mean * number for mean, number in zip(means, rows)) / sum(rows)",
    ),
    "6-2": lambda: Exercise(
        "6-2",
        _judge_micro_batches,
        lambda: [
            tr(
                ko="버블은 (p − 1)/(m + p − 1)이다. p는 단계 수, m은 마이크로 배치 수다.",
                en="The bubble is (p - 1)/(m + p - 1): p stages, m micro-batches.",
            ),
            tr(
                ko="m을 1부터 하나씩 늘리다가 처음으로 most 이하가 되는 곳에서 멈춘다.",
                en="Count m up from 1 and stop where the bubble is first at most `most`.",
            ),
        ],
        "def micro_batches(stages, most):\n"
        "    m = 1\n"
        "    while (stages - 1) / (m + stages - 1) > most:\n"
        "        m += 1\n"
        "    return m",
    ),
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
