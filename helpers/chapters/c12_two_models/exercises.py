"""Chapter 12: the exercises and the cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from virtual_gpu.cards import CATALOG
from virtual_gpu.language import tr
from virtual_gpu.units import GiB, boolean, human_bytes, positive_int

from ...rows import LeftRows
from ...self_check import Case, Exercise, compare, filled, right, show
from ..c11_outside.tried import Outcome, attempt
from .floor import share
from .moments import moments_of
from .phases import Steps, steps_of
from .pictures import draw_moments
from .trained import reference_first, tiny_pairs, train_grpo, train_pairs, train_whole, whole_loss

STEP = 0.05  # of the card: in such steps case 12-B looks for the engine's share
GPU, LARGE = "T4", "A100-80GB"
# What was reported of case 12-A: way, batch, whether it fits.
TESTIMONY = (("sft", 4, True), ("dpo", 2, False), ("dpo", 1, True))


def _judge_peak(function: Callable[[int, int, int, bool], int]) -> str:
    for held, step, engine, sleeps in (
        (7 * GiB, 4 * GiB, 10 * GiB, True), (7 * GiB, 4 * GiB, 10 * GiB, False), (3 * GiB, 9 * GiB, 5 * GiB, True),
        (3 * GiB, 9 * GiB, 5 * GiB, False),
    ):  # fmt: skip
        expected = held + (max(step, engine) if sleeps else step + engine)
        if wrong := compare(
            function(held, step, engine, sleeps), expected, f"engine={engine // GiB} GiB, sleeps={sleeps}"
        ):
            return wrong
    return right()


def _judge_order(loss: Callable[[Any, torch.Tensor], torch.Tensor]) -> str:
    mine, theirs = _value(loss), _value(whole_loss)
    if abs(mine[0] - theirs[0]) > 1e-4 * max(1.0, abs(theirs[0])):
        return tr(
            ko=f"작은 모델에서 손실이 {mine[0]:.4f}다. whole_loss는 {theirs[0]:.4f}다.",
            en=f"The loss of a small model is {mine[0]:.4f}; whole_loss gives {theirs[0]:.4f}.",
        )
    if not torch.allclose(mine[1], theirs[1], atol=1e-4):
        return tr(
            ko="손실은 같은데 그레이디언트가 다르다. 정책에는 그레이디언트가 있어야 하고, 기준 모델에는 없어야 한다.",
            en="The loss is the same, its gradients are not: the policy has them, the reference has none.",
        )
    found = moments_of(partial(train_pairs, loss), GPU)
    show(draw_moments({tr(ko="고친 것", en="yours"): found}))
    least = attempt(partial(train_pairs, reference_first), GPU).gpu
    most = human_bytes(found.outcome.gpu)
    if found.outcome.died is None and found.outcome.gpu <= 1.01 * least:
        return right(most)
    return tr(
        ko=f"손실과 그레이디언트는 같고 최대는 {most}다. 아직 세 칸이 아니다. 굵은 줄에 없어도 되는 칸이 있다.",
        en=f"Loss and gradients are the same, the peak is {most}, which is not three boxes yet: see the bold row.",
    )


def _value(loss: Callable[[Any, torch.Tensor], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """A loss and the gradients of all adapters, on the small model."""
    model, ids = tiny_pairs()
    value = filled(loss(model, ids))
    value.backward()
    trained = [one for one in model.parameters() if one.requires_grad]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    return value.item(), torch.cat([one.flatten() for one in gradients])


EXERCISES = {
    "12-1": lambda: Exercise(
        "12-1",
        _judge_order,
        lambda: [
            tr(
                ko="최대는 기준 모델의 log_softmax를 계산할 때다. 그때 정책의 칸은 몇 개이고, 다 있어야 하는가?",
                en="The peak is the reference's log_softmax: how many of the policy's boxes are there? Need they be?",
            ),
            tr(
                ko="정책과 기준 모델 가운데 한쪽은 로그 확률만 있으면 된다. 순서를 바꾸면 어느 쪽이 먼저인가?",
                en="Of one of the two models only the log probabilities are needed: which one should go first?",
            ),
        ],
        "def lean_loss(model, ids):\n"
        "    with torch.no_grad(), model.disable_adapter():\n"
        "        reference = scores(model, ids)[1]\n"
        "    return (scores(model, ids)[1] - reference).sum()",
    ),
    "12-2": lambda: Exercise(
        "12-2",
        _judge_peak,
        lambda: [
            tr(
                ko="엔진이 잠들면 답을 만들 때와 학습할 때가 자리를 번갈아 쓴다: 더하지 않고 큰 쪽이다.",
                en="With an engine that sleeps the phases take turns: the larger one, not the sum.",
            ),
            tr(
                ko="held(가중치와 옵티마이저 상태)는 두 때에 모두 있다.",
                en="held (weights and optimizer state) is there in both.",
            ),
        ],
        "def peak(held, step, engine, sleeps):\n    return held + (max(step, engine) if sleeps else step + engine)",
    ),
}


def _whole(way: str = "dpo", batch: int = 1, length: int = 2048) -> Outcome:
    return attempt(partial(train_whole, way, batch, length), LARGE)


def _judge_length(length: int) -> str:
    length, seen = positive_int(filled(length), tr(ko="길이", en="length")), []
    for way, batch, fits in TESTIMONY:
        one = _whole(way, batch, length)
        got = tr(ko=f"{human_bytes(one.gpu)}로 끝까지 간다", en=f"ends with {human_bytes(one.gpu)}")
        seen.append(f"{way.upper()} {batch}: {got if one.died is None else 'OOM'}")
        if (one.died is None) != fits:
            card = human_bytes(CATALOG[LARGE].capacity_bytes)
            return tr(
                ko=f"길이 {length}. {', '.join(seen)}. 마지막 것이 신고와 다르다(카드는 {card}).",
                en=f"Length {length}. {', '.join(seen)}: the last is not what was reported (the card: {card}).",
            )
    return right(", ".join(seen))


def _told_whole(one: Outcome) -> LeftRows:
    return LeftRows(
        [tr(ko="GPU 최대", en="GPU, peak"), tr(ko="결과", en="result")], [[human_bytes(one.gpu), one.result]]
    )


def _grpo(fraction: float = 0.3, sleeps: bool = False) -> Steps:
    return steps_of(partial(train_grpo, fraction=share(fraction), sleeps=boolean(sleeps, "sleeps")), GPU)


def _judge_share(fraction: float) -> str:
    fraction = share(filled(fraction))
    steps = round(fraction / STEP)
    if abs(fraction - steps * STEP) > 1e-9:
        return tr(ko=f"{fraction}: {STEP} 단위로 적는다.", en=f"{fraction}: a multiple of {STEP}.")
    one = _grpo(fraction)
    if one.outcome.died:
        return one.result
    more = round((steps + 1) * STEP, 2)
    if more <= 1 and not _grpo(more).outcome.died:
        return tr(ko=f"끝까지 간다. 몫을 {more}로 늘려도 끝까지 간다.", en=f"It ends, and so does a share of {more}.")
    return right(human_bytes(max(one.peaks().values())))


def _told_grpo(one: Steps) -> LeftRows:
    from .phases import words

    peaks = one.peaks()
    return LeftRows([*map(words, peaks), tr(ko="결과", en="result")], [[*map(human_bytes, peaks.values()), one.result]])


CASES = {
    "12-A": lambda: Case(
        "12-A",
        _judge_length,
        lambda: [
            tr(
                ko="가중치를 뺀 나머지는 배치 × 길이에 비례한다. 두 점이면 직선이 정해진다.",
                en="All but the weights grows with batch × length: two points are a line.",
            ),
            tr(
                ko="DPO 2가 카드를 넘기 시작하는 길이와 SFT 4가 넘기 시작하는 길이를 구한다. 답은 그 사이다.",
                en="At which length does DPO 2 exceed the card, and at which SFT 4? The answer lies between.",
            ),
        ],
        'case("12-A").run(way="sft", batch=4, length=4096)\ncase("12-A").run(way="dpo", batch=2, length=4096)\n'
        "length = 8192",
        experiment=lambda **settings: _told_whole(_whole(**settings)),
        thread="https://github.com/hiyouga/LlamaFactory/issues/10175",
    ),
    "12-B": lambda: Case(
        "12-B",
        _judge_share,
        lambda: [
            tr(
                ko="재우지 않으면 더한다: held + step + engine. held + step은 12.6절의 표에 있는 역전파의 최대다.",
                en="Awake, all is added: held + step + engine. held + step is the backward pass in the table of 12.6.",
            ),
            tr(
                ko="engine은 쓸 수 있는 크기가 아니라 카드 전체의 크기에 몫을 곱한 것이다.",
                en="engine is the share of the whole card, not of what is usable.",
            ),
        ],
        'case("12-B").run(fraction=0.25)\nfraction = 0.25',
        experiment=lambda **settings: _told_grpo(_grpo(**settings)),
        thread="https://github.com/huggingface/trl/issues/2927",
    ),
}
