"""Chapter 1: number formats. Exercises, and cases to solve by experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from virtual_gpu.language import tr
from virtual_gpu.units import GB, choose

from ...self_check import Case, Exercise, compare, filled, right
from .cases import train_adapter, train_weights
from .formats import FORMATS, stochastic_round_to_bf16

V100_BYTES = 32 * GB


def _judge_largest(function: Callable[[int, int], float]) -> str:
    for name in ("fp16", "bf16", "fp32", "fp8 e5m2"):
        f = FORMATS[name]
        wrong = compare(function(f.exponent_bits, f.mantissa_bits), f.largest, name)
        if wrong:
            return wrong
    e4m3 = FORMATS["fp8 e4m3"]
    return right(
        tr(
            ko=f"그런데 e4m3에서는 {function(4, 3):g}이 나온다. 표의 {e4m3.largest:g}과 다른 까닭은 1.2절에 있다.",
            en=f"For e4m3 it gives {function(4, 3):g}, and the table says {e4m3.largest:g}: section 1.2 says why.",
        )
    )


def _judge_first_gap(numbers: dict[str, int]) -> str:
    numbers = filled(numbers)
    for name in ("fp16", "bf16"):
        f = FORMATS[name]
        if name not in numbers:
            return tr(ko=f"{name}의 값이 없다.", en=f"No value for {name}.")
        wrong = compare(numbers[name], 2 ** (f.mantissa_bits + 1), name)
        if wrong:
            return wrong
    return right(tr(ko="가수 비트가 m개면 2^(m+1)부터 홀수를 담지 못한다.", en="With m mantissa bits: 2^(m+1)."))


def _judge_rounding(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    x = torch.linspace(-3, 3, 20_001)[:-1]
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    got = filled(function(x.clone(), noise))
    if not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return tr(ko=f"{tuple(x.shape)} 모양의 텐서를 돌려줘야 한다.", en=f"Return a tensor of shape {tuple(x.shape)}.")
    between = int((got.float() != got.bfloat16().float()).sum())
    if between:
        return tr(
            ko=f"값 {len(x):,}개 가운데 {between:,}개가 bf16에 없는 수다. 아래 16비트가 남아 있다.",
            en=f"{between:,} of {len(x):,} are no bf16 numbers: bits are left in the lower 16.",
        )
    wrong = int((got.float() != stochastic_round_to_bf16(x, noise=noise).float()).sum())
    if wrong:
        bias = float((got.double() - x.double()).mean() / (x.double() / 128).abs().mean())
        return tr(
            ko=f"값 {len(x):,}개 가운데 {wrong:,}개가 다르다. 평균이 bf16 한 칸의 {bias:+.1%}만큼 치우쳤다.",
            en=f"{wrong:,} of {len(x):,} differ; the mean is off by {bias:+.1%} of a bf16 step.",
        )
    return right(
        tr(ko="평균을 지키는 반올림이 정수 덧셈 한 번이다.", en="Rounding that keeps the mean is one addition.")
    )


def _judge_adapter(setting: dict[str, Any]) -> str:
    setting = dict(filled(setting))
    for name in setting:
        choose(name, ("frozen", "adapter", "scaler"), tr(ko="설정", en="setting"))
    outcome = train_adapter(**setting)
    if outcome.error:
        return tr(ko=f"같은 오류가 난다. {outcome!r}", en=f"The same error. {outcome!r}")
    if not outcome.learned:
        return tr(
            ko=f"오류는 사라졌지만 배우지 않는다. {outcome!r}", en=f"No error, but it does not learn. {outcome!r}"
        )
    if outcome.nbytes > V100_BYTES:
        over = (outcome.nbytes - V100_BYTES) / GB
        return tr(
            ko=f"배운다. 그러나 32 GB 카드에 가중치만으로 {over:.1f} GB 넘친다. {outcome!r}",
            en=f"It learns, but its weights are {over:.1f} GB too large for 32 GB. {outcome!r}",
        )
    return right(repr(outcome))


LEARNING_RATE = 1e-5


def _judge_weights(setting: dict[str, Any]) -> str:
    setting = dict(filled(setting))
    for name in setting:
        choose(name, ("weights", "master", "rounding", "learning_rate"), tr(ko="설정", en="setting"))
    if setting.get("learning_rate", LEARNING_RATE) != LEARNING_RATE:
        return tr(ko="학습률은 1e-5 그대로여야 한다.", en="The learning rate must stay 1e-5.")
    outcome = train_weights(**setting)
    if not outcome.learned:
        return tr(ko=f"배우지 않는다. {outcome!r}", en=f"It does not learn. {outcome!r}")
    if outcome.nbytes > 2:
        more = f"{outcome.nbytes - 2:.0f}"
        return tr(
            ko=f"배운다. 그러나 파라미터당 {more}바이트를 더 쓴다. {outcome!r}",
            en=f"It learns, with {more} bytes more each. {outcome!r}",
        )
    return right(repr(outcome))


EXERCISES = {
    "1-1": lambda: Exercise(
        "1-1",
        _judge_largest,
        lambda: [
            tr(
                ko="지수 비트가 모두 1인 것은 inf와 nan의 자리다. 그 바로 아래가 가장 큰 지수다.",
                en="All ones in the exponent are inf and nan; the one below is the largest exponent.",
            ),
            tr(
                ko="가장 큰 지수는 2**(e-1) - 1이고, 가수가 모두 1이면 1.111…₂ = 2 - 2**-m이다.",
                en="The largest exponent is 2**(e-1) - 1; a mantissa of ones is 2 - 2**-m.",
            ),
        ],
        "def largest(e, m):\n    return (2 - 2**-m) * 2.0 ** (2 ** (e - 1) - 1)",
    ),
    "1-2": lambda: Exercise(
        "1-2",
        _judge_first_gap,
        lambda: [
            tr(
                ko="이웃한 수의 간격이 2가 되는 곳을 찾는다.",
                en="Find where the distance between neighbours becomes 2.",
            ),
            tr(ko="fp16은 2048이다. bf16의 가수는 7비트다.", en="fp16: 2048. bf16 has 7 mantissa bits."),
        ],
        'numbers = {"fp16": 2048, "bf16": 256}',
    ),
    "1-3": lambda: Exercise(
        "1-3",
        _judge_rounding,
        lambda: [
            tr(
                ko="x.view(torch.int32)는 같은 32비트를 정수로 읽는다. bf16은 그 위쪽 16비트다.",
                en="x.view(torch.int32) reads the same 32 bits as an integer; bf16 is the upper 16.",
            ),
            tr(
                ko="무작위 수를 더하면 자리올림의 확률이 버려질 몫과 같다. 그다음 아래 16비트를 지운다: & -65536.",
                en="With noise added, a carry is as likely as the share that is cut. Then clear 16 bits: & -65536.",
            ),
        ],
        "def stochastic_round(x, noise):\n"
        "    bits = (x.view(torch.int32) + noise) & -65536\n"
        "    return bits.view(torch.float32)",
    ),
}

CASES = {
    "1-A": lambda: Case(
        "1-A",
        _judge_adapter,
        lambda: [
            tr(
                ko="되돌린 그레이디언트는 어느 형식에 담기는가? 학습되는 가중치의 형식이 그것을 정한다.",
                en="What holds the gradient that was divided back? The format of the weights that are trained says so.",
            ),
            tr(
                ko="얼린 가중치에는 그레이디언트가 없다. 형식을 둘 다 바꿀 필요가 없다.",
                en="Frozen weights have no gradient: not both formats must change.",
            ),
        ],
        'case("1-A").run(adapter="fp32")\nsetting = {"frozen": "fp16", "adapter": "fp32", "scaler": True}',
        experiment=train_adapter,
        thread="2U1/Qwen-VL-Series-Finetune #184, haotian-liu/LLaVA #294, PEFT Troubleshooting",
    ),
    "1-B": lambda: Case(
        "1-B",
        _judge_weights,
        lambda: [
            tr(
                ko="움직인 가중치의 비율을 본다. 움직이지 않은 것은 갱신이 흡수된 것이다.",
                en="Look at the share of weights that moved: the others' updates were absorbed.",
            ),
            tr(
                ko="1.5절의 세 방법 가운데 메모리를 더 쓰지 않는 것이 있다.",
                en="One of the three ways of section 1.5 takes no more memory.",
            ),
        ],
        'case("1-B").run(rounding="stochastic")\nsetting = {"weights": "bf16", "rounding": "stochastic"}',
        experiment=train_weights,
        thread="tianweiy/CausVid #19, pytorch/ao #1124",
    ),
}
