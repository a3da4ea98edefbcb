"""Ctrl+C where half a step would leave the process wrong, and where Python would drop it."""

from __future__ import annotations

import _signal  # signal's own functions look each handler up among enums: 15 µs, and a block may be a tensor's end
import _thread
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_noted = 0  # blocks that are open in which a handler of ours only notes Ctrl+C


@contextmanager
def interrupts_later(*, in_a_finalizer: bool = False) -> Iterator[None]:
    """In this block an interrupt is noted; when it ends, whoever handles interrupts hears of it. For short blocks.

    in_a_finalizer: whoever handles them hears of it a moment later, for Python drops what is raised there.
    """
    # Only the main thread may set a handler, and only it is interrupted. None: a handler that is not Python's.
    if threading.current_thread() is not threading.main_thread() or _signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came = []
    before = _signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, before)
        if came and in_a_finalizer:
            _thread.start_new_thread(_interrupt_again, ())
        elif came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupts_are_noted() -> Iterator[None]:
    """Around a block whose own handler lets no interrupt into a release: `Releases` need not see to it."""
    global _noted
    _noted += 1
    try:
        yield
    finally:
        _noted -= 1


class Releases:
    """Calls `release(key)` when a storage dies; Ctrl+C that comes just then breaks off no release and loses none.

    What is raised in a weak reference's callback Python drops, and an interrupt may be raised at its first instruction.
    So C notes the key, which nothing can break off; then `settle` releases all that is noted. What it does not get to
    is released with the next.
    """

    def __init__(self, release: Callable[[int], None]):
        self._release, self._dead = release, {}
        self.turn: Any = None  # a lock that whoever changes what is released holds, where there are several threads
        self._note, self._settle = self._dead.__setitem__, self.settle  # made once, not for each storage

    def watch(self, storage: Any, key: int) -> tuple[weakref.ref, weakref.ref]:
        """Keep these as long as the storage is to be watched. Python calls back the younger one first."""
        settles = weakref.ref(storage, self._settle)
        return weakref.ref(storage, partial(self._note, key)), settles

    def settle(self, _: Any = None) -> None:
        """Release what is noted."""
        # Another thread that is in the middle of something releases them: at its next request, or, as it looks again
        # when it has given the turn back, what was noted while it was releasing.
        while self._dead and (self.turn is None or self.turn.acquire(blocking=False)):
            try:
                if _noted:
                    self._all()
                else:
                    with interrupts_later(in_a_finalizer=True):
                        self._all()
            finally:
                if self.turn is not None:
                    self.turn.release()

    def _all(self) -> None:
        while self._dead:
            try:
                key, _ = self._dead.popitem()
            except KeyError:  # another thread was quicker
                return
            self._release(key)


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """In this block of the main thread an interrupt that falls into a finalizer comes once more, when that has ended.

    What is raised there Python reports to sys.unraisablehook and goes on: in `__del__`, in a weakref's callback, and in
    a generator that is dropped before its end, as the one of PyTorch's `next(model.parameters())` is.
    """
    if threading.current_thread() is not threading.main_thread():  # nobody interrupts it, and the hook is everybody's
        yield
        return
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
