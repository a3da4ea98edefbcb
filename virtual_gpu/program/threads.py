"""Threads of a program: each finds the GPU as the first one does, and one operation runs at a time.

On a card, too, threads ask one allocator, in an order that is theirs: what two threads ask for at once may come in
another order at the next run, here as there. Two things are those of the process: the phase of the run, and, while
torch.compile compiles in one thread, PyTorch's own functions in place of ours, so that another finds no GPU then.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from concurrent.futures import thread as pools

from ..host.meter import HostOutOfMemory
from .device import ProgramGPU
from .ends import EndOfRun
from .patches import Patches

_open: list[ProgramGPU] = []  # whose block is open: one, or none


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Begin each thread inside the GPU's mode: what PyTorch keeps of modes, it keeps for each thread alone."""
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        run = thread.run

        def with_gpu() -> None:
            vars(thread).pop("run", None)  # else whoever keeps the thread keeps the GPU
            with gpu.mode:
                try:
                    run()
                except (EndOfRun, HostOutOfMemory) as error:  # it ends the program, not this thread alone
                    gpu.ended = error
                    if not gpu.mode.over:
                        _wake_the_first()
                    if not isinstance(error, EndOfRun):
                        raise

        thread.run = with_gpu
        gpu.threads.add(thread)
        begin(thread)

    patches.set(threading.Thread, "start", start)
    _open.append(gpu)
    patches.later(_end)


def _wake_the_first() -> None:
    """KeyboardInterrupt in the main thread, also where it waits for a lock: only a real signal ends that."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _end() -> None:
    # A thread that goes on (a progress bar's, a pool's) works on the CPU from now on.
    _open.pop().mode.over = True


def wait_for_threads(gpu: ProgramGPU) -> None:
    """Wait for what a program waits for at its end: threads that are no daemons. Idle workers of a pool end later."""
    for thread in list(gpu.threads):
        if not thread.daemon and thread not in pools._threads_queues:
            thread.join()


def _start_anew() -> None:
    """A fork has one thread: an operation that another was in the middle of nobody ends here."""
    for gpu in _open:
        if not gpu.mode.turn._is_owned():
            gpu.mode.turn._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
