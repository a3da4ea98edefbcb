"""The real CUDA GPU, behind the same interface as the virtual one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from .allocator import expandable_segments_asked
from .counting.gpu import VirtualGPU
from .errors import WrongValue
from .language import tr
from .trace.timeline import CATEGORIES, PhaseCurve, Timeline
from .units import human_bytes


class CudaGPU:
    """The real CUDA GPU, measured with `torch.cuda`'s own counters. Same interface as `VirtualGPU`."""

    is_virtual = False

    def __init__(self, index: int = 0):
        self.device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.device)
        self._entered: list[torch.device] = []
        self._peak = self._reserved_peak = 0  # the highest before the last phase, see `start_phase`

    def __repr__(self) -> str:
        return f"CudaGPU({self.name!r}, {human_bytes(self.capacity_bytes)})"

    @property
    def capacity_bytes(self) -> int:
        """Bytes that this process can have: what is free plus what its own allocator holds."""
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(self.device)
        return min(free + torch.cuda.memory_reserved(self.device), int(fraction * total))

    def others_bytes(self) -> int:
        """Bytes that others hold: other processes, CUDA contexts, the display."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def memory_allocated(self) -> int:
        """Bytes held by tensors (and library workspaces) now."""
        return torch.cuda.memory_allocated(self.device)

    def max_memory_allocated(self) -> int:
        """The most bytes held at once since the start or the last `reset_peak_memory_stats`."""
        return max(self._peak, torch.cuda.max_memory_allocated(self.device))

    def memory_reserved(self) -> int:
        """Bytes that the caching allocator has taken from the driver: in use, cached, or lost between blocks."""
        return torch.cuda.memory_reserved(self.device)

    def max_memory_reserved(self) -> int:
        """The most bytes reserved at once since the start or the last `reset_peak_memory_stats`."""
        return max(self._reserved_peak, torch.cuda.max_memory_reserved(self.device))

    @property
    def expandable_segments(self) -> bool:
        """Whether the caching allocator was told to use them when Python started."""
        return expandable_segments_asked()

    def reset_peak_memory_stats(self) -> None:
        """Start `max_memory_allocated` and `max_memory_reserved` anew from what is held now."""
        self._peak = self._reserved_peak = 0
        torch.cuda.reset_peak_memory_stats(self.device)

    def start_phase(self) -> None:
        """Reset CUDA's own peak counters, keeping the highest peaks so far."""
        self._peak, self._reserved_peak = self.max_memory_allocated(), self.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        torch.cuda.empty_cache()

    def release_workspaces(self) -> None:
        """Give back the cuBLAS workspaces (the 0.016 GB that otherwise stay after the first multiplication)."""
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # private, there since torch 1.11
        if clear is not None:
            clear()

    def __enter__(self) -> CudaGPU:
        self._entered.append(torch.device(self.device))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def place(self, thing: Any) -> Any:
        """Move a module (in place), a tensor or a dict of tensors to this GPU and return it."""
        if isinstance(thing, Mapping):
            return {name: self.place(value) for name, value in thing.items()}
        return thing.to(self.device) if isinstance(thing, (torch.Tensor, torch.nn.Module)) else thing

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lives on this GPU."""
        return tensor.device == self.device

    def autocast(self, dtype: torch.dtype | None):
        """Mixed precision in `dtype`; None does nothing."""
        return nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)

    def interrupts_wait(self):
        """Nothing has to wait here: CUDA's counters are not Python's, and Ctrl+C leaves them right."""
        return nullcontext()

    @contextmanager
    def record(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[CudaRecord]:
        """Record the block's phases; they are named with `record.phase(...)`."""
        yield CudaRecord(self, model, optimizer)


class CudaRecord:
    """What happens on a real GPU during training: for each phase what is held at its start, peak and end.

    CUDA's counters do not say what a byte is for. Parameters, gradients and optimizer state are read off their tensors
    at the start and the end of a phase; at the peak of a phase they are taken as at its start (for "step": as at its
    end), and the rest counts as activations. So gradients that grow during backward count as activations at its peak.
    """

    def __init__(self, gpu: CudaGPU, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.gpu, self.model, self.optimizer = gpu, model, optimizer
        self._phases: list[PhaseCurve] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase: "forward", "backward" or "step"."""
        torch.cuda.synchronize(self.gpu.device)
        self.gpu.start_phase()
        known_at_start = self._known()
        start = self._row(known_at_start, self.gpu.memory_allocated())
        try:
            yield
        finally:
            known_at_end = self._known()
            peak_known = known_at_end if name == "step" else known_at_start
            peak = self._row(peak_known, torch.cuda.max_memory_allocated(self.gpu.device))
            end = self._row(known_at_end, self.gpu.memory_allocated())
            reserved = torch.cuda.max_memory_reserved(self.gpu.device)
            self._phases.append(PhaseCurve(name, np.array([start, peak, end], dtype=np.int64), reserved))

    def _known(self) -> tuple[int, int, int]:
        parameters = list(self.model.parameters())
        states = (v for state in self.optimizer.state.values() for v in state.values())
        return (
            storage_bytes(parameters),
            storage_bytes(p.grad for p in parameters if p.grad is not None),
            storage_bytes(v for v in states if isinstance(v, torch.Tensor) and self.gpu.owns(v)),
        )

    @staticmethod
    def _row(known: tuple[int, int, int], total: int) -> list[int]:
        row = dict(zip(("parameters", "gradients", "optimizer"), known, strict=True))
        row["activations"] = total - sum(known)
        return [row.get(category, 0) for category in CATEGORIES]

    def timeline(self) -> Timeline:
        """Start, peak and end of every phase so far."""
        return Timeline(list(self._phases))


GPU = CudaGPU | VirtualGPU


@functools.cache
def cuda_gpu() -> CudaGPU:
    """The real GPU, one object for the process."""
    return CudaGPU()


def storage_bytes(tensors: Any) -> int:
    """Bytes of the distinct storages of these tensors (tied weights and views count once)."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def gpu_of(model: torch.nn.Module) -> GPU:
    """The GPU that holds the model; ValueError where none does."""
    parameter = next(model.parameters(), None)
    mode = getattr(parameter, "fake_mode", None)
    if mode is not None:
        return mode.gpu
    if parameter is not None and parameter.is_cuda:
        return cuda_gpu()
    where = "-" if parameter is None else parameter.device
    raise WrongValue(
        tr(
            ko=f"모델이 GPU에 있지 않다({where}). load_model_and_tokenizer로 불러오거나 "
            "current_gpu().place(model)로 옮긴다.",
            en=f"The model is not on a GPU ({where}): put it there with gpu.place(model).",
        )
    )
