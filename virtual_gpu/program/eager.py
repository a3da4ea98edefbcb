"""What runs otherwise than on a card, or not at all: scripted code, and random numbers for weights nobody reads."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch

from ..language import tr
from .frames import is_program
from .patches import Patches
from .watch import Watch

# Who wants the graph: forward mode's formulas, and the compiler itself, of what they call.
_OF_TORCH = ("torch._decomp.decompositions_for_jvp", "torch.jit.")
_SLOW_INITS = (
    "trunc_normal_",
    "orthogonal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
)
_LARGE = 2**16


def install(patches: Patches, watch: Watch) -> None:
    """`torch.jit.script` gives back what it got; large weights on the CPU stay as their memory was found.

    And where nn.TransformerEncoder asks whether its mask is left aligned, to leave the padding out: nobody knows.
    """

    def no_init(fill: Any) -> Any:
        def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if tensor.numel() < _LARGE or watch.gpu.owns(tensor):
                return fill(tensor, *args, **kwargs)
            watch.gpu.host.unfilled(tensor)
            return tensor

        return filled

    shipped = torch.jit.script

    def script(thing: Any, *args: Any, **kwargs: Any) -> Any:
        of_torch = isinstance(thing, FunctionType) and str(thing.__module__).startswith("torch.")
        if of_torch and str(sys._getframe(1).f_globals.get("__name__")).startswith(_OF_TORCH):
            return shipped(thing, *args, **kwargs)
        if is_program(sys._getframe(1).f_code):
            watch.note(
                tr(
                    ko="torch.jit.script: 파이썬으로 실행했다. 연산을 합치면 메모리가 덜 들 수 있다",
                    en="torch.jit.script: run as Python; scripted code fuses operations and can need less memory",
                )
            )
        return thing

    left_aligned = torch._nested_tensor_from_mask_left_aligned

    def packs(tokens: torch.Tensor, mask: torch.Tensor) -> bool:
        if not watch.gpu.owns(tokens):
            return left_aligned(tokens, mask)
        watch.note(
            tr(
                ko="nn.TransformerEncoder의 평가: 패딩까지 계산했다. 카드는 토큰만 모아(nested tensor) 덜 쓸 수 있다",
                en="nn.TransformerEncoder in evaluation computed its padding too: a card may pack the tokens (nested "
                "tensors) and need less",
            )
        )
        return False

    patches.set(torch, "_nested_tensor_from_mask_left_aligned", packs)
    patches.set(torch.jit, "script", script)  # its compiler would not know what is replaced here
    for name in _SLOW_INITS:
        patches.set(torch.nn.init, name, no_init(getattr(torch.nn.init, name)))
