"""Questions about values that are not there, and the answers given to them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_aten = torch.ops.aten
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


@dataclass(frozen=True)
class Answer:
    """asked: "all", "any" or "number"; answer: what the program was told; where: "file:line" that asked."""

    asked: str
    answer: bool | float
    where: str

    def __str__(self) -> str:
        return f"{self.asked}() = {self.answer} ({self.where})"


class Answers(Counter):
    """Answer → how often it was given.

    As in the experiments' data: "is all of it a token?" yes, unless it is `padded`, "is any of it padding?" no. In the
    optimizer's step every number is 1.0: Adafactor scales its update by a norm, clipping by a ratio, and bytes do not
    depend on them. "Has every sequence ended?" is asked after each token that is generated: yes, with the last of
    `tokens` (0: nothing is generated). `chosen`: elements of a mask → how many of them it picks.
    """

    padded = False
    tokens = 0

    def __init__(self) -> None:
        super().__init__()
        self.chosen: dict[int, int] = {}

    def note(self, out: Any, op: Any, args: tuple) -> None:
        """Remember of a tensor that it says whether all, or any, of something is so.

        `mask.sum() == mask.numel()` asks for all of it too: transformers' `fast_all`.
        """
        packet = op.overloadpacket
        if packet is _aten.all or packet is _aten.any:
            out.asked = packet._qualified_op_name.removeprefix("aten::")
        elif packet is _aten.sum:
            out.counts = args[0].dtype == torch.bool
        elif packet is _aten.eq and getattr(args[0], "counts", False):
            out.asked = "all"
        elif packet is _aten.max:
            out.unfinished = self.tokens > 0
        elif packet is _aten.eq and getattr(args[0], "unfinished", False):  # transformers' StopCheck
            out.asked = "ended"

    def to(self, tensor: torch.Tensor, in_step: bool) -> bool | float | None:
        """The value of a tensor with one element; None where nothing can be said."""
        asked = getattr(tensor, "asked", None) if tensor.dtype == torch.bool else "number" if in_step else None
        if asked is None:
            return None
        self.tokens -= asked == "ended"
        answer = {"all": not self.padded, "any": False, "ended": self.tokens == 0, "number": 1.0}[asked]
        self[Answer(asked, answer, _caller())] += 1
        return answer

    def __str__(self) -> str:
        return "\n".join(f"{count} × {answer}" for answer, count in self.items())


def _caller() -> str:
    """ "file:line" of the innermost frame that is neither PyTorch's nor ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
