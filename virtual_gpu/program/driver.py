"""The driver: `torch._C._cuda_*`, on which all of torch.cuda's Python stands.

A CPU build of PyTorch lacks these functions. With them PyTorch's own torch.cuda runs as it is: `memory_summary`,
`mem_get_info`, `get_device_properties`, seeds, and what checks each of them for errors.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from ..allocator_settings import AllocatorSettings
from ..language import tr
from .device import ProgramGPU
from .patches import Patches
from .streams import Event, Graph, Streams, graph


class Ranges:
    """`torch._C._nvtx`: marks for NVIDIA's profilers, answered as NVTX answers where none is attached."""

    _NOT_TRACKED = -2  # NVTX_NO_PUSH_POP_TRACKING (nvToolsExt.h)

    def rangePushA(self, message: str) -> int:
        """A range begins; how deep it is nested is not kept."""
        return self._NOT_TRACKED

    def rangePop(self) -> int:
        """The innermost range ends."""
        return self._NOT_TRACKED

    def rangeStartA(self, message: str) -> int:
        """A range begins that another thread may end; the number of no range."""
        return 0

    def deviceRangeStart(self, message: str, stream: int) -> int:
        """As `rangeStartA`, in a stream."""
        return 0

    def markA(self, message: str) -> None:
        """A moment."""

    def rangeEnd(self, number: int) -> None:
        """The range of this number ends."""

    def deviceRangeEnd(self, handle: int, stream: int) -> None:
        """The range of this handle ends."""


class DeviceProperties(types.SimpleNamespace):
    """`torch.cuda.get_device_properties`' answer."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count})"
        )


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Make torch.cuda, torch.accelerator and torch.backends.cuda find this GPU."""
    streams, generator = gpu.streams, _generator(gpu)
    patches.set_all(torch._C, _functions(gpu, streams))
    patches.set_all(torch._C, _accelerator(gpu, streams))
    patches.set(torch._C, "_scatter", _scatter)  # nn.DataParallel's
    patches.set_all(
        torch.cuda,
        {
            "_lazy_init": gpu.start,
            "_exchange_device": torch._C._cuda_exchangeDevice,
            "_maybe_exchange_device": torch._C._cuda_maybeExchangeDevice,
            "_initialized": True,
            "_cudart": _cudart(gpu),
            "_get_device_properties": lambda index: properties(gpu, index),
            "default_generators": _Generators(gpu, generator),
            "is_bf16_supported": lambda including_emulation=True: (
                including_emulation or gpu.spec.compute_capability[0] >= 8
            ),
            "device_count": lambda: gpu.count,
            "_cached_device_count": None,  # PyTorch's own keeps what it once found, and `random` calls that one
            "get_arch_list": lambda: [_architecture(gpu)],
            "Stream": streams.kind,
            "Event": Event,
            "ExternalStream": streams.kind,
            "CUDAGraph": Graph,
            "graph": graph,
            "make_graphed_callables": lambda callables, *args, **kwargs: callables,
            "is_current_stream_capturing": lambda: False,
            "graph_pool_handle": lambda: (0, 1),
            "stream": streams.entered,
            "set_stream": streams.choose,
            "current_stream": lambda device=None: streams.on(_index_of(gpu, device)),
            "default_stream": lambda device=None: streams.default_of(_index_of(gpu, device)),
            "utilization": lambda device=None: 100,
        },
    )
    patches.set_all(torch, {"Stream": streams.kind, "Event": Event})  # the accelerator's, whichever it is
    patches.set(torch.cuda.random, "device_count", lambda: gpu.count)
    patches.set_all(torch.cuda.streams, {"Stream": streams.kind, "Event": Event})
    patches.set_all(torch.cuda.graphs, {"CUDAGraph": Graph, "graph": graph})
    patches.set(torch.cuda.nvtx, "_nvtx", Ranges())
    if torch.version.cuda is None:  # a CUDA build's own is held against torchvision's
        patches.set(torch.version, "cuda", "12.8")
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    # A CUDA build would give cuDNN the weights of a recurrent layer, whose rule of shapes asks the real driver.
    patches.set(torch, "_use_cudnn_rnn_flatten_weight", lambda: False)
    patches.set(torch, "Generator", generator)
    patches.set(torch, "device", _device_type())


def _architecture(gpu: ProgramGPU) -> str:
    major, minor = gpu.spec.compute_capability
    return f"sm_{major}{minor}"


def _index_of(gpu: ProgramGPU, device: Any) -> int:
    return gpu.index if device is None else _get_device_index(device, optional=True)


