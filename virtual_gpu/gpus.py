"""Where tensors live: the one interface of the real GPU and the virtual one."""

from __future__ import annotations

import functools
import gc
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from .allocator import expandable_segments_asked
from .cards import CATALOG
from .counting.gpu import VirtualGPU
from .language import tr
from .trace.timeline import CATEGORIES, PhaseCurve, Timeline
from .units import book_gb, choose, human_bytes


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
_current: GPU | None = None


def use_gpu(name: str | None = None) -> GPU:
    """Choose the GPU for what follows and return it.

    None: the real CUDA GPU where there is one, else a virtual T4. "cuda": the real one (RuntimeError where there is
    none). A name of the catalogue ("T4", "A100-80GB", …): a virtual one, on any machine. ValueError names the choices.
    """
    global _current
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "T4"
    name = choose(name, ["cuda", *CATALOG], tr(ko="GPU", en="GPU"))
    _current = _open_cuda() if name == "cuda" else VirtualGPU(CATALOG[name])
    return _current


def current_gpu() -> GPU:
    """The GPU in use; the first call takes `use_gpu()`'s default."""
    return _current or use_gpu()


def _open_cuda() -> CudaGPU:
    if not torch.cuda.is_available():
        raise RuntimeError(
            tr(
                ko="CUDA GPU를 찾지 못했다. Colab이라면 '런타임 → 런타임 유형 변경'에서 GPU를 고르고, GPU 없이 하려면 "
                'use_gpu("T4")처럼 가상 GPU를 쓴다.',
                en='No CUDA GPU found. On Colab choose one under Runtime → Change runtime type, or use_gpu("T4") for a '
                "virtual one.",
            )
        )
    gpu = cuda_gpu()
    if gpu.others_bytes() > 0.1 * gpu.capacity_bytes:
        print(
            tr(
                ko=f"주의: {gpu.name}의 메모리 {human_bytes(gpu.others_bytes())}를 다른 프로세스가 쓰고 있다. "
                f"남은 것은 {human_bytes(gpu.capacity_bytes)}이다.",
                en=f"Note: others hold {human_bytes(gpu.others_bytes())} of {gpu.name}; "
                f"{human_bytes(gpu.capacity_bytes)} are left.",
            )
        )
    return gpu


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


def print_gpu_utilization() -> None:
    """Print what `memory_allocated` says, in the book's words and unit."""
    print(gpu_utilization_line(current_gpu().memory_allocated()))


def gpu_utilization_line(nbytes: int) -> str:
    """The book's line for `nbytes` of allocated memory."""
    return tr(ko=f"GPU 메모리 사용량: {book_gb(nbytes)}", en=f"GPU memory used: {book_gb(nbytes)}")


def cleanup() -> None:
    """Delete what holds GPU memory in the notebook, and give the memory back.

    Variables of the notebook (or script) that are or contain a model, an optimizer or a tensor on the GPU are deleted
    and named in one line. `_`, `Out` and the last traceback, which hold tensors too, are emptied.
    """
    namespace = vars(sys.modules["__main__"])
    gpu = current_gpu()
    _forget_results()  # first, so that `Out` holds nothing and is not taken for a variable of the notebook
    doomed = [name for name, value in namespace.items() if not name.startswith("_") and _holds_memory(value, gpu)]
    for name in doomed:
        del namespace[name]
    if doomed:
        names = ", ".join(doomed)
        print(tr(ko=f"지운 변수: {names}", en=f"Deleted: {names}"))
    release_memory(gpu)


def release_memory(gpu: GPU) -> None:
    """Collect garbage, drop IPython's own references to results and errors, and empty the GPU's caches."""
    _forget_results()
    gc.collect()
    gpu.release_workspaces()
    gpu.empty_cache()


def clear_frames(error: BaseException | None) -> None:
    """Empty the frames that an exception and those before it hold: the local variables there hold tensors."""
    seen, waiting = set(), [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _ = frame.f_locals  # IPython has read them: until Python 3.12 what was read is kept until it is read again
        waiting += [error.__cause__, error.__context__]


def _holds_memory(value: Any, gpu: GPU, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return gpu.owns(value)
    if isinstance(value, torch.nn.Module):
        return any(gpu.owns(tensor) for tensor in (*value.parameters(), *value.buffers()))
    if isinstance(value, torch.optim.Optimizer):
        return any(gpu.owns(p) for group in value.param_groups for p in group["params"])
    if depth and isinstance(value, (list, tuple, set)):
        return any(_holds_memory(item, gpu, depth - 1) for item in value)
    if depth and isinstance(value, Mapping):
        return any(_holds_memory(item, gpu, depth - 1) for item in value.values())
    return False


def _forget_results() -> None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        results = shell.user_ns.get("_oh", {})
        # IPython keeps what a cell showed in its display hook and in two namespaces, the last result once more.
        for namespace in (vars(shell.displayhook), shell.user_ns, shell.user_ns_hidden):
            namespace.update((name, "") for name in ("_", "__", "___") if name in namespace)
            for number in results:
                namespace.pop(f"_{number}", None)
        results.clear()
        shell.last_execution_result = None
    clear_frames(getattr(sys, "last_value", None))
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
