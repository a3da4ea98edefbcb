"""Values that are not there: what a program gets that asks a GPU tensor for one, and who asked.

One picture of the numbers, so that the answers agree with each other: every element is 1 (True), and no element is
not-a-number or infinite. So a loss is 1.0, its logarithm exists and one can divide by it; the gradients are finite, and
`GradScaler` steps; `loss < 0.5` is what 1 < 0.5 is; the next token is 1. And as in ordinary data `mask.all()` is True
and `mask.any()` False: nothing is padding. What the program writes into one element (`torch.zeros(1)`) is that number
instead, and what is computed from it follows: a counter of overflows that starts at 0 stays there. A token's experts
are taken in turn (`routing`). What a shape depends on (`nonzero`, indexing by a mask) has an answer where the mask
compares by these rules: `x >= 0.5` is True everywhere and picks all, `x == 0` False and picks nothing, as does
`x[is_eos.any(1)]`: no sequence ends. One that compares many integers (a detector's matches) picks all, the most it
can; asked whether all, or any, of them are a number, the picture answers. A sampled token is 1: `(token == eos).all()`
is False, and a program's own sampling goes on to its limit, as with random weights. Where a mask compares much that was
drawn (little is drawn, see `known`), or cannot be told, the program is stopped.
"""

from __future__ import annotations

import ast
import linecache
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..counting.values import Answer, Answers
from ..language import tr
from ..units import choose
from .frames import program_line
from .known import is_assumed, values_of

_aten = torch.ops.aten
_NO = frozenset((_aten.isnan.default, _aten.isinf.default))
_TESTS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_COMPARES = {getattr(_aten, name).Scalar: test for name, test in _TESTS.items()}
_COMPARES_TWO = {getattr(_aten, name).Tensor: test for name, test in _TESTS.items()}
_NON_FINITE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_ANY = _aten.any
_ANY_OR_ALL = frozenset((_ANY, _aten.all, _aten._is_any_true, _aten._is_all_true))  # _is_any_true: anomaly detection's
_PACKETS = frozenset((_aten.logical_not, _aten.bitwise_not))
_BOTH = {
    _aten.bitwise_and: min, _aten.logical_and: min, _aten.bitwise_or: max, _aten.logical_or: max,
    _aten.bitwise_and_: min, _aten.logical_and_: min, _aten.bitwise_or_: max, _aten.logical_or_: max,
}  # fmt: skip
_IS_A_NUMBER = frozenset((_aten.eq, _aten.ne))
_ISIN = _aten.isin
_TOLD = ("answer", "may_pick", "mostly")  # what is noted on a tensor of its elements
_SUMS = frozenset((_aten.sum.default, _aten.sum.dim_IntList))
_WRITTEN = frozenset(
    (
        _aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.scalar_tensor.default, _aten.fill_.Scalar,
        _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.zero_.default,
        _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
    )
)  # fmt: skip
_TO_COPY = _aten._to_copy.default
_COPY_ = _aten.copy_.default
_COPIES = frozenset((_TO_COPY, _COPY_, _aten.clone.default))
POLICIES = ("answer", "stop")
_ENDLESS = 1000  # the same answer so often, to the condition of a `while`: it will not end by itself


def is_drawn(value: Any) -> bool:
    """Whether a tensor's numbers were drawn on the GPU: a comparison holds for some of them."""
    return getattr(value, "drawn", False)


def _each(tensor: torch.Tensor) -> float | None:
    """What every element is told to be; of a mask that compares unknown integers True, the most that it can pick."""
    return getattr(tensor, "answer", 1 if getattr(tensor, "may_pick", False) else None)


def _is_known(value: Any) -> bool:
    """Whether it is a number, or a tensor whose values are there or known."""
    return type(value) is not FakeTensor or values_of(value) is not None


