"""The virtual GPU: fake tensors that have a shape and no data, and a meter that counts every byte they would hold.

The very operations of a training step run on it (forward, backward, optimizer), every storage they make is counted
as the CUDA caching allocator counts it, and `torch.OutOfMemoryError` is raised where the capacity ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..allocator import expandable_segments_asked, round_size, segment_size
from ..cards import GPUSpec, card
from ..interrupts import interrupts_are_noted
from ..rules.active import ActiveRules
from ..rules.cublas import cublas_workspace_bytes
from ..units import human_bytes
from .convolutions import Convolutions
from .meter import AllocationMeter
from .mode import CountingMode
from .record import VirtualRecord
from .values import Answers


class _Handle(threading.local):
    """A thread's handle of cuBLAS: a number, and another thread's once this one has ended (DeviceThreadHandles.h)."""

    def __init__(self, pool: _Pool):
        self._lent = pool.lend()

    @property
    def number(self) -> int:
        """Which of the pool's."""
        return self._lent.number


class _Pool:
    """Numbers that are lent as long as somebody keeps what `lend` gives."""

    def __init__(self) -> None:
        self.made = 0
        self.free: list[int] = []

    def lend(self) -> _Lent:
        """A number that nobody has."""
        if not self.free:
            self.free.append(self.made)
            self.made += 1
        return _Lent(self.free.pop(), self.free)


class _Lent:
    def __init__(self, number: int, free: list[int]):
        self.number, self._free = number, free

    def __del__(self) -> None:
        self._free.append(self.number)


def handles() -> Any:
    """cuBLAS's handles of a card: each thread's own."""
    return _Handle(_Pool())