def properties(gpu: ProgramGPU, index: int = 0) -> DeviceProperties:
    """What the driver says of a card."""
    major, minor = gpu.spec.compute_capability
    return DeviceProperties(
        name=gpu.spec.device_name, major=major, minor=minor, total_memory=gpu.spec.memory_bytes,
        multi_processor_count=gpu.spec.multiprocessors, max_threads_per_block=1024,
        max_threads_per_multi_processor=gpu.spec.threads_per_multiprocessor, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=65536 if major == 7 else 101376,
        shared_memory_per_multiprocessor=65536 if major == 7 else 102400,
        L2_cache_size=gpu.spec.l2_cache_bytes, is_integrated=0, is_multi_gpu_board=0,
        pci_bus_id=0, pci_device_id=4 + index, pci_domain_id=0,
        uuid=f"00000000-0000-0000-0000-{index:012}", gcnArchName=f"sm_{major}{minor}",
    )  # fmt: skip


def memory_stats(gpu: ProgramGPU, index: int) -> dict[str, Any]:
    """`torch._C._cuda_memoryStats`: sums by pool; a peak by pool is not kept and given as what is held now."""
    with gpu.mode.turn, gpu.on(index):
        gpu.mode.releases.settle()
        return _memory_stats(gpu)


def _memory_stats(gpu: ProgramGPU) -> dict[str, Any]:
    allocator = gpu.meter.allocator
    counts = {kind: dict.fromkeys(("all", "large_pool", "small_pool"), 0) for kind in _KINDS}

    def add(kind: str, pool: str, amount: int) -> None:
        counts[kind]["all"] += amount
        counts[kind][pool] += amount

    asked = {block: nbytes for block, (nbytes, _, _) in gpu.meter.live_blocks().items()}
    for segment in allocator.segments():
        pool = "small_pool" if segment.small else "large_pool"
        add("segment", pool, 1)
        add("reserved_bytes", pool, segment.size)
        for piece in segment.pieces:
            if piece.name is not None:
                for kind, amount in (("allocation", 1), ("active", 1)):
                    add(kind, pool, amount)
                for kind in ("allocated_bytes", "active_bytes"):
                    add(kind, pool, piece.size)
                add("requested_bytes", pool, asked[piece.name])
            elif len(segment.pieces) > 1:
                add("inactive_split", pool, 1)
                add("inactive_split_bytes", pool, piece.size)
    peaks = {kind: allocator.peak_allocated_bytes for kind in ("allocated_bytes", "active_bytes")}
    peaks["reserved_bytes"] = allocator.peak_reserved_bytes
    zero = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    stats: dict[str, Any] = {
        kind: {
            pool: {"current": now, "peak": peaks.get(kind, now) if pool == "all" else now, "allocated": now, "freed": 0}
            for pool, now in pools.items()
        }
        for kind, pools in counts.items()
    }
    return stats | {
        "oversize_allocations": zero, "oversize_segments": zero,
        "max_split_size": allocator.settings.max_split_size or -1,
        "num_alloc_retries": allocator.retries, "num_ooms": gpu.ooms_here, "num_sync_all_streams": 0,
        "num_device_alloc": counts["segment"]["all"], "num_device_free": 0,
    }  # fmt: skip


_KINDS = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip


def _functions(gpu: ProgramGPU, streams: Streams) -> dict[str, Callable]:
    def exchange(index: int) -> int:
        before = gpu.index
        if index >= 0:
            gpu.choose(index)
        return before

    def fraction(value: float, index: int) -> None:
        with gpu.on(index):
            gpu.limit(value)

    def part(index: int) -> float:
        with gpu.on(index):
            return gpu.fraction

    def reset_peaks(index: int) -> None:
        with gpu.mode.turn, gpu.on(index):
            gpu.reset_peak_memory_stats()

    def change_settings(text: str) -> None:
        said = ",".join(filter(None, (gpu.settings_said, text)))  # what an earlier call said stays
        settings = AllocatorSettings.from_environment(more=said)
        if not gpu.begun:
            gpu.settings_said = said
            gpu.configure(settings)
            return
        gpu.watch.note(
            tr(
                ko=f"할당기의 설정은 처음 할당할 때 그대로다: 그 뒤에 바꾼 {text}은(는) 따르지 않았다",
                en=f"the allocator's settings stay as they were at the first allocation: {text} was not followed",
            )
        )

    return {
        "_cuda_getDeviceCount": gpu.counted_by_cuda,  # `torch.cuda.is_available`
        "_cuda_init": gpu.start,
        "_cuda_isInBadFork": lambda: os.getpid() != gpu.pid,
        "_cuda_getDevice": lambda: gpu.index,
        "_cuda_setDevice": gpu.choose,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_canDeviceAccessPeer": lambda a, b: True,
        "_cuda_synchronize": lambda *_: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_getArchFlags": lambda: _architecture(gpu),
        "_cuda_getDriverVersion": lambda: 12080,
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCurrentStream": lambda index: (streams.on(index).stream_id, index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": lambda index: streams.on(index).cuda_stream,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_clearCublasWorkspaces": gpu.release_workspaces,
        "_cuda_memoryStats": lambda index: memory_stats(gpu, index),
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_emptyCache": gpu.empty_cache,
        "_cuda_setMemoryFraction": fraction,
        "_cuda_getMemoryFraction": part,
        "_cuda_memorySnapshot": lambda pool, *_: gpu.watch.snapshot(),
        "_cuda_record_memory_history": lambda enabled, *_, **__: gpu.watch.keep_history(enabled is not None),
        "_cuda_record_memory_history_legacy": lambda enabled, *_, **__: gpu.watch.keep_history(enabled),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_hostMemoryStats": lambda: {},
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_cudaCachingAllocator_set_allocator_settings": change_settings,
    }


