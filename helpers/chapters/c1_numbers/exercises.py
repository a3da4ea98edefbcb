"""Chapter 1: number formats."""

from __future__ import annotations

from collections.abc import Callable

from virtual_gpu.language import tr
from virtual_gpu.units import GiB

from ...self_check import Exercise, compare, filled, right
from .formats import FORMATS


def _judge_largest(function: Callable[[int, int], float]) -> str:
    for name in ("fp16", "bf16", "fp32", "fp8 e5m2"):
        f = FORMATS[name]
        wrong = compare(function(f.exponent_bits, f.mantissa_bits), f.largest, name)
        if wrong:
            return wrong
    return right()


def _judge_first_gap(numbers: dict[str, int]) -> str:
    numbers = filled(numbers)
    for name in ("fp16", "bf16"):
        f = FORMATS[name]
        wrong = compare(numbers.get(name), 2 ** (f.mantissa_bits + 1), name)
        if wrong:
            return wrong
    return right(tr(ko="가수 비트가 m개면 2^(m+1)부터 홀수를 담지 못한다.", en="With m mantissa bits: 2^(m+1)."))


def _judge_largest_model(function: Callable[[float, float], float]) -> str:
    for capacity, bits in ((14.64 * GiB, 16), (14.64 * GiB, 4.127), (80e9, 32)):
        wrong = compare(function(capacity, bits), capacity * 8 / bits, f"{capacity / GiB:.2f} GiB, {bits} bits")
        if wrong and not 0.999 < function(capacity, bits) / (capacity * 8 / bits) < 1.001:
            return wrong
    return right()


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
        _judge_largest_model,
        lambda: [
            tr(ko="바이트 × 8 = 비트다.", en="Bytes × 8 = bits."),
            tr(ko="파라미터 하나가 bits비트를 쓴다.", en="One parameter takes `bits` bits."),
        ],
        "def most_parameters(capacity_bytes, bits):\n    return capacity_bytes * 8 / bits",
    ),
}
