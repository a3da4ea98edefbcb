"""CUDA's managed memory, which bitsandbytes' paged optimizers take for their states: no block of PyTorch's allocator.

The driver moves its pages: they lie on the card while it has room, else in the RAM, and come back when a kernel touches
them. So it takes nothing of what PyTorch can reserve, and what travels is not counted. Sources: bitsandbytes 0.50,
get_paged and GlobalPageManager in functional.py, get_state_buffer in optim/optimizer.py (from 100,000 elements on);
CUDA C Programming Guide, Unified Memory.
"""

from __future__ import annotations

import math
import weakref
from types import ModuleType
from typing import Any

import torch

from .device import GPU, ProgramGPU
from .imports import Imports
from .patches import Patches


def install(patches: Patches, imports: Imports, gpu: ProgramGPU) -> None:
    """Let bitsandbytes have its pages."""

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        gpu.check_index(torch.device("cuda") if device is None else device)
        meta = torch.empty(math.prod(shape), dtype=dtype, device="meta").view(shape)
        tensor = gpu.mode.fake_tensor_converter.from_meta_and_device(gpu.mode, meta, GPU)
        tensor.is_paged, tensor.page_deviceid = True, gpu.index
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
