"""Chapter 12: the exercises and the cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.units import GiB, boolean, choose, human_bytes

from ...rows import LeftRows
from ...self_check import Case, Exercise, compare, filled, right
from ..c11_outside.tried import Outcome, attempt
from .engine import share
from .phases import Steps, steps_of
from .trained import train_dpo, train_grpo

LEAST = 0.6  # of the card, which the engine of case 12-B needs
GPU = "RTX 4090"


def _judge_logits(function: Callable[[int, int, int, int, bool], int]) -> str:
    for pairs, length, each, reference in ((1, 512, 4, False), (4, 1024, 4, True), (3, 300, 2, True)):
        expected = 2 * pairs * length * 128_256 * each * (2 if reference else 1)
        got = function(pairs, length, 128_256, each, reference)
        if wrong := compare(got, expected, f"pairs={pairs}, length={length}, reference={reference}"):
            return wrong
    return right()


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


EXERCISES = {
    "12-1": lambda: Exercise(
        "12-1",
        _judge_logits,
        lambda: [
            tr(ko="쌍 하나는 문장 둘이다.", en="A pair is two sequences."),
            tr(
                ko="기준 모델도 같은 문장 모두의 로짓을 만든다.",
                en="The reference model makes logits of all the same sequences.",
            ),
        ],
        "def dpo_logits(pairs, length, vocabulary, each, reference):\n"
        "    models = 2 if reference else 1\n"
        "    return models * 2 * pairs * length * vocabulary * each",
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


def _dpo(**settings: Any) -> Outcome:
    for name in settings:
        choose(name, ("batch", "reference"), tr(ko="설정", en="setting"))
    return attempt(partial(train_dpo, **settings), GPU)


def _judge_dpo(settings: dict[str, Any]) -> str:
    settings = filled(settings)
    one = _dpo(**settings)
    if one.died:
        return one.result
    said = f"GPU {human_bytes(one.gpu)}"
    if settings.get("reference") == "adapter":
        return tr(
            ko=f"{said}. 들어가지만 가중치 전체가 아니라 어댑터만 학습한다.",
            en=f"{said}: it fits, and trains the adapter alone, not all weights.",
        )
    return right(said)


def _told_dpo(one: Outcome) -> LeftRows:
    return LeftRows(
        [tr(ko="GPU 최대", en="GPU, peak"), tr(ko="결과", en="result")], [[human_bytes(one.gpu), one.result]]
    )


def _grpo(**settings: Any) -> Steps:
    for name in settings:
        choose(name, ("fraction", "sleeps", "batch"), tr(ko="설정", en="setting"))
    if "sleeps" in settings:
        boolean(settings["sleeps"], "sleeps")
    share(settings.get("fraction", LEAST))
    return steps_of(lambda found: train_grpo(found, **{"fraction": LEAST} | settings), GPU)


def _judge_grpo(settings: dict[str, Any]) -> str:
    settings = filled(settings)
    one = _grpo(**settings)
    if one.outcome.died:
        return one.result
    if settings.get("fraction", LEAST) < LEAST:
        return tr(
            ko=f"끝까지 가지만 엔진에 {LEAST:.0%}를 주지 않았다. 이 서비스의 답이 들어갈 자리다.",
            en=f"It ends, with less than {LEAST:.0%} of the card for the engine, which its completions need.",
        )
    return right(human_bytes(max(one.peaks().values())))


def _told_grpo(one: Steps) -> LeftRows:
    from .phases import words

    peaks = one.peaks()
    return LeftRows([*map(words, peaks), tr(ko="결과", en="result")], [[*map(human_bytes, peaks.values()), one.result]])


CASES = {
    "12-A": lambda: Case(
        "12-A",
        _judge_dpo,
        lambda: [
            tr(
                ko="배치를 1로 줄여 본다. 줄지 않았다면 배치가 정하는 것이 아니다.",
                en="Try a batch of 1: where nothing falls, the batch is not what decides.",
            ),
            tr(
                ko="기준 모델의 값은 학습하는 동안 변하지 않는다. 언제 계산해 두면 되는가?",
                en="What the reference model says does not change: when could it be computed?",
            ),
        ],
        'case("12-A").run(batch=1)\ncase("12-A").run(reference="precompute")\nanswer = {"reference": "precompute"}',
        experiment=lambda **settings: _told_dpo(_dpo(**settings)),
        thread="https://github.com/hiyouga/LlamaFactory/issues/4810",
    ),
    "12-B": lambda: Case(
        "12-B",
        _judge_grpo,
        lambda: [
            tr(
                ko="첫 스텝에 없다가 둘째 스텝부터 있는 것은 무엇인가?",
                en="What is there from the second step on that was not in the first?",
            ),
            tr(
                ko="학습하는 동안 엔진은 할 일이 없다.",
                en="While the model trains the engine has nothing to do.",
            ),
        ],
        'case("12-B").run(sleeps=True)\nanswer = {"sleeps": True}',
        experiment=lambda **settings: _told_grpo(_grpo(**settings)),
        thread="https://github.com/huggingface/trl/issues/2927",
    ),
}
