"""What stands in for Triton's kernels, which no virtual card can run.

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