class VirtualGPU:
    """A GPU of the catalogue made of fake tensors; with `limited=False` it never runs out of memory.

    expandable_segments: the caching allocator's setting; None takes it from the environment, as PyTorch does.
    without: names of `rules.active.RULES` in which it is a CPU. detailed: `record` also notes what each tensor is, in
    about half as much time again; `details` are those of the last record. `rules` holds those in force
    (`print(gpu.rules)`), `answers` what was said to questions about values that are not there, `convolutions` what is
    known of those, whose workspaces are not counted. place: where the driver puts segments (see `CachingAllocator`).

    Used as a context (`with gpu:`) it runs the block "on the GPU": factories such as `torch.randint` make their tensors
    on it. Operations on tensors that already live on it are counted without it too,
    but only inside it they take CUDA's kernels (attention, dropout, autocast).
    """

    is_virtual = True

    def __init__(
        self,
        spec: GPUSpec,
        *,
        limited: bool = True,
        expandable_segments: bool | None = None,
        without: Iterable[str] = (),
        detailed: bool = False,
        place: Callable[[int], int] | None = None,
    ):
        self.spec = card(spec).needs_cuda()
        self.expandable_segments = expandable_segments_asked() if expandable_segments is None else expandable_segments
        self.name = self.spec.name
        capacity = self.spec.capacity_bytes if limited else None
        self.meter = AllocationMeter(capacity, expandable_segments=self.expandable_segments, place=place)
        self.rules = ActiveRules(self.spec.compute_capability, without)
        self.answers = Answers()
        self.convolutions = Convolutions()
        self.mode = CountingMode(self)
        self.detailed, self.details = detailed, None
        self.in_step = False
        self.interrupted = self._waits = False  # Ctrl+C has come; Ctrl+C has to wait
        self._workspaces: dict[tuple[str, int | None, int], int] = {}  # library, handle, stream -> allocation id
        self._handle = handles()

    def __repr__(self) -> str:
        return f"VirtualGPU({self.name!r}, {human_bytes(self.spec.capacity_bytes)})"

    # -- what torch.cuda says of a real GPU ------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes that PyTorch can allocate on this GPU."""
        return self.spec.capacity_bytes

    def memory_allocated(self) -> int:
        """Bytes held by tensors (and library workspaces) now."""
        self.mode.releases.settle()
        return self.meter.live_bytes

    def max_memory_allocated(self) -> int:
        """The most bytes held at once since the start or the last `reset_peak_memory_stats`."""
        return self.meter.peak_bytes

    def memory_reserved(self) -> int:
        """Bytes that the caching allocator has taken from the driver: in use, cached, or lost between blocks."""
        return self.meter.allocator.reserved_bytes

    def max_memory_reserved(self) -> int:
        """The most bytes reserved at once since the start or the last `reset_peak_memory_stats`."""
        return self.meter.allocator.peak_reserved_bytes

    def reset_peak_memory_stats(self) -> None:
        """Start `max_memory_allocated` and `max_memory_reserved` anew from what is held now."""
        self.mode.releases.settle()
        self.meter.reset_peaks()

    def empty_cache(self) -> None:
        """Give cached segments back to the driver, after freeing what a failed backward left behind.

        What autograd had still to do stays queued in its CPU thread, with the tensors that were saved for it, until the
        next backward: here is one.
        """
        with torch.enable_grad():
            torch.zeros(1, requires_grad=True).sum().backward()
        self.mode.releases.settle()
        self.meter.allocator.empty_cache()

    def release_workspaces(self) -> None:
        """Give back the cuBLAS workspaces, as `torch._C._cuda_clearCublasWorkspaces` does."""
        for block in self._workspaces.values():
            self.free(block)
        self._workspaces.clear()

    # -- putting things on it --------------------------------------------------------------------------------------

    def __enter__(self) -> VirtualGPU:
        self.mode.__enter__()
        self.rules.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.rules.__exit__(*exception)
        self.mode.__exit__(*exception)

    def place(self, thing: Any) -> Any:
        """Put a module (in place), a tensor or a dict of tensors on this GPU, values dropped, and return it.

        Parameters count as "parameters", buffers and batches as "other". Tied weights stay tied.
        """
        if isinstance(thing, torch.nn.Module):
            with self.interrupts_wait():
                self._place_module(thing)
            return thing
        if isinstance(thing, Mapping):
            return {name: self.place(value) for name, value in thing.items()}
        if isinstance(thing, torch.Tensor):
            return thing if self.owns(thing) else self._empty_like(thing, "other")
        return thing

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lives on this GPU."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode

    def label(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count these tensors' storages as `category`."""
        for tensor in tensors:
            block = self.block_of(tensor)
            if block is not None:
                self.meter_of(block).label(block, category)

    def free(self, block: int) -> None:
        """Release an allocation by its id."""
        self.meter.free(block)

    def meter_of(self, block: int) -> AllocationMeter:
        """The meter that counts an allocation: there is one."""
        return self.meter

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The id of the block that holds a tensor's storage; None where none does."""
        _, block = self.mode.storages.get(tensor.untyped_storage()._cdata, (None, None))
        return block

    def autocast(self, dtype: torch.dtype | None):
        """Mixed precision in `dtype`, with CUDA's list of what stays in fp32; None does nothing."""
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _place_module(self, module: torch.nn.Module) -> None:
        placed: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor, category: str) -> torch.Tensor:
            if self.owns(tensor):
                return tensor
            if id(tensor) not in placed:
                fake = self._empty_like(tensor, category)
                if isinstance(tensor, torch.nn.Parameter):
                    fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                placed[id(tensor)] = fake
            return placed[id(tensor)]

        for part in module.modules():
            quantized = getattr(part, "quantization_state", ())
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = once(parameter, "parameters")
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = once(buffer, "parameters" if name in quantized else "other")

    def _empty_like(self, tensor: torch.Tensor, category: str) -> torch.Tensor:
        with self.mode:
            if tensor.is_contiguous():  # nearly all are, and this one is remembered by its shape
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            else:
                fake = torch.empty_like(tensor, device="cpu")
        self.label([fake], category)
        return fake

    # -- counting --------------------------------------------------------------------------------------------------

    def _allocate(self, nbytes: int, category: str) -> int:
        try:
            return self.meter.allocate(nbytes, category)
        except MemoryError:
            allocator = self.meter.allocator
            free = self.capacity_bytes - allocator.reserved_bytes
            # PyTorch's words, so that what is searched for is found; it names the segment that it asked the driver for.
            tried = format_size(segment_size(round_size(nbytes)))
            message = (
                f"CUDA out of memory. Tried to allocate {tried}. GPU 0 ({self.name}, virtual) has a "
                f"total capacity of {format_size(self.spec.memory_bytes)} of which {format_size(free)} is free. "
                f"Including non-PyTorch memory, this process has {format_size(self.spec.memory_bytes - free)} memory "
                f"in use. Of the allocated memory {format_size(allocator.allocated_bytes)} is allocated by PyTorch, "
                f"and {format_size(allocator.unused_bytes)} is reserved by PyTorch but unallocated. If reserved but "
                "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
                "fragmentation.  See documentation for Memory Management  "
                "(https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
            )
        raise torch.OutOfMemoryError(message)

    def reserve_workspace(self) -> None:
        """Give the thread that multiplies its cuBLAS workspace, if it has none yet."""
        self.keep_for_thread("cuBLAS", cublas_workspace_bytes(self.spec.compute_capability))

    def keep_for_thread(self, library: str, nbytes: int) -> None:
        """Give the thread that asks a workspace of this library, if it has none yet."""
        # One for each thread that has multiplied and its stream: the caller's, and autograd's own in backward
        # (CublasHandlePool.cpp).
        in_backward = torch._C._current_graph_task_id() != -1
        stream = self.meter.stream() if self.meter.stream is not None else 0
        key = library, None if in_backward else self._handle.number, stream
        if key not in self._workspaces:
            self._workspaces[key] = self._allocate(nbytes, "other")

    @contextmanager
    def holding(self, *sizes: int) -> Iterator[None]:
        """Hold these bytes in the block, as a kernel does inside: allocated in order, freed the other way."""
        held: list[int] = []
        try:
            for nbytes in sizes:
                if nbytes:
                    held.append(self._allocate(nbytes, "activations"))
            yield
        finally:
            for block in reversed(held):
                self.free(block)

    def temporaries(self, *sizes: int) -> None:
        """Hold these bytes for a moment."""
        with self.holding(*sizes):
            pass

    # -- recording -------------------------------------------------------------------------------------------------

    @contextmanager
    def interrupts_wait(self) -> Iterator[None]:
        """In this block Ctrl+C waits for the next operation, or for the block's end.

        In the middle of one it would leave the meter wrong, or end the process: C++ called what it breaks off.
        """
        # Only the main thread may set a handler, and only it is interrupted.
        if self._waits or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(*_: Any) -> None:
            self.interrupted = True

        before = signal.signal(signal.SIGINT, note)
        self._waits = True
        try:
            with interrupts_are_noted():
                yield
            if self.interrupted:
                raise KeyboardInterrupt
        finally:
            self._waits = self.interrupted = False
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def record(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[VirtualRecord]:
        """Record every allocation in the block; the phases are named with `record.phase(...)`."""
        record = VirtualRecord(self, model, optimizer)
        self.meter.recorder = record.recorder
        watching = record.recorder.watching() if self.detailed else nullcontext()
        try:
            with self.interrupts_wait(), self.rules, _cudas_autocast(), watching:  # entered once for all phases
                yield record
        finally:
            record.label_training()  # also what was half done when the memory ran out
            self.meter.recorder = None
            if self.detailed:
                self.details = record.recorder.details()


@contextmanager
def _cudas_autocast() -> Iterator[None]:
    """In this block who asks for autocast without naming a device hears of the virtual GPU's, where CUDA's is meant.

    peft does, in front of 4-bit layers' adapters (`requires_conversion` in tuners/lora/bnb.py). Of the whole process:
    recordings take turns (`turns.in_turn`).
    """
    shipped = torch.is_autocast_enabled
    with mock.patch.object(torch, "is_autocast_enabled", lambda device_type="cpu": shipped(device_type)):
        yield


def format_size(nbytes: int) -> str:
    """Bytes as PyTorch's messages print them (format_size in CUDACachingAllocator.cpp): 1 GiB is 1024.00 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def virtual(name: str) -> VirtualGPU:
    """A new virtual GPU of a card (see `cards.card`); UnknownName lists the choices."""
    return VirtualGPU(card(name))


def as_gpu(gpu: Any) -> Any:
    """A GPU, virtual or real, as it is; for a card (see `cards.card`) a new virtual one. WrongValue for all else."""
    return gpu if hasattr(gpu, "is_virtual") and hasattr(gpu, "place") else virtual(gpu)