def _accelerator(gpu: ProgramGPU, streams: Streams) -> dict[str, Callable]:
    driver = _functions(gpu, streams)
    return {
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: gpu.index,
        "_accelerator_setDeviceIndex": driver["_cuda_setDevice"],
        "_accelerator_exchangeDevice": driver["_cuda_exchangeDevice"],
        "_accelerator_maybeExchangeDevice": driver["_cuda_maybeExchangeDevice"],
        "_accelerator_synchronizeDevice": lambda index: None,
        "_accelerator_getStream": streams.on,
        "_accelerator_setStream": streams.choose,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": gpu.empty_cache,
        "_accelerator_emptyHostCache": lambda: None,
        "_accelerator_setAllocatorSettings": driver["_cuda_cudaCachingAllocator_set_allocator_settings"],
        "_accelerator_getDeviceStats": lambda index: memory_stats(gpu, index),
        "_accelerator_resetPeakStats": driver["_cuda_resetPeakMemoryStats"],
        "_accelerator_resetAccumulatedStats": lambda index: None,
        "_accelerator_getMemoryInfo": lambda index: memory_info(gpu, index),
    }


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[torch.Tensor]:
    """A chunk of the tensor on each device; one that is there already is no copy (torch/csrc/cuda/comm.cpp)."""
    chunks = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    return [chunk.to(torch.device("cuda", place)) for chunk, place in zip(chunks, devices, strict=False)]


def memory_info(gpu: ProgramGPU, index: int) -> tuple[int, int]:
    """What `torch.cuda.mem_get_info` says: (free, all) bytes."""
    with gpu.mode.turn, gpu.on(index):
        return gpu.capacity_bytes - gpu.memory_reserved(), gpu.spec.memory_bytes


def _cudart(gpu: ProgramGPU) -> types.SimpleNamespace:
    class cudaError(int):
        success = 0

    return types.SimpleNamespace(
        cudaMemGetInfo=lambda index: memory_info(gpu, index),
        cudaError=cudaError,
        cudaGetErrorString=str,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda *_: 0,
    )


class _Generators(Sequence):
    """`torch.cuda.default_generators`: one for each card of the machine."""

    def __init__(self, gpu: ProgramGPU, kind: type):
        self._gpu, self._kind = gpu, kind
        self._made: list[Any] = []
        self._make()  # now: a fork of the process makes none

    def __len__(self) -> int:
        return self._gpu.count

    def __getitem__(self, index: Any) -> Any:
        self._make()  # where a launcher has said that more are in the machine
        return tuple(self._made[: len(self)])[index]

    def _make(self) -> None:
        for place in range(len(self._made), len(self)):
            self._made.append(self._kind("cpu"))  # for the card: CUDA is not to start for it
            self._made[-1].shown = torch.device("cuda", place)


def _generator(gpu: ProgramGPU) -> type:
    before = torch.Generator

    class Kind(type(before)):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, before)

    class Generator(before, metaclass=Kind):
        """`torch.Generator`; one of the GPU is one of the CPU that says otherwise."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls, "cpu")
            made.shown = torch.device(device)
            if made.shown.type == "cuda":
                gpu.check_index(made.shown)
                made.shown = gpu.device if made.shown.index is None else made.shown
            return made

        @property
        def device(self) -> torch.device:
            """The device that it was made for."""
            return self.shown

        def clone_state(self) -> Any:
            """Another one of the same device in the same state."""
            made = type(self)("cpu")
            made.shown = self.shown
            made.set_state(self.get_state())
            return made

    return Generator


def _device_type() -> type:
    """`torch.device`, for which a number alone is a CUDA device; on a CPU build it is an error."""
    before = torch.device

    class Kind(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, before)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, before)

    class device(metaclass=Kind):
        __doc__ = before.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and isinstance(args[0], int) and not kwargs:
                return before("cuda", args[0])
            return before(*args, **kwargs)

    device.__module__, device.__qualname__ = before.__module__, before.__qualname__  # a device is pickled by that name
    return device
