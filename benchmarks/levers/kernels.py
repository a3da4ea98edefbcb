"""Stand-ins for what no virtual card can run: Triton's kernels and bitsandbytes' pages.

A Triton kernel writes into tensors that Python has made before, and takes no memory of the caching allocator itself
(triton/runtime/jit.py: `run` compiles and launches). So a library whose kernels are in Triton runs with its own code,
and its launches do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

PAGED_FROM = 100_000  # elements: get_state_buffer in bitsandbytes/optim/optimizer.py (1e5)


@contextlib.contextmanager
def triton_launches_nothing() -> Iterator[None]:
    """Launches of Triton's kernels do nothing; `torch.equal`, which asks for values, says True."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    def nothing(*_: Any, **__: Any) -> None: ...

    with contextlib.ExitStack() as stack:
        for kind in (JITFunction, Autotuner, Heuristics):
            stack.enter_context(mock.patch.object(kind, "run", nothing))
        # Liger asks it whether the gradient of the loss is 1; if not, one kernel more changes the gradients in place.
        stack.enter_context(mock.patch.object(torch, "equal", lambda *_: True))
        yield


class Pages:
    """The states of bitsandbytes' paged optimizers: managed memory (cudaMallocManaged), which PyTorch does not count.

    Only what `get_state_buffer` and the 8-bit init_state make is here; the update changes it in place.
    """

    def __init__(self, parameters: list[torch.Tensor], bytes_each: int = 4):
        self.parameters, self.bytes_each = parameters, bytes_each
        self.on_card: list[torch.Tensor] = []
        self.managed = 0

    def step(self) -> None:
        """The first one makes the states."""
        if self.on_card or self.managed:
            return
        kind = {4: torch.float32, 1: torch.uint8}[self.bytes_each]
        for parameter in self.parameters:
            if parameter.numel() < PAGED_FROM:
                self.on_card += [torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2)]
            else:
                self.managed += 2 * parameter.numel() * kind.itemsize
                if self.bytes_each == 1:  # a scale for each block of 256, on the card
                    blocks = -(-parameter.numel() // 256)
                    self.on_card += [torch.zeros(blocks, device=parameter.device) for _ in range(2)]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
