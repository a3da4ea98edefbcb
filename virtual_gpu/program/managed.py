"""bitsandbytes' paged optimizers in a program: their pages (see `models.pages`) are counted beside the allocator.

What travels is not counted. Source: bitsandbytes 0.50, get_paged and GlobalPageManager in functional.py.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import torch

from ..models.pages import page
from .device import ProgramGPU
from .imports import Imports
from .patches import Patches


def install(patches: Patches, imports: Imports, gpu: ProgramGPU) -> None:
    """Let bitsandbytes have its pages."""

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        device = torch.device("cuda") if device is None else device
        gpu.check_index(device)
        tensor = page(gpu.mode, shape, dtype, gpu.inside(device))
        tensor.page_deviceid = gpu.index if device.index is None else device.index
        count(tensor.nbytes)
        weakref.finalize(tensor, count, -tensor.nbytes).atexit = False
        return tensor

    def count(nbytes: int) -> None:
        gpu.managed_bytes += nbytes
        gpu.managed_peak_bytes = max(gpu.managed_peak_bytes, gpu.managed_bytes)

    def functional(module: ModuleType) -> None:
        changed_in_place = {"fill": lambda *_, **__: None, "prefetch_tensor": lambda *_, **__: None}
        patches.set_all(module, {"get_paged": get_paged, **changed_in_place})
        patches.set(module.GlobalPageManager, "_instance", None)  # it holds the pages of all optimizers

    imports.after("bitsandbytes.functional", functional)
