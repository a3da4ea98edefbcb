"""`torch.multiprocessing.spawn`, with which programs start a process for each card: this run's rank alone is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing

from ..errors import WrongValue
from ..language import tr
from .device import ProgramGPU
from .patches import Patches


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Call the function here, as the rank that the run stands for. WrongValue where it is not one process a card."""

    def spawn(fn: Callable[..., Any], args: tuple = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        cards = 1 if gpu.several else gpu.count
        if nprocs != cards:
            raise WrongValue(more_processes(nprocs, cards, len(gpu.meters)))
        fn(gpu.index, *args)

    patches.set(torch.multiprocessing, "spawn", spawn)


def more_processes(processes: int, gpus: int, visible: int) -> str:
    """What to write where a program starts another number of processes than there are cards; visible: to each."""
    if visible > 1:
        return tr(
            ko=f"카드 {visible}장을 프로세스 하나가 보는 실행인데 프로세스 {processes}개를 시작한다: --visible-gpus "
            f"{visible} 대신 --gpus {processes}로 쓴다.",
            en=f"it starts {processes} processes, one a GPU, and here one process sees {visible}: write --gpus "
            f"{processes} in place of --visible-gpus {visible}.",
        )
    return tr(
        ko=f"프로세스 {processes}개를 시작하는데 GPU는 {gpus}개다: --gpus {processes}로 쓴다.",
        en=f"it starts {processes} processes, one a GPU, and there are {gpus}: write --gpus {processes}.",
    )
