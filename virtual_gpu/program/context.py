"""`with cuda("T4") as gpu:` — in this block there is a CUDA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode

from ..cards import GPUSpec, card
from ..errors import WrongValue
from ..host.machines import Machine, machine
from ..language import tr
from ..turns import holding_the_process
from ..units import positive_int
from . import amp, driver, eager, extensions, flash_attention, loading, pretrained, states, tensors, writing, zero
from . import host as host_memory
from .device import ProgramGPU
from .imports import Imports
from .patches import Patches
from .watch import Watch


def _leave_modes(depth: int) -> None:
    """Leave the dispatch modes beyond the first `depth`: one that Ctrl+C has cut off between its two halves is on."""
    while _len_torch_dispatch_stack() > depth:
        _pop_mode()


@contextmanager
def cuda(
    gpu: str | GPUSpec = "T4",
    *,
    limited: bool = True,
    values: str = "answer",
    rank: int = 0,
    gpus: int = 1,
    writes: bool = False,
    host: str | Machine | None = None,
) -> Iterator[ProgramGPU]:
    """Give the block a CUDA GPU: `torch.cuda` finds it, tensors moved there are counted, those of the CPU stay real.

    gpu: a name of the catalogue, a free card as "24GiB, 8.6", or a card's facts. limited=False: it never runs out of
    memory. values: "answer", "stop" or a number, see `values`. writes: the program may write its checkpoints, with
    ones where there are no values. host: the machine whose RAM there is, "Colab", "Kaggle" or "32GB" (see
    `host.machines`): `HostOutOfMemory` where it ends; None counts it without limit (`gpu.host.report()`). Everything
    that is replaced meanwhile is put back at the end, whatever happens. NotSupported while such a block is open, in
    this thread or another.
    """
    spec = card(gpu).needs_cuda()
    gpus = positive_int(gpus, "gpus")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < gpus:
        raise WrongValue(
            tr(ko=f"rank={rank!r:.80}: 0부터 {gpus - 1}까지다.", en=f"rank={rank!r:.80}: 0 to {gpus - 1}.")
        )
    room = None if host is None else machine(host)
    device = ProgramGPU(spec, limited=limited, values=values, index=rank, count=gpus, host=room)
    patches = Patches()
    with ExitStack() as stack:
        stack.enter_context(holding_the_process())
        stack.callback(_leave_modes, _len_torch_dispatch_stack())
        stack.callback(patches.undo)
        device.patches = patches
        tensors.install(patches, device)
        driver.install(patches, device)
        amp.install(patches)
        loading.install(patches, device)
        host_memory.install(patches, device)
        watch = device.watch = Watch(device)
        watch.install(patches)
        imports = device.imports = Imports(patches)
        states.install(patches, imports)
        eager.install(patches, watch)
        pretrained.install(patches, imports, watch)
        if not writes:
            writing.install(patches, imports, watch)
        flash_attention.install(patches, imports, watch)
        extensions.install(patches, imports, watch)
        zero.install(patches, imports, watch)
        stack.enter_context(device)
        yield device
