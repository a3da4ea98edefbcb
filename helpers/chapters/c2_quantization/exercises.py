"""Chapter 2: quantization. Exercises, and cases to solve by experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from virtual_gpu.language import tr
from virtual_gpu.units import choose

from ...self_check import Case, Exercise, filled, right
from ...small_model import CAPITALS, score, train_small_model, with_outlier_channels
from .cases import answer_in_int8, train_with_states
from .examples import example_tensor
from .quantization import quantize
from .whole_model import quantize_model


def _judge_absmax(function: Callable[[torch.Tensor, int], tuple[torch.Tensor, Any]]) -> str:
    for name, numbers in (("normal", example_tensor()), ("outliers", example_tensor("outliers"))):
        for bits in (8, 4):
            expected = quantize(numbers, "absmax", bits=bits)
            answer = filled(function(numbers, bits))
            if not isinstance(answer, tuple) or len(answer) != 2:
                return tr(ko="(코드, 스케일) 두 개를 돌려줘야 한다.", en="Return two things: (codes, scale).")
            codes, scale = torch.as_tensor(filled(answer[0])), float(torch.as_tensor(filled(answer[1])))
            step = float(expected.scales[0])
            if abs(scale / step - 1) > 1e-4:
                return tr(
                    ko=f"{name}, {bits}비트: 스케일이 정답의 {scale / step:.4g}배다.",
                    en=f"{name}, {bits} bits: the scale is {scale / step:.4g} times the right one.",
                )
            if codes.shape != numbers.shape:
                return tr(ko=f"코드의 모양이 {tuple(codes.shape)}이다.", en=f"codes of shape {tuple(codes.shape)}.")
            gap = (codes.double() - expected.codes.double()).abs()
            wrong = int((gap > 0).sum())
            if wrong > 4:  # ties may round either way
                return tr(
                    ko=f"{name}, {bits}비트: 스케일은 맞고, 코드 {wrong:,}개가 최대 {gap.max():.3g}만큼 다르다.",
                    en=f"{name}, {bits} bits: the scale is right; {wrong:,} codes differ, by up to {gap.max():.3g}.",
                )
    return right()


def _judge_bits(function: Callable[[int, int, bool], float]) -> str:
    for bits, block in ((4, 64), (8, 128), (4, 32)):
        for double in (False, True):
            expected = bits + ((8 + 32 / 256) / block if double else 32 / block)
            got = filled(function(bits, block, double))
            if isinstance(got, bool) or not isinstance(got, (int, float)):
                return tr(ko=f"숫자가 아니라 {got!r}이 나왔다.", en=f"got {got!r}, not a number.")
            if abs(got - expected) > 1e-3:
                setting, more = f"bits={bits}, block_size={block}, double={double}", got > expected
                return tr(
                    ko=f"{setting}: {got:.3f}비트가 나왔다. 정답보다 {'많다' if more else '적다'}.",
                    en=f"{setting}: {got:.3f} bits, too {'many' if more else 'few'}.",
                )
    return right()


BUDGET = 4.6


def _judge_budget(setting: dict[str, Any]) -> str:
    setting = filled(setting)
    for name in setting:
        choose(name, ("method", "bits", "block_size", "per_channel", "double"), tr(ko="설정", en="setting"))
    if setting.get("method") == "nvfp4":
        return tr(
            ko="NVFP4의 답은 위의 표에 있다. 다른 방법으로 찾는다.",
            en="NVFP4's is in the table above: find another way.",
        )
    quantized = quantize_model(with_outlier_channels(train_small_model(), where="weights"), **setting)
    loss, known = score(quantized.model)
    bits = quantized.bits_per_parameter
    found = tr(
        ko=f"파라미터당 {bits:.2f}비트, 손실 {loss:.2f}, 맞힌 수도 {known}개.",
        en=f"{bits:.2f} bits a parameter, loss {loss:.2f}, {known} capitals.",
    )
    if bits > BUDGET + 1e-9:
        return tr(
            ko=f"{found} 예산을 {bits - BUDGET:.2f}비트 넘는다.", en=f"{found} {bits - BUDGET:.2f} bits too many."
        )
    if known < len(CAPITALS):
        missing = len(CAPITALS) - known
        return tr(ko=f"{found} {missing}개가 모자란다.", en=f"{found} {missing} too few.")
    return right(found)


STATE_BYTES = 2.1


def _judge_states(setting: dict[str, Any]) -> str:
    outcome = train_with_states(**filled(setting))
    if not outcome.learned:
        return tr(ko=f"배우지 않는다. {outcome!r}", en=f"It does not learn. {outcome!r}")
    if outcome.nbytes > STATE_BYTES:
        more = f"{outcome.nbytes - STATE_BYTES:.2f}"
        return tr(
            ko=f"배운다. 그러나 {more}바이트가 많다. {outcome!r}", en=f"It learns, {more} bytes too many. {outcome!r}"
        )
    return right(
        tr(
            ko=f"{outcome!r}. 나누는 수인 분산이 범인이고, 모멘텀은 선형이라도 배운다.",
            en=f"{outcome!r}. The variance, which divides, is the culprit; the momentum may stay linear.",
        )
    )


def _judge_int8(setting: dict[str, Any]) -> str:
    outcome = answer_in_int8(**filled(setting))
    missing = len(CAPITALS) - outcome.capitals
    if missing:
        return tr(ko=f"{missing}개를 틀린다. {outcome!r}", en=f"{missing} are wrong. {outcome!r}")
    if outcome.columns:
        return tr(
            ko=f"모두 맞힌다. 그러나 열 {outcome.columns}개를 16비트로 곱한다.",
            en=f"All right, but {outcome.columns} columns are multiplied in 16 bits.",
        )
    return right(
        tr(
            ko=f"{outcome!r}. 진짜 Llama에서는 이것만으로 모자라, 토큰마다 스케일을 두어야 한다는 보고가 이어졌다.",
            en=f"{outcome!r}. On a real Llama this was not enough: a scale for each token was needed too.",
        )
    )


EXERCISES = {
    "2-1": lambda: Exercise(
        "2-1",
        _judge_absmax,
        lambda: [
            tr(
                ko="b비트의 가장 큰 코드는 2 ** (b - 1) - 1이다. 8비트라면 127이다.",
                en="The largest code of b bits is 2 ** (b - 1) - 1: 127 for 8 bits.",
            ),
            tr(
                ko="스케일은 코드 1이 뜻하는 크기, 곧 절댓값 최대를 가장 큰 코드로 나눈 값이다.",
                en="The scale is what code 1 stands for: the absolute maximum divided by the largest code.",
            ),
        ],
        "def absmax(x, bits):\n"
        "    scale = x.abs().max() / (2 ** (bits - 1) - 1)\n"
        "    return (x / scale).round(), scale",
    ),
    "2-2": lambda: Exercise(
        "2-2",
        _judge_bits,
        lambda: [
            tr(
                ko="fp32 스케일 하나(32비트)를 블록의 파라미터들이 나누어 부담한다.",
                en="The parameters of a block share one fp32 scale, 32 bits.",
            ),
            tr(
                ko="이중 양자화에서는 스케일 하나가 8비트이고, 스케일 256개가 fp32 하나를 나누어 부담한다.",
                en="With double quantization a scale has 8 bits, and 256 scales share one fp32.",
            ),
        ],
        "def bits_per_parameter(bits, block_size, double):\n"
        "    scale = 8 + 32 / 256 if double else 32\n"
        "    return bits + scale / block_size",
    ),
    "2-3": lambda: Exercise(
        "2-3",
        _judge_budget,
        lambda: [
            tr(
                ko="2.11절의 표에서 시작한다. 블록이 작을수록 정확하지만 스케일이 비트를 쓴다.",
                en="Start from the table in 2.11: smaller blocks help, and their scales cost bits.",
            ),
            tr(
                ko="블록 16에 fp32 스케일은 2비트나 된다. 스케일을 더 적은 비트로 적는 방법이 둘 있었다.",
                en="In blocks of 16 an fp32 scale costs 2 bits. There were two ways to write it in fewer.",
            ),
        ],
        'setting = {"method": "nf4", "block_size": 16, "double": True}',
    ),
}

CASES = {
    "2-A": lambda: Case(
        "2-A",
        _judge_states,
        lambda: [
            tr(
                ko="가장 큰 갱신이 학습률의 몇 배인지 본다. 갱신은 모멘텀을 √분산으로 나눈 것이다.",
                en="Look at the largest step: a step is the momentum divided by the root of the variance.",
            ),
            tr(
                ko="한쪽만 fp32로 바꾸어 보면 범인이 드러난다. 그다음 그쪽을 2.9절의 다른 코드로 적는다.",
                en="Put one of them in fp32 to find the culprit; then write that one with the other codes.",
            ),
        ],
        'case("2-A").run(momentum="linear", variance="fp32")\n'
        'setting = {"momentum": "dynamic", "variance": "dynamic", "block_size": 256}',
        experiment=train_with_states,
        thread="inclusionAI/AReno #541, Dettmers et al. 2021 (arXiv 2110.02861)",
    ),
    "2-B": lambda: Case(
        "2-B",
        _judge_int8,
        lambda: [
            tr(
                ko="이상치는 순전파 상태의 채널에 있다. 토큰마다 스케일을 두어도 모든 토큰이 그 채널을 가진다.",
                en="The outliers are in channels of the activations: every token has them.",
            ),
            tr(
                ko="threshold는 16비트 열을 만든다. 이상치를 가중치와 나누어 맡는 설정이 남았다.",
                en="A threshold makes columns in 16 bits. What shares the outliers with the weights is left.",
            ),
        ],
        'case("2-B").run(activations="token", weights="channel")\n'
        'setting = {"activations": "token", "weights": "channel", "smooth": 0.5}',
        experiment=answer_in_int8,
        thread="vllm-project/vllm #1112, casper-hansen/AutoAWQ #98",
    ),
}
