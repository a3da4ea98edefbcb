"""`with cuda("T4") as gpu:` — in this block there is a CUDA GPU."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode

from ..cards import GPUSpec, card
from ..errors import WrongValue
from ..host.machines import Machine, machine
from ..interrupts import interrupts_are_noted, interrupts_later
from ..language import tr
from ..turns import holding_the_process
from ..units import positive_int
from . import (
    amp,
    changed,
    compiled,
    driver,
    eager,
    extensions,
    flash_attention,
    lazy,
    loading,
    managed,
    nccl,
    old_names,
    pretrained,
    quantized,
    recurrent,
    several,
    smi,
    states,
    tensors,
    threads,
    triton_kernels,
    vllm,
    writing,
    zero,
)  # fmt: skip
from . import host as host_memory
from .device import ProgramGPU
from .imports import Imports
from .patches import Patches
from .watch import Watch

# Where PyTorch runs an operation in Python: modes are entered and left, rules are looked up.
_OPERATIONS = ("torch._library", "torch._subclasses", "torch.utils._python_dispatch")


MOST_VISIBLE = 16  # a machine's


def _leave_modes(depth: int) -> None:
    """Leave the dispatch modes beyond the first `depth`: one that Ctrl+C has cut off between its two halves is on."""
    while _len_torch_dispatch_stack() > depth:
        _pop_mode()


def _must_end(frame: FrameType | None) -> bool:
    """Whether the frame that runs now is inside what Ctrl+C must not cut off: an operation.

    PyTorch ends the process (std::terminate) where one leaves a dispatch mode on, or where an exception comes out of
    what it asks Python for, also of our own functions.
    """
    if frame is not None and frame.f_globals.get("__name__", "").startswith("virtual_gpu."):
        return True
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if name == "__torch_dispatch__" or module.startswith(_OPERATIONS):
            return True
        frame = frame.f_back
    return False


def _releases(frame: FrameType | None) -> bool:
    """Whether the frame that runs now is inside the release of what has died, where Python drops what is raised."""
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if module == "weakref" or (module == "virtual_gpu.interrupts" and name == "settle"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _interruptible(gpu: ProgramGPU) -> Iterator[None]:
    """Ctrl+C comes at once, but for the middle of an operation: then at the next one, or at the block's end."""
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread may set a handler, and only it is interrupted. Not callable: ignored, or not Python's.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _releases(frame) or (
            not gpu.interrupted and _must_end(frame)
        ):  # for an operation a second one does not wait
            gpu.interrupted = True
        else:
            gpu.interrupted = False
            before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        with interrupts_are_noted():
            yield
    finally:
        signal.signal(signal.SIGINT, before)
        if gpu.interrupted:
            gpu.interrupted = False
            signal.raise_signal(signal.SIGINT)


def check_cards(gpus: int, visible_gpus: int, rank: int) -> None:
    """WrongValue unless these are numbers of processes, or of cards of one process, and one of them."""
    gpus, visible = positive_int(gpus, "gpus"), positive_int(visible_gpus, "visible_gpus")
    if gpus > 1 and visible > 1:
        raise WrongValue(
            tr(
                ko=f"gpus={gpus}, visible_gpus={visible}: 프로세스마다 카드 한 장(gpus)이거나, 카드 여러 장을 쓰는 "
                "프로세스 하나(visible_gpus)다.",
                en=f"gpus={gpus}, visible_gpus={visible}: it is a card for each process (gpus), or several for one "
                "(visible_gpus).",
            )
        )
    if visible > MOST_VISIBLE:
        raise WrongValue(
            tr(
                ko=f"visible_gpus={visible}: 한 프로세스가 보는 카드는 {MOST_VISIBLE}장까지다.",
                en=f"visible_gpus={visible}: a process sees {MOST_VISIBLE} cards at most.",
            )
        )
    last = max(gpus, visible) - 1
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= last:
        raise WrongValue(tr(ko=f"rank={rank!r:.80}: 0부터 {last}까지다.", en=f"rank={rank!r:.80}: 0 to {last}."))


@contextmanager
def cuda(
    gpu: str | GPUSpec = "T4",
    *,
    limited: bool = True,
    values: str = "answer",
    rank: int = 0,
    gpus: int = 1,
    visible_gpus: int = 1,
    writes: bool = False,
    host: str | Machine | None = None,
    without: Iterable[str] = (),
    changes: Iterable[str] = (),
) -> Iterator[ProgramGPU]:
    """Give the block a CUDA GPU: `torch.cuda` finds it, tensors moved there are counted, those of the CPU stay real.

    gpu: a name of the catalogue, a free card as "24GiB, 8.6", or a card's facts. limited=False: it never runs out of
    memory. visible_gpus: how many this one process sees and may spread a model over; each is counted and ends where it
    ends, and of `rank` it is recorded what everything is for. values: "answer", "stop" or a number, see `values`.
    writes: the program may write its checkpoints, with ones where there are no values. host: the machine whose RAM
    there is, "Colab", "Kaggle" or "32GB" (see `host.machines`): `HostOutOfMemory` where it ends; None counts it without
    limit (`gpu.host.report()`). without: names of CUDA's rules to leave out (`rules.active.RULES`), as `compare` does
    to explain a difference. changes: what is to be other in the program (`changed.MADE`), how often each found its
    place is in `gpu.changes`. Everything that is replaced meanwhile is put back at the end, whatever happens.
    NotSupported while such a block is open, in this thread or another.
    """
    spec = card(gpu).needs_cuda()
    check_cards(gpus, visible_gpus, rank)
    room = None if host is None else machine(host)
    made = changed.check_changes(changes)
    device = ProgramGPU(
        spec, limited=limited, values=values, rank=rank, ranks=gpus, cards=visible_gpus, host=room, without=without
    )
    device.changes = made
    patches = Patches()
    with ExitStack() as stack:
        with interrupts_later():  # none between what is replaced and the note of it
            stack.enter_context(holding_the_process())
            stack.callback(_leave_modes, _len_torch_dispatch_stack())
            stack.callback(patches.undo)
            device.patches = patches
            tensors.install(patches, device)
            old_names.install(patches, device)
            threads.install(patches, device)
            lazy.install(patches, device)
            driver.install(patches, device)
            nccl.install(patches, device)
            smi.install(patches, device)
            amp.install(patches)
            loading.install(patches, device)
            host_memory.install(patches, device)
            watch = device.watch = Watch(device)
            watch.install(patches)
            imports = device.imports = Imports(patches)
            states.install(patches, imports)
            eager.install(patches, watch)
            recurrent.install(patches, watch)
            compiled.install(patches, imports, watch)
            pretrained.install(patches, imports, watch)
            if not writes:
                writing.install(patches, imports, watch)
            flash_attention.install(patches, imports, watch)
            quantized.install(patches, imports)
            managed.install(patches, imports, device)
            extensions.install(patches, imports, watch)
            triton_kernels.install(patches, imports, device, watch)
            zero.install(patches, imports, watch)
            vllm.install(patches, imports, watch)
            if device.several is not None:
                several.install(patches, device)
            changed.install(patches, imports, watch, made)
        stack.enter_context(_interruptible(device))
        stack.enter_context(device)
        yield device
