"""Mixed precision: autocast of "cuda" is autocast of the tensors inside, which are "cpu:0", in CUDA's type."""

from __future__ import annotations

from typing import Any

import torch

from .patches import Patches


def install(patches: Patches) -> None:
    """Let everything that asks for or sets autocast of "cuda" do so where it works.

    CUDA's lists of what stays in fp32 are the core's (`autocast_fp32`).
    """
    autocast = torch.amp.autocast_mode.autocast
    init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__
    available = torch.amp.autocast_mode.is_autocast_available
    is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
    default = {"cuda": torch.float16}  # get_autocast_dtype("cuda") where none was set

    def inside(device: str) -> str:
        return "cpu" if device == "cuda" else device

    def __init__(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None):
        if device_type == "cuda" and dtype is None:
            dtype = default["cuda"]
        if device_type == "cuda" and dtype is torch.float32:
            enabled = False
        init(self, device_type, dtype, enabled, cache_enabled)

    def __enter__(self: Any) -> Any:
        shown, self.device = self.device, inside(self.device)
        try:
            return enter(self)
        finally:
            self.device = shown

    def __exit__(self: Any, *exception: Any) -> Any:
        shown, self.device = self.device, inside(self.device)
        try:
            return leave(self, *exception)
        finally:
            self.device = shown

    def dtype_of(device: str) -> torch.dtype:
        return get_dtype("cpu") if device == "cuda" and is_enabled("cpu") else default.get(device) or get_dtype(device)

    def choose_dtype(device: str, dtype: torch.dtype) -> None:
        if device == "cuda":
            default["cuda"] = dtype
        set_dtype(inside(device), dtype)

    patches.set_all(autocast, {"__init__": __init__, "__enter__": __enter__, "__exit__": __exit__})
    patches.set(torch.amp.autocast_mode, "is_autocast_available", lambda device: device == "cuda" or available(device))
    patches.set_all(
        torch,
        {
            "is_autocast_enabled": lambda device_type="cuda": is_enabled(inside(device_type)),
            "set_autocast_enabled": lambda *args: set_enabled(inside(args[0]) if len(args) > 1 else "cpu", args[-1]),
            "get_autocast_dtype": dtype_of,
            "set_autocast_dtype": choose_dtype,
            "get_autocast_gpu_dtype": lambda: dtype_of("cuda"),
            "set_autocast_gpu_dtype": lambda dtype: choose_dtype("cuda", dtype),
        },
    )
