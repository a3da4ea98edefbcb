"""The GPU in use in the course: a real one or a virtual one, and giving its memory back."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.frames import clear_frames
from virtual_gpu.language import tr
from virtual_gpu.real import GPU, CudaGPU, cuda_gpu
from virtual_gpu.units import book_gb, choose, human_bytes

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


def allocator_set_to(settings: str | None) -> AbstractContextManager[Any]:
    """For a block: PYTORCH_ALLOC_CONF, which a virtual card reads where it begins; None: as it is."""
    return patch.dict(os.environ, {} if settings is None else {"PYTORCH_ALLOC_CONF": settings})


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
