"""`with cuda("T4") as gpu:` — in this block there is a CUDA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from . import amp, driver, tensors
from ._core import CATALOG, GPUSpec, choose
from .device import ProgramGPU
from .patches import Patches


@contextmanager
def cuda(
    gpu: str | GPUSpec = "T4", *, limited: bool = True, values: str = "answer", rank: int = 0, gpus: int = 1
) -> Iterator[ProgramGPU]:
    """Give the block a CUDA GPU: `torch.cuda` finds it, tensors moved there are counted, those of the CPU stay real.

    gpu: a name of the catalogue or a card's facts. limited=False: it never runs out of memory. values: "answer" or
    "stop", see `values`. Everything that is replaced meanwhile is put back at the end, whatever happens.
    """
    spec = CATALOG[choose(gpu, CATALOG, "GPU")] if isinstance(gpu, str) else gpu
    device = ProgramGPU(spec, limited=limited, values=values, index=rank, count=gpus)
    patches = Patches()
    with ExitStack() as stack:
        stack.callback(patches.undo)
        device.patches = patches
        tensors.install(patches, device)
        driver.install(patches, device)
        amp.install(patches)
        stack.enter_context(device)
        yield device
