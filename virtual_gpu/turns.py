"""One thread at a time: building a model and running it on fake tensors change what belongs to the whole process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")
# transformers sets torch's default dtype while it builds, rules stand in for kernels, PyTorch's fake modes are global.
_turn = threading.RLock()


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which waits while another thread is inside one of its kind."""

    @functools.wraps(function)
    def wait_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _turn:
            return function(*args, **kwargs)

    return wait_and_call
