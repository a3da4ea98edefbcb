"""What will be asked for in order, begun ahead on the machine's other cores, by forks of this process.

A fork starts with all that this process knows, and what it finds is what would be found here: how many there are
decides how long it takes, and nothing else. PyTorch's data loaders fork so too, in notebooks as well. Where a fork is
not safe, there is none: outside Linux, where CUDA is in use, and inside a fork.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from multiprocessing import connection
from typing import Any, Generic, TypeVar

import torch

from .. import cores

K, R = TypeVar("K", bound=Hashable), TypeVar("R")
PATIENCE = 900.0  # seconds in which a fork must say something; nothing that is asked for takes as long


def processes() -> int:
    """How many may work on a search, this one among them: as `cores` says, 1 where forks are not safe."""
    many = cores.processes()
    linux = hasattr(os, "sched_getaffinity")
    if not linux or torch.cuda.is_initialized() or multiprocessing.current_process().daemon:
        return 1
    return many


class Forks(Generic[K, R]):
    """run(key) of each of the keys, found here or in a fork, whoever comes to it first.

    Ask for them in their order, and close it: forks that still work are ended. An error is raised here, by running it
    again here.
    """

    def __init__(self, run: Callable[[K], R], keys: Sequence[K], forks: int):
        self.run, self.keys = run, list(keys)
        self._results: dict[int, R] = {}
        # A pipe with a byte for each key: who reads it has the key. The first is for this process.
        self._numbers, numbers = os.pipe()
        os.write(numbers, bytes(range(1, len(self.keys))))
        os.close(numbers)
        self._first: int | None = 0
        context = multiprocessing.get_context("fork")
        self._forks: dict[connection.Connection, Any] = {}
        for _ in range(min(forks, len(self.keys) - 1)):
            receiver, sender = context.Pipe(duplex=False)
            fork = context.Process(target=self._work, args=(sender,), daemon=True)
            try:
                fork.start()
            except OSError:  # no memory or no process left for it: those that are there do
                receiver.close()
                break
            finally:
                sender.close()
            self._forks[receiver] = fork

    def __contains__(self, key: K) -> bool:
        return key in self.keys

    def __call__(self, key: K) -> R:
        """run(key). While a fork is at it, the next ones are run here."""
        number = self.keys.index(key)
        while number not in self._results:
            if self._receive(0.0):
                continue
            mine, self._first = (self._next(), None) if self._first is None else (self._first, None)
            if mine is not None:
                try:
                    self._results[mine] = self.run(self.keys[mine])
                except Exception:  # of another one it is raised when that is asked for
                    if mine == number:
                        raise
            elif not self._receive(PATIENCE):
                self._results[number] = self.run(key)
        return self._results[number]

    def close(self) -> None:
        """End the forks, and leave nothing open."""
        for receiver in [*self._forks]:
            self._end(receiver)
        os.close(self._numbers)

    def __enter__(self) -> Forks[K, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> int | None:
        taken = os.read(self._numbers, 1)
        return taken[0] if taken else None

    def _receive(self, seconds: float) -> bool:
        """Take what a fork has found, waiting so long for it; whether one had something to say, be it that it ends."""
        ready = connection.wait(list(self._forks), seconds) if self._forks else []
        for receiver in ready:
            try:
                number, result = receiver.recv()
                self._results[number] = result
            except EOFError:
                self._end(receiver)
        return bool(ready)

    def _end(self, receiver: connection.Connection) -> None:
        fork = self._forks.pop(receiver)
        fork.kill()
        fork.join()
        fork.close()
        receiver.close()

    def _work(self, sender: connection.Connection) -> None:
        """A fork's life: results go out from a thread of their own, since a pipe holds little that nobody reads."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked hears it, and ends this one
        gc.freeze()  # a collection would touch, and so copy, all that is there
        torch.set_num_threads(1)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (a notebook's would want its threads)
        found: queue.SimpleQueue = queue.SimpleQueue()
        told = threading.Thread(target=_send_all, args=(found, sender))
        told.start()
        while (mine := self._next()) is not None:
            with contextlib.suppress(Exception):  # it is raised again where it was asked for
                found.put((mine, self.run(self.keys[mine])))
        found.put(None)
        told.join()


def _send_all(found: queue.SimpleQueue, sender: connection.Connection) -> None:
    while (one := found.get()) is not None:
        sender.send(one)