def _is_while(file: str, line: int) -> bool:
    """Whether a line of a file belongs to the condition of a `while`, or of an `if` that breaks one off."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return False  # a notebook's cell, with magics in it
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    tests = [loop.test for loop in loops]
    tests += [test for loop in loops if isinstance(loop.test, ast.Constant) for test in _breaks_of(loop)]
    return any(test.lineno <= line <= (test.end_lineno or test.lineno) for test in tests)


def _breaks_of(node: ast.AST) -> Iterator[ast.expr]:
    """The conditions under which a loop is broken off."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(child, ast.If) and any(isinstance(one, ast.Break) for one in child.body):
            yield child.test
        yield from _breaks_of(child)


class ValueStop(RuntimeError):
    """The program needs a value that a virtual GPU does not have."""


class Values(Answers):
    """Answers, by policy: "answer" (the numbers above), "stop" (`ValueStop` at the first question), or a number, which
    is what every element of a floating-point tensor is instead of 1.

    What was asked is "item", "copy to the CPU", "print" or "index" (by a mask: the rows that it picks).
    """

    def __init__(self, policy: str = "answer"):
        try:
            self.element, policy = float(policy), "answer"
        except (ValueError, TypeError, OverflowError):  # no number: a policy's name, or what `choose` refuses
            self.element = 1.0
        super().__init__()
        self.policy = choose(policy, POLICIES, "values")
        self.on_assumed: Callable[[], None] = lambda: None  # called where a value is used that rests on an assumption

    def note(self, out: Any, op: Any, args: tuple) -> None:
        """What a tensor would answer is noted by `remember`, of every operation."""

    def number(self, tensor: torch.Tensor) -> float | int | bool | complex:
        """The answer to `tensor.item()`, and to what is made of it: bool(), float(), comparisons."""
        real = values_of(tensor)
        if real is not None:
            self.used(tensor, real, "item")
            return real.item()
        return self._answer(tensor, "item")

    def equal(self, one: torch.Tensor, other: torch.Tensor, *about: Any) -> bool:
        """`torch.equal`: by what is known of both, or by the picture, in which two of one shape are equal.

        about: of `torch.allclose` its tolerances, where there are any.
        """
        if not about and one.shape != other.shape:
            return False
        known = [values_of(tensor) for tensor in (one, other)]
        told = [
            self._number(tensor) if real is None else real for tensor, real in zip((one, other), known, strict=True)
        ]
        first, second = map(torch.as_tensor, told)
        same = bool((torch.isclose(first.double(), second.double(), *about) if about else first == second).all())
        if all(real is not None for real in known):
            return same
        if self.policy == "stop":
            raise self.stop(tr(ko="프로그램이 값을 묻는다", en="the program asks for a value"))
        self._record("item", same)
        return same

    def used(self, tensor: torch.Tensor, real: torch.Tensor, asked: str) -> None:
        """The program asked for values that are known; an answer it is where they rest on an assumption."""
        if is_assumed(tensor) and real.numel():
            self.on_assumed()
            self._record(asked, real.reshape(-1)[0].item())

    def copied(self, tensor: torch.Tensor) -> float | int | bool | complex:
        """The number that fills a copy of the tensor on the CPU."""
        return self._answer(tensor, "copy to the CPU")

    def told(self, tensor: torch.Tensor) -> float:
        """What every element would be told to be, where nobody asks."""
        return self._number(tensor)

    def printed(self, tensor: torch.Tensor) -> str:
        """The tensor as text."""
        real = values_of(tensor)
        if real is not None:
            self.used(tensor, real, "print")
            return f"{str(real)[:-1]}, device='{tensor.device}')"
        one = self._answer(tensor, "print")
        body = f"{one}" if tensor.dim() == 0 else f"[{one}, ...], size={tuple(tensor.shape)}"
        grad = ", requires_grad=True" if tensor.requires_grad else ""
        return f"tensor({body}, device='{tensor.device}', dtype={tensor.dtype}{grad})"

    def picks(self, mask: torch.Tensor) -> bool | None:
        """Whether a mask, whose values are not known, picks all of what is indexed by it, or nothing; None: unknown."""
        answer = _each(mask)
        if self.policy == "stop" or answer is None:
            return None
        file, line = program_line(sys._getframe(2))
        self[Answer("index", int(answer), f"{file}:{line}")] += 1
        return bool(answer)

    def remember(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Note on a result where its number is not 1."""
        packet, mostly = func.overloadpacket, None
        if packet in _BOTH and out.dtype == torch.bool:
            told = [told for value in args[:2] if (told := self._mostly(value)) is not None]
            mostly = _BOTH[packet](told) if told else None
        if func._schema.is_mutable and args and type(args[0]) is FakeTensor:
            base = args[0]._base
            for name in ("may_pick", "mostly"):
                args[0].__dict__.pop(name, None)
            if base is not None and base.numel() > 1:  # written in part: no longer the same everywhere
                for name in _TOLD:
                    base.__dict__.pop(name, None)
        if func in _NO:
            out.answer = 0
        elif func is _NON_FINITE:
            args[1].answer = 0  # no gradient is infinite
        elif func in _COMPARES:
            # Of many integers nothing is said: they are places, or a program's own numbers.
            told = hasattr(args[0], "answer") or args[0].is_floating_point()
            by_the_picture = int(_COMPARES[func](self._number(args[0]), args[1]))
            if out.numel() == 1 or (told and not is_drawn(args[0])):
                out.answer = by_the_picture
            else:
                out.may_pick = not is_drawn(args[0])
                mostly = by_the_picture if packet in _IS_A_NUMBER else None
        elif func is _TO_COPY and out.dtype == torch.bool:
            if not is_drawn(args[0]):
                out.answer = int(self._number(args[0]) != 0)
        elif func in _COMPARES_TWO:
            told = [self._told(one) for one in args[:2]] if all(one.is_floating_point() for one in args[:2]) else [None]
            if out.dim() and not any(map(is_drawn, args)) and None not in told:
                out.answer = int(_COMPARES_TWO[func](*told))
            else:
                out.may_pick = not any(map(is_drawn, args))
                if packet in _IS_A_NUMBER and [_is_known(one) for one in args[:2]].count(True) == 1:
                    numbers = [self._told(one) for one in args[:2]]
                    mostly = None if None in numbers else int(_COMPARES_TWO[func](*numbers))
        elif packet is _ISIN and not _is_known(args[0]) and (ids := values_of(args[1])) is not None:
            mostly = int(self._number(args[0]) in ids.flatten().tolist())
        elif packet in _ANY_OR_ALL:  # programs ask so for what is wrong with their data, or right
            right = int(packet not in (_ANY, _aten._is_any_true))
            one = getattr(args[0], "answer", right) if args[0].numel() == 1 else right
            out.answer = getattr(args[0], "mostly", one)
            mostly = out.answer if packet is _ANY and out.numel() > 1 else None  # each text has an end? none has
        elif packet in _PACKETS:
            if hasattr(args[0], "answer") or out.dim() == 0:
                out.answer = 1 - getattr(args[0], "answer", 1)
            else:
                out.may_pick = getattr(args[0], "may_pick", False)
                mostly = 1 - args[0].mostly if hasattr(args[0], "mostly") else None
        elif packet in _BOTH and out.dtype == torch.bool and all(hasattr(value, "answer") for value in args[:2]):
            out.answer = _BOTH[packet](value.answer for value in args[:2])
        elif func in _SUMS and out.numel() and (each := _each(args[0])) is not None:
            out.answer = each * (args[0].numel() // out.numel())
        elif func.is_view and any(name in args[0].__dict__ for name in _TOLD):
            for view in out if isinstance(out, (tuple, list)) else (out,):
                view.__dict__.update({name: args[0].__dict__[name] for name in _TOLD if name in args[0].__dict__})
        elif type(out) is FakeTensor and out.numel() > 1:
            source = args[1] if func is _COPY_ else args[0] if func.is_view or func in _COPIES else None
            answer = getattr(source, "answer", None)
            if answer is not None:
                out.answer = answer
            elif func._schema.is_mutable:
                out.__dict__.pop("answer", None)
        elif type(out) is FakeTensor and out.numel() == 1:
            self._compute(func, args, kwargs, out)
        elif func._schema.is_mutable and args and isinstance(args[0], (list, tuple)):  # the optimizers' foreach
            for tensor in args[0]:
                tensor.__dict__.pop("answer", None)
        if mostly is not None:
            out.mostly = mostly
            if out.numel() == 1:
                out.answer = mostly

    def written(self, tensor: torch.Tensor, number: float) -> None:
        """The program made a tensor of one element of this number."""
        tensor.answer = number

    def _compute(self, func: Any, args: tuple, kwargs: dict, out: torch.Tensor) -> None:
        """The number of one element, from numbers of one element, where one of them is not what every element is."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if func not in _WRITTEN and not any(hasattr(tensor, "answer") for tensor in tensors):
            return
        computes = func in _WRITTEN or func in _COPIES or func.is_view or torch.Tag.pointwise in func.tags
        if not computes or any(tensor.numel() != 1 for tensor in tensors):
            if func._schema.is_mutable:
                out.__dict__.pop("answer", None)
            return
        if (known := values_of(out)) is not None:  # computed already; in place, it would be twice
            out.answer = known.item()
            return

        def real(value: Any) -> Any:
            if type(value) is FakeTensor:
                known = values_of(value)
                return torch.full(value.shape, self._number(value), dtype=value.dtype) if known is None else known
            return torch.device("cpu") if isinstance(value, torch.device) else value

        out.answer = func(*map(real, args), **{name: real(value) for name, value in kwargs.items()}).item()

    def stop(self, why: str) -> ValueStop:
        """The error for a question that has no answer."""
        file, line = program_line(sys._getframe(1))
        return ValueStop(
            tr(
                ko=f"{file}:{line}: {why}. 가상 GPU의 텐서에는 값이 없다. 이 부분을 진짜 데이터로 CPU에서 계산하거나"
                "(.to('cuda') 앞에서), 마스크 인덱싱 대신 torch.where를 쓰거나, 진짜 GPU에서 실행한다. MoE라면 전문가 "
                "구현을 'grouped_mm'이나 'batched_mm'으로 바꾼다.",
                en=f"{file}:{line}: {why}, and tensors on a virtual GPU have none. What helps: compute this part on "
                "the CPU from real data (before .to('cuda')), use torch.where instead of indexing by a mask, or a "
                "real GPU; of a mixture of experts the 'grouped_mm' or 'batched_mm' implementation.",
            )
        )

    def _mostly(self, value: Any) -> float | None:
        """What all elements of a mask are, as far as `any` and `all` are told; None where nothing is."""
        if type(value) is not FakeTensor:
            return None
        if values_of(value) is not None:
            return self._told(value)
        return getattr(value, "answer", getattr(value, "mostly", None))

    def _told(self, tensor: torch.Tensor) -> float | None:
        """What every element is: a real number, known values that are all the same, or by the picture; None: unlike."""
        real = values_of(tensor) if type(tensor) is FakeTensor else tensor
        if real is None:
            return self._number(tensor)
        flat = real.reshape(-1)
        return flat[0].item() if len(flat) and bool((flat == flat[0]).all()) else None

    def _number(self, tensor: torch.Tensor) -> float:
        number = getattr(tensor, "answer", None) if type(tensor) is FakeTensor else None
        return self._of(tensor) if number is None else number

    def _of(self, tensor: torch.Tensor) -> float:
        return self.element if tensor.is_floating_point() else 1

    def _answer(self, tensor: torch.Tensor, asked: str) -> float | int | bool | complex:
        if self.policy == "stop":
            raise self.stop(tr(ko="프로그램이 값을 묻는다", en="the program asks for a value"))
        number = self._number(tensor)
        kind = bool if tensor.dtype == torch.bool else complex if tensor.dtype.is_complex else float
        answer = kind(number) if kind is not float or tensor.is_floating_point() else number
        self._record(asked, answer)
        return answer

    def _record(self, asked: str, answer: float | int | bool | complex) -> None:
        file, line = program_line(sys._getframe(3))
        self[Answer(asked, answer, f"{file}:{line}")] += 1
        if self[Answer(asked, answer, f"{file}:{line}")] == _ENDLESS and _is_while(file, line):
            raise self.stop(tr(ko="이 while 문은 값이 바뀌어야 끝난다", en="this loop ends when a value changes"))
