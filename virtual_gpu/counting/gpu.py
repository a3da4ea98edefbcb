"""The virtual GPU: fake tensors that have a shape and no data, and a meter that counts every byte they would hold.

The very operations of a training step run on it (forward, backward, optimizer), every storage they make is counted
as the CUDA caching allocator counts it, and `torch.OutOfMemoryError` is raised where the capacity ends.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from ..allocator import CachingAllocator, expandable_segments_asked, round_size
from ..cards import GPUSpec
from ..language import tr
from ..rules.cuda import CudaKernels, cublas_workspace_bytes, grouped_mm_shape
from ..trace.timeline import CATEGORIES, Timeline, TimelineRecorder
from ..units import human_bytes
from .outputs import FakeOutputs

_aten = torch.ops.aten
_DEVICE_QUERY = torch.ops.prim.device.default
_ITEM = _aten._local_scalar_dense.default
_LAYER_NORM = _aten.native_layer_norm.default
_GROUPED_MM = getattr(getattr(_aten, "_grouped_mm", None), "default", None)  # since torch 2.8
# What asks cuBLAS for a handle, and with it for a workspace.
_CUBLAS_OPS = frozenset(
    (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default)
)
_outputs = FakeOutputs()  # one for all virtual GPUs: shapes are the same on each


class AllocationMeter:
    """Counts live bytes, each allocation rounded up to 512 bytes, and lets the caching allocator find room for them.

    `capacity_bytes` None means without limit. `allocate` raises MemoryError *before* it counts what does not fit. The
    rest of up to 1 MiB that the allocator does not split off a large block is not counted here (`allocator` knows it).
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False):
        self.allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
        self.live_bytes = 0
        self.peak_bytes = 0
        self.recorder: TimelineRecorder | None = None
        self._blocks: dict[int, list] = {}  # id -> [bytes, category]
        self._next_id = 1

    def allocate(self, nbytes: int, category: str) -> int:
        """Count `nbytes` (rounded up) and return the allocation's id."""
        size = round_size(nbytes)
        block = self._next_id
        self.allocator.allocate(block, size)
        self._next_id += 1
        self._blocks[block] = [size, category]
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self.recorder is not None:
            self.recorder.allocated(block, size, category)
        return block

    def free(self, block: int) -> None:
        """Release an allocation by its id."""
        self.live_bytes -= self._blocks.pop(block)[0]
        self.allocator.free(block)
        if self.recorder is not None:
            self.recorder.freed(block)

    def label(self, block: int, category: str) -> None:
        """Say what an allocation is for: it counts as that from its birth on."""
        self._blocks[block][1] = category
        if self.recorder is not None:
            self.recorder.label(block, category)

    def live_blocks(self) -> dict[int, tuple[int, str]]:
        """id → (bytes, category) of everything that is allocated now."""
        return {block: (size, category) for block, (size, category) in self._blocks.items()}

    def live_by_category(self) -> dict[str, int]:
        """category → bytes allocated now."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for size, category in self._blocks.values():
            totals[category] += size
        return totals


class _CountingMode(FakeTensorMode):
    """Fake tensors whose storages are counted: one storage, one allocation, released when the storage dies."""

    def __init__(self, gpu: VirtualGPU):
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # PyTorch's own: `_outputs` stands before it
        self.gpu = gpu
        self.inside = False
        self.products = 0  # made inside other operations: they ask for a workspace, each time
        # storage address -> (its weak reference, allocation id; None while the storage is resized to nothing)
        self.storages: dict[int, tuple[weakref.ref, int | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call below, to keep torch.compile away from it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE_QUERY and type(args[0]) is FakeTensor:  # nearly half of all calls
            return args[0].fake_device
        if self.gpu.interrupted:
            self.gpu.interrupted = False
            raise KeyboardInterrupt
        if func is _ITEM and isinstance(args[0], FakeTensor):
            if args[0].dtype == torch.bool:
                # As in the data of the experiments: "is all of it a token?" yes, "is any of it padding?" no.
                return not getattr(args[0], "says_any", False)
            if self.gpu.in_step:
                return 1.0  # Adafactor scales its update by a norm: any number does, there are no values
        if func in _CUBLAS_OPS:
            self.gpu._reserve_workspace()
            self.products += self.inside
        if self.inside:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        # How the fake tensor of an operation is found (a decomposition, or a cache) is not what a GPU would allocate.
        self.inside = True
        try:
            if func is _GROUPED_MM and self.gpu.kernels.applies("grouped_mm"):
                out = args[0].new_empty(grouped_mm_shape(*args[:3]))
            else:
                out = self._run(func, types, args, kwargs or {})
            if func is _LAYER_NORM:
                out = self.gpu.kernels.layer_norm(out)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                tr(
                    ko=f"가상 GPU의 텐서에는 값이 없는데 이 모델은 값을 보고 다음 계산을 정한다({func}). 토큰이 어느 "
                    "전문가로 가는지에 메모리가 달린 일부 MoE가 그렇다. 진짜 GPU에서만 잴 수 있다.",
                    en=f"Tensors on a virtual GPU have no values, and this model looks at values to go on ({func}), as "
                    "some MoE do whose memory depends on where the tokens are sent. Only a real GPU can measure it.",
                )
            ) from error
        finally:
            self.inside = False
        if isinstance(out, torch.Tensor):
            if func.overloadpacket is _aten.any:
                out.says_any = True
            self.count(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.count(item)
        return out

    def _run(self, func, types, args, kwargs):
        run = super().__torch_dispatch__

        def find():
            products = self.products
            return run(func, types, args, kwargs), func in _CUBLAS_OPS or self.products == products

        return _outputs(self, func, args, kwargs, find)

    def count(self, tensor: torch.Tensor, category: str = "activations") -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages or not storage.nbytes():
            return
        block = self.gpu._allocate(storage.nbytes(), category)

        def release(_, key=key, storages=self.storages, meter=self.gpu.meter):
            block = storages.pop(key)[1]
            if block is not None:
                meter.free(block)

        self.storages[key] = (weakref.ref(storage, release), block)

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """Count a known storage anew after its `resize_`; what it holds from now on is `category`."""
        if storage._cdata not in self.storages:
            return
        reference, block = self.storages[storage._cdata]
        if block is not None:
            self.gpu.meter.free(block)
        block = self.gpu._allocate(storage.nbytes(), category) if storage.nbytes() else None
        self.storages[storage._cdata] = (reference, block)


def on_virtual_gpu(thing: Any) -> bool:
    """Whether this is a tensor on a virtual GPU."""
    return isinstance(getattr(thing, "fake_mode", None), _CountingMode)


class VirtualGPU:
    """A GPU of the catalogue made of fake tensors; with `limited=False` it never runs out of memory.

    expandable_segments: the caching allocator's setting; None takes it from the environment, as PyTorch does.
    without: names of `cuda_kernels.DIFFERENCES` in which it is a CPU.

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
    ):
        self.spec = spec
        self.expandable_segments = expandable_segments_asked() if expandable_segments is None else expandable_segments
        self.name = spec.name
        capacity = spec.capacity_bytes if limited else None
        self.meter = AllocationMeter(capacity, expandable_segments=self.expandable_segments)
        self.mode = _CountingMode(self)
        self.kernels = CudaKernels(spec.compute_capability, without)
        self.in_step = False
        self.interrupted = self._waits = False  # Ctrl+C has come; Ctrl+C has to wait
        self._workspaces: dict[bool, int] = {}  # made in backward? -> allocation id

    def __repr__(self) -> str:
        return f"VirtualGPU({self.name!r}, {human_bytes(self.spec.capacity_bytes)})"

    # -- what torch.cuda says of a real GPU ------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes that PyTorch can allocate on this GPU."""
        return self.spec.capacity_bytes

    def memory_allocated(self) -> int:
        """Bytes held by tensors (and library workspaces) now."""
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
        self.meter.peak_bytes = self.meter.live_bytes
        self.meter.allocator.reset_peaks()

    def empty_cache(self) -> None:
        """Give cached segments back to the driver, after freeing what a failed backward left behind.

        What autograd had still to do stays queued in its CPU thread, with the tensors that were saved for it, until the
        next backward: here is one.
        """
        with torch.enable_grad():
            torch.zeros(1, requires_grad=True).sum().backward()
        self.meter.allocator.empty_cache()

    def release_workspaces(self) -> None:
        """Give back the cuBLAS workspaces, as `torch._C._cuda_clearCublasWorkspaces` does."""
        for block in self._workspaces.values():
            self.meter.free(block)
        self._workspaces.clear()

    # -- putting things on it --------------------------------------------------------------------------------------

    def __enter__(self) -> VirtualGPU:
        self.mode.__enter__()
        self.kernels.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.kernels.__exit__(*exception)
        self.mode.__exit__(*exception)

    def place(self, thing: Any) -> Any:
        """Put a module (in place), a tensor or a dict of tensors on this GPU, values dropped, and return it.

        Parameters count as "parameters", buffers and batches as "other". Tied weights stay tied.
        """
        if isinstance(thing, torch.nn.Module):
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
            entry = self.mode.storages.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry[1] is not None:
                self.meter.label(entry[1], category)

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
            message = (  # PyTorch's words, so that what is searched for is found
                f"CUDA out of memory. Tried to allocate {human_bytes(nbytes)}. GPU 0 ({self.name}, virtual) has a "
                f"total capacity of {human_bytes(self.spec.memory_bytes)} of which {human_bytes(free)} is free. "
                f"Including non-PyTorch memory, this process has {human_bytes(self.spec.memory_bytes - free)} memory "
                f"in use. Of the allocated memory {human_bytes(allocator.allocated_bytes)} is allocated by PyTorch, "
                f"and {human_bytes(allocator.unused_bytes)} is reserved by PyTorch but unallocated. If reserved but "
                "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
                "fragmentation.  See documentation for Memory Management  "
                "(https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
            )
        raise torch.OutOfMemoryError(message)

    def _reserve_workspace(self) -> None:
        # One workspace for each thread that has multiplied: the caller's, and autograd's device thread in backward.
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward not in self._workspaces and self.kernels.applies("cublas_workspace"):
            nbytes = cublas_workspace_bytes(self.spec.compute_capability)
            self._workspaces[in_backward] = self._allocate(nbytes, "other")

    # -- recording -------------------------------------------------------------------------------------------------

    @contextmanager
    def interrupts_wait(self) -> Iterator[None]:
        """In this block Ctrl+C waits for the next operation, or for the block's end.

        An interrupt that falls into a callback of the meter is swallowed there, and leaves it wrong.
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
        try:
            with self.interrupts_wait():
                yield record
        finally:
            record.label_training()  # also what was half done when the memory ran out
            self.meter.recorder = None


class VirtualRecord:
    """What happens on a virtual GPU during training, phase by phase."""

    def __init__(self, gpu: VirtualGPU, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.gpu, self.model, self.optimizer = gpu, model, optimizer
        self.recorder = TimelineRecorder(gpu.meter.live_blocks())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase: "forward", "backward" or "step"."""
        self.recorder.enter(name)
        # Tensors that forward and backward create are created next to their inputs, on the GPU. PyTorch's optimizers
        # keep their step counters on the CPU, the fused ones and bitsandbytes' keep everything beside the parameter.
        beside = type(self.optimizer).__module__.startswith("bitsandbytes") or self.optimizer.defaults.get("fused")
        on_gpu = name != "step" or beside
        self.gpu.in_step = name == "step"
        try:
            with self.gpu if on_gpu else nullcontext():
                yield
        finally:
            self.gpu.in_step = False
            self.label_training()
            self.recorder.leave()

    def label_training(self) -> None:
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        self.gpu.label(gradients, "gradients")
        states = (v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
        self.gpu.label((v for v in states if self.gpu.owns(v)), "optimizer")

    def timeline(self) -> Timeline:
        """The bytes held at every operation of every phase so far."""
        return self.recorder.timeline()
