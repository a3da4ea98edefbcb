"""Chapter 6: several GPUs, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from virtual_gpu.language import tr
from virtual_gpu.shards.rank_peak import RankStep
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.units import GiB, choose, human_bytes, positive_int

from ...ranks.launcher import run_ranks
from ...self_check import Case, Exercise, compare, filled, right
from .ranks import ShardedRun, fsdp2

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


LENGTH, STEPS, DECAY = 8, 3, 0.9


def _judge_zero_1(function: Callable) -> str:
    for n in (2, 4):
        draw = torch.Generator().manual_seed(n)
        weights = [torch.randn(LENGTH, generator=draw, dtype=torch.float64)] * n
        momentum = [torch.zeros(LENGTH // n, dtype=torch.float64) for _ in range(n)]
        expected, expected_momentum = weights[0].clone(), torch.zeros(LENGTH, dtype=torch.float64)
        for step in range(STEPS):
            gradients = [torch.randn(LENGTH, generator=draw, dtype=torch.float64) for _ in range(n)]
            given = ([w.clone() for w in weights], [g.clone() for g in gradients], [m.clone() for m in momentum])
            weights, momentum = filled(function(*given, 0.1))
            expected_momentum = DECAY * expected_momentum + sum(gradients) / n
            expected = expected - 0.1 * expected_momentum
            if [m.numel() for m in momentum] != [LENGTH // n] * n:
                return tr(
                    ko=f"n={n}: momentum의 길이가 {[m.numel() for m in momentum]}이다. rank마다 자기 조각 "
                    f"{LENGTH // n}개만 가져야 ZeRO-1이다.",
                    en=f"n={n}: momenta of {[m.numel() for m in momentum]}; each rank holds {LENGTH // n}.",
                )
            off = max(float((w - expected).abs().max()) for w in weights)
            if off > 1e-12:
                return tr(
                    ko=f"n={n}, 스텝 {step}: DDP의 가중치와 {off:.3g}만큼 다르다. 그레이디언트는 합이 아니라 평균이다.",
                    en=f"n={n}, step {step}: {off:.3g} off DDP's weights. A gradient is a mean, not a sum.",
                )
    return right()


def _step_of_8b(**settings: Any) -> RankStep:
    """Llama-3.1-8B under ZeRO-3 on 80 GB cards: `ranks`, and what may be varied beside."""
    for name in settings:
        choose(name, ("ranks", *_MAY_CHANGE), tr(ko="설정", en="setting"))
    asked = {"ranks": 8, "sequence_length": 8192, "batch_size": 4, "gpu": "A100-80GB"} | settings
    return rank_step("meta-llama/Llama-3.1-8B", asked.pop("ranks"), **asked)


_MAY_CHANGE = ("batch_size", "sequence_length", "gradient_checkpointing", "tensor_parallel")


def _judge_what_helps(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    if not isinstance(changes, dict) or len(changes) != 1:
        return tr(ko=f"설정 하나만 바꾼다: {changes!r}", en=f"Change one setting: {changes!r}")
    if {"batch_size", "sequence_length"} & set(changes):
        return tr(ko="배치와 길이는 그대로 두어야 한다.", en="Batch and length have to stay.")
    step = _step_of_8b(**changes)
    if not step.fits:
        over = human_bytes(step.total - step.capacity_bytes)
        return tr(ko=f"{changes}: 그래도 {over} 넘친다.", en=f"{changes}: still {over} too much.")
    return right(human_bytes(step.total))


def _judge_whole_gradients(answer: float) -> str:
    expected = 4 * 8_030_261_248 / GiB  # reduce_dtype is fp32
    wrong = compare(answer, expected, "GiB")
    more = tr(
        ko="accelerate의 mixed_precision: bf16은 더할 때도 bf16이므로 그 절반이다.",
        en="Under accelerate's mixed_precision: bf16 they are reduced in bf16: half of it.",
    )
    return right(f"{expected:.1f} GiB. {more}") if not wrong or abs(answer / expected - 1) < 0.01 else wrong


def _accumulate(ranks: int = 4, micro_batches: int = 4, sync_each: bool = True) -> ShardedRun:
    return run_ranks(fsdp2, ranks, 1, micro_batches, sync_each)[0]


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
    "6-3": lambda: Exercise(
        "6-3",
        _judge_zero_1,
        lambda: [
            tr(
                ko="reduce_scatter(gradients)[r]는 rank r이 맡은 조각의 합이다. 평균으로 만들려면 무엇으로 나누는가?",
                en="reduce_scatter(gradients)[r] is the sum of rank r's shard. What makes it a mean?",
            ),
            tr(
                ko="rank r은 weights[r].chunk(n)[r]만 갱신한다. 갱신한 조각들을 all_gather로 모은다.",
                en="Rank r updates weights[r].chunk(n)[r] alone; all_gather of these gives everybody the whole.",
            ),
        ],
        "from helpers.chapters.c6_distributed.lists import all_gather, reduce_scatter\n\n\n"
        "def zero_1_step(weights, gradients, momentum, lr):\n"
        "    n = len(weights)\n"
        "    mine = reduce_scatter(gradients)\n"
        "    updated = []\n"
        "    for rank in range(n):\n"
        "        momentum[rank] = 0.9 * momentum[rank] + mine[rank] / n\n"
        "        updated.append(weights[rank].chunk(n)[rank] - lr * momentum[rank])\n"
        "    return all_gather(updated), momentum",
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
                ko="모델 상태(16Ψ/N)만 한도와 견주면 N이 얼마인가? 거기서 시작해 하나씩 늘린다.",
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

CASES = {
    "6-A": lambda: Case(
        "6-A",
        _judge_what_helps,
        lambda: [
            tr(
                ko="GPU를 8개에서 64개로 늘린 실험의 그림에서 줄지 않은 색은 무엇인가?",
                en="Which colour does not shrink from 8 GPUs to 64?",
            ),
            tr(ko="그 색을 줄이는 방법은 5장에 있다.", en="Chapter 5 is about that colour."),
        ],
        'case("6-A").run(ranks=64)\nchanges = {"gradient_checkpointing": True}',
        experiment=_step_of_8b,
        thread="pytorch/pytorch #104589, deepspeedai/DeepSpeed #4093",
    ),
    "6-B": lambda: Case(
        "6-B",
        _judge_whole_gradients,
        lambda: [
            tr(
                ko="sync_each를 끈 실행의 unsharded를 파라미터 수(228,096)로 나눈다.",
                en="Divide `unsharded` of a run without sync_each by the number of parameters, 228,096.",
            ),
            tr(
                ko="rank 수를 바꾸어도 그 값이 그대로인지 보고, 80.3억을 곱한다.",
                en="See whether it depends on the ranks, then multiply by 8.03 billion.",
            ),
        ],
        'run = case("6-B").run(sync_each=False)\n'
        "bytes_per_parameter = run.unsharded / 228096\n"
        "extra_gib = bytes_per_parameter * 8_030_261_248 / 2**30",
        experiment=_accumulate,
        thread="huggingface/accelerate #2531",
    ),
}
