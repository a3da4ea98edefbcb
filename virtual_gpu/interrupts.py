"""Ctrl+C where half a step would leave the process wrong, and where Python would drop it."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_later() -> Iterator[None]:
    """In this block an interrupt is noted; when it ends, whoever handles interrupts hears of it. For short blocks."""
    # Only the main thread may set a handler, and only it is interrupted. None: a handler that is not Python's.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """In this block an interrupt that falls into a finalizer comes once more, when that has ended.

    What is raised there Python reports to sys.unraisablehook and goes on: in `__del__`, in a weakref's callback, and in
    a generator that is dropped before its end, as the one of PyTorch's `next(model.parameters())` is.
    """
    before = sys.unraisablehook

    def hear(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(_interrupt_again, ())  # a `Thread` takes locks, which may be held just here
        else:
            before(dropped)

    try:
        sys.unraisablehook = hear
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_again() -> None:
    time.sleep(0.01)  # in the hook, or in the finalizer, it would be dropped again
    _thread.interrupt_main()
