"""Values that are not there: what a program gets that asks a GPU tensor for one, and who asked.

One picture of the numbers, so that the answers agree with each other: every element is 1 (True), and no element is
not-a-number or infinite. So a loss is 1.0, its logarithm exists and one can divide by it; the gradients are finite, and
`GradScaler` steps; `loss < 0.5` is what 1 < 0.5 is; the next token is 1. And as in ordinary data `mask.all()` is True
and `mask.any()` False: nothing is padding. What a shape depends on (`nonzero`, indexing by a mask, a token's experts)
has no answer: the program is stopped there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..counting.values import Answer, Answers
from ..language import tr
from ..units import choose
from .frames import program_line
from .known import values_of

_aten = torch.ops.aten
_NO = frozenset((_aten.isnan.default, _aten.isinf.default))
_COMPARES = {
    getattr(_aten, name).Scalar: test
    for name, test in {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }.items()
}
_NON_FINITE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_ANY = _aten.any
_PACKETS = frozenset((_ANY, _aten.logical_not, _aten.bitwise_not))
POLICIES = ("answer", "stop")


class ValueStop(RuntimeError):
    """The program needs a value that a virtual GPU does not have."""


class Values(Answers):
    """Answers, by policy: "answer" (the numbers above), "stop" (`ValueStop` at the first question), or a number, which
    is what every element of a floating-point tensor is instead of 1.

    What was asked is "item", "copy to the CPU" or "print".
    """

    def __init__(self, policy: str = "answer"):
        try:
            self.element, policy = float(policy), "answer"
        except ValueError:
            self.element = 1.0
        super().__init__()
        self.policy = choose(policy, POLICIES, "values")

    def note(self, out: Any, op: Any, args: tuple) -> None:
        """What a tensor would answer is noted by `remember`, of every operation."""

    def number(self, tensor: torch.Tensor) -> float | int | bool | complex:
        """The answer to `tensor.item()`, and to what is made of it: bool(), float(), comparisons."""
        real = values_of(tensor)
        if real is not None:
            return real.item()
        return self._answer(tensor, "item")

    def copied(self, tensor: torch.Tensor) -> float | int | bool | complex:
        """The number that fills a copy of the tensor on the CPU."""
        return self._answer(tensor, "copy to the CPU")

    def printed(self, tensor: torch.Tensor) -> str:
        """The tensor as text."""
        real = values_of(tensor)
        if real is not None:
            return f"{str(real)[:-1]}, device='{tensor.device}')"
        one = self._answer(tensor, "print")
        body = f"{one}" if tensor.dim() == 0 else f"[{one}, ...], size={tuple(tensor.shape)}"
        grad = ", requires_grad=True" if tensor.requires_grad else ""
        return f"tensor({body}, device='{tensor.device}', dtype={tensor.dtype}{grad})"

    def remember(self, func: Any, args: tuple, out: Any) -> None:
        """Note on a result where its number is not 1."""
        if func in _NO:
            out.answer = 0
        elif func is _NON_FINITE:
            args[1].answer = 0  # no gradient is infinite
        elif func in _COMPARES:
            if out.dim() == 0:
                out.answer = int(_COMPARES[func](getattr(args[0], "answer", self._of(args[0])), args[1]))
        elif func.overloadpacket in _PACKETS:
            out.answer = 0 if func.overloadpacket is _ANY else 1 - getattr(args[0], "answer", 1)

    def stop(self, why: str) -> ValueStop:
        """The error for a question that has no answer."""
        file, line = program_line(sys._getframe(1))
        return ValueStop(
            tr(
                ko=f"{file}:{line}: {why}. 가상 GPU의 텐서에는 값이 없다. 토큰 수를 세어 나누는 MoE 층이나 마스크 "
                "인덱싱이 이렇다. 이 부분을 진짜 데이터로 CPU에서 계산하거나(.to('cuda') 앞에서), 마스크 인덱싱 대신 "
                "torch.where를 쓰거나, 전문가 구현을 'grouped_mm'이나 'batched_mm'으로 바꾸거나, 진짜 GPU에서 "
                "실행한다.",
                en=f"{file}:{line}: {why}, and tensors on a virtual GPU have none. Mixture-of-experts layers that send "
                "tokens by count, and indexing by a mask, are such programs. What helps: compute this part on the CPU "
                "from real data (before .to('cuda')), use torch.where instead of indexing by a mask, the 'grouped_mm' "
                "or 'batched_mm' implementation of the experts, or a real GPU.",
            )
        )

    def _of(self, tensor: torch.Tensor) -> float:
        return self.element if tensor.is_floating_point() else 1

    def _answer(self, tensor: torch.Tensor, asked: str) -> float | int | bool | complex:
        if self.policy == "stop":
            raise self.stop(tr(ko="프로그램이 값을 묻는다", en="the program asks for a value"))
        number = getattr(tensor, "answer", None) if type(tensor) is FakeTensor else None
        number = self._of(tensor) if number is None else number
        kind = bool if tensor.dtype == torch.bool else complex if tensor.dtype.is_complex else float
        answer = kind(number) if kind is not float or tensor.is_floating_point() else number
        file, line = program_line(sys._getframe(2))
        self[Answer(asked, answer, f"{file}:{line}")] += 1
        return answer
