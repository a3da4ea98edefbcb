"""Chapter 2: quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from virtual_gpu.language import tr
from virtual_gpu.units import choose

from ...self_check import Exercise, filled, right
from ...small_model import score, train_small_model, with_outlier_channels
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
                setting = f"bits={bits}, block_size={block}, double={double}"
                return tr(
                    ko=f"{setting}: 정답은 {expected:.3f}비트인데 {got:.3f}이 나왔다({got - expected:+.3f}).",
                    en=f"{setting}: {got:.3f}, the right one is {expected:.3f} bits ({got - expected:+.3f}).",
                )
    return right()


BUDGET, KNOWN = 5.0, 62


def _judge_budget(setting: dict[str, Any]) -> str:
    setting = filled(setting)
    for name in setting:
        choose(name, ("method", "bits", "block_size", "per_channel"), tr(ko="설정", en="setting"))
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
    if known < KNOWN:
        return tr(ko=f"{found} {KNOWN - known}개가 모자란다.", en=f"{found} {KNOWN - known} too few.")
    return right(found)


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
        "def absmax_quantize(x, bits):\n"
        "    scale = x.abs().max() / (2 ** (bits - 1) - 1)\n"
        "    return (x / scale).round(), scale",
    ),
    "2-2": lambda: Exercise(
        "2-2",
        _judge_bits,
        lambda: [
            tr(
                ko="fp32 스케일 하나(32비트)를 블록의 파라미터들이 나누어 낸다.",
                en="The parameters of a block share one fp32 scale, 32 bits.",
            ),
            tr(
                ko="이중 양자화에서는 스케일 하나가 8비트이고, 스케일 256개가 fp32 하나를 나누어 낸다.",
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
                ko="2.9절의 표에서 시작한다. 블록이 작을수록, 코드가 많을수록 정확하지만 둘 다 비트를 쓴다.",
                en="Start from the table in 2.9: smaller blocks and more codes both help, and both cost bits.",
            ),
            tr(
                ko="같은 비트라면 가중치의 분포에 맞춘 코드가 낫다. 블록 크기는 32 / (예산 - 비트)까지 줄일 수 있다.",
                en="Codes that suit the weights' distribution do better; blocks may shrink to 32 / (budget - bits).",
            ),
        ],
        'setting = {"method": "nf4", "block_size": 32}',
    ),
}
