"""What is copied between the card and the RAM, counted as it happens."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """A mode under which compiled code runs as compiled: Dynamo puts it aside while it compiles."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Of compiled code it sees the operations that the code calls."""
        return True


class Traffic(Watching):
    """Bytes that are copied between the card and the RAM, by their direction."""

    def __init__(self) -> None:
        super().__init__()
        self.to_cpu = self.to_card = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._copied(args[0], out)
        elif func is torch.ops.aten.copy_.default:
            self._copied(args[1], args[0])
        return out

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        nbytes = target.numel() * target.element_size()
        if source.is_cuda and not target.is_cuda:
            self.to_cpu += nbytes
        elif target.is_cuda and not source.is_cuda:
            self.to_card += nbytes
