"""What a case is made of: a function of its inputs, then backward, with inputs that are the same on every machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

MARK = 77_312  # bytes of the allocation that stands between forward and backward in a record; no case asks for it


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16", torch.int64: "int64", torch.float64: "fp64", torch.int32: "int32"}


Recorded = Callable[[], Any]


Case = tuple[str, Callable[[], Recorded]]


def mark() -> None:
    """Between forward and backward, and at the end: an allocation and a release that the record knows."""
    torch.empty(MARK, dtype=torch.uint8, device="cuda")


class Run:
    """A function of its inputs, then backward from all that it gave, with ones; `reset` drops the gradients.

    parameters: of a module, for `reset`. autocast: its type. backward=False: without gradients at all.
    """

    def __init__(
        self,
        function: Callable,
        *inputs: Any,
        parameters: Any = (),
        autocast: torch.dtype | None = None,
        backward: bool = True,
        context: Callable[[], Any] = contextlib.nullcontext,
    ):
        self.function, self.inputs, self.parameters = function, inputs, list(parameters)
        self.autocast, self.backward, self.context = autocast, backward, context

    def __call__(self) -> None:
        half = contextlib.nullcontext() if self.autocast is None else torch.autocast("cuda", dtype=self.autocast)
        with torch.set_grad_enabled(self.backward), self.context():
            with half:
                out = self.function(*self.inputs)
            mark()
            if self.backward:
                outs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
                if outs:
                    torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
                del outs
        del out
        mark()

    def reset(self) -> None:
        """Drop the gradients."""
        for tensor in [*tree_flatten(self.inputs)[0], *self.parameters]:
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None


def real(*shape: int, dtype: torch.dtype = FP32, grad: bool = False) -> torch.Tensor:
    """A tensor of floats on the card."""
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def whole(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Whole numbers below `high`, the same on every machine."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0), dtype=dtype).cuda()


def ones_and_zeros(*shape: int) -> torch.Tensor:
    """A boolean mask, half of it true, the same on every machine."""
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.5).cuda()


def of_floats(function: Callable, *shapes: tuple[int, ...], dtype: torch.dtype = FP32, **kwargs: Any) -> Run:
    """A function of floating-point tensors of these shapes."""
    grad = kwargs.get("backward", True)
    return Run(function, *(real(*shape, dtype=dtype, grad=grad) for shape in shapes), **kwargs)
