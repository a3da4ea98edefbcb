"""One thread at a time: building a model and running it on fake tensors change what belongs to the whole process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from .errors import NotSupported
from .interrupts import interrupts_heard
from .language import tr

P, R = ParamSpec("P"), TypeVar("R")
# transformers sets torch's default dtype while it builds, rules stand in for kernels, PyTorch's fake modes are global.
_turn = threading.RLock()
_holder: threading.Thread | None = None  # whose `cuda()` block is open


def _grad_mode_kept() -> torch.set_grad_enabled:
    """Afterwards gradients are on or off as now: Ctrl+C in the exit of a `no_grad` block leaves them off."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which waits while another thread is inside one of its kind.

    NotSupported while another thread is inside a `holding_the_process` block: that may never end.
    """

    @functools.wraps(function)
    def wait_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _turn, _grad_mode_kept(), interrupts_heard():
            if _holder is not threading.current_thread():
                refuse_in_a_block()
            return function(*args, **kwargs)

    return wait_and_call


@contextmanager
def holding_the_process() -> Iterator[None]:
    """A block in which the whole process is another one, for as long as the program in it likes; NotSupported for two.

    Other threads of that program pass; what nobody may do meanwhile is to predict, or to open another such block.
    """
    global _holder
    with _turn:
        refuse_in_a_block()
        _holder = threading.current_thread()
    try:
        with _grad_mode_kept(), interrupts_heard():
            yield
    finally:
        _holder = None


def refuse_in_a_block() -> None:
    """NotSupported while a `holding_the_process` block is open, in this thread or in another."""
    if _holder is not None:
        raise NotSupported(
            tr(
                ko=f"스레드 {_holder.name}의 'with cuda(...)' 블록이 프로세스 전체의 PyTorch를 바꾸어 놓았다. 그 "
                "블록이 끝난 뒤에 부르거나 다른 프로세스에서 부른다.",
                en=f"A 'with cuda(...)' block of thread {_holder.name} has changed PyTorch for the whole process: call "
                "this after the block, or in another process.",
            )
        )


def _start_anew() -> None:
    """A fork has one thread, which holds nothing of what another one held when it was made."""
    global _turn, _holder
    _turn = threading.RLock()
    if _holder is not threading.current_thread():
        _holder = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
