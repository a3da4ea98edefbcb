"""Threads of a program: each finds the GPU as the first one does, and one operation runs at a time.

On a card, too, threads ask one allocator, in an order that is theirs: what two threads ask for at once may come in
another order at the next run, here as there.
"""

from __future__ import annotations

import threading

from .device import ProgramGPU
from .patches import Patches


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Begin each thread inside the GPU's mode: what PyTorch keeps of modes, it keeps for each thread alone."""
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        run = thread.run

        def with_gpu() -> None:
            with gpu.mode:
                run()

        thread.run = with_gpu
        begin(thread)

    patches.set(threading.Thread, "start", start)
