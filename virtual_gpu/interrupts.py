"""Ctrl+C where half a step would leave the process wrong: it waits for the block's end."""

from __future__ import annotations

import signal
import threading
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
