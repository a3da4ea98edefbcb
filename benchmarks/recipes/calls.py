"""A call that is measured: forward, backward, or both, as benchmark scripts have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .recipe import Refused


@dataclass
class Program:
    """One operation.

    forward: makes the output. gradient: makes the output's gradient from it (None: the output is a number). given: what
    makes it where backward is measured alone. retain: whether the graph is kept. full: the whole call, where it is
    another one. only_full: it is measured in every mode, whatever that is called. holds: what else is there while it
    is measured. note: what a reader should know.
    """

    forward: Callable[[], Any]
    gradient: Callable[[torch.Tensor], torch.Tensor] | None = None
    given: Callable[[], torch.Tensor] | None = None
    retain: bool = False
    full: Callable[[], Any] | None = None
    only_full: bool = False
    holds: Any = None
    note: str = ""

    def calls(self, mode: str) -> Callable[[], Any]:
        """What is called in this mode: "forward", "backward" (of one output, again and again) or "full"."""
        if mode == "full" or self.only_full:
            return self.full or self._full
        if mode == "forward":
            return self.forward
        if mode == "backward" and self.given is not None:
            given = self.given()
            output = self.forward()
            return lambda: output.backward(given, retain_graph=True)
        raise Refused(f"the program is not measured in the mode {mode!r}")

    def _full(self) -> None:
        output = self.forward()
        output.backward(None if self.gradient is None else self.gradient(output), retain_graph=self.retain)
