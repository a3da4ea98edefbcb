"""A GPU that you do not have: programs run on fake tensors whose every request goes through CUDA's allocator.

    import virtual_gpu
    report = virtual_gpu.predict("meta-llama/Llama-3.2-1B", gpu="T4", sequence_length=1024)

Names are imported where they are first used: `import virtual_gpu` loads nothing heavy, prints nothing and opens no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import activation_budget, predict
    from .cards import CATALOG, GPUSpec, card
    from .counting.gpu import VirtualGPU
    from .doctor import diagnose
    from .errors import (
        BadConfiguration,
        ExistingFile,
        NoSuchLayer,
        NotSupported,
        UnknownName,
        VirtualGPUError,
        WrongValue,
    )
    from .host.machines import machine
    from .host.meter import HostOutOfMemory
    from .language import set_language
    from .plan import plan_training
    from .program import cuda
    from .program.notebook import load_ipython_extension, unload_ipython_extension
    from .report import MemoryReport
    from .step.largest import largest_fitting, largest_model
    from .step.setting import Setting
    from .trace.compare import compare
    from .trace.replay import replay

__version__ = "0.1.0"
_HOME = {
    "predict": ".api",
    "activation_budget": ".api",
    "plan_training": ".plan",
    "largest_fitting": ".step.largest",
    "largest_model": ".step.largest",
    "Setting": ".step.setting",
    "MemoryReport": ".report",
    "VirtualGPU": ".counting.gpu",
    "CATALOG": ".cards",
    "GPUSpec": ".cards",
    "card": ".cards",
    "HostOutOfMemory": ".host.meter",
    "machine": ".host.machines",
    "set_language": ".language",
    "replay": ".trace.replay",
    "compare": ".trace.compare",
    "cuda": ".program",
    "diagnose": ".doctor",
    "load_ipython_extension": ".program.notebook",
    "unload_ipython_extension": ".program.notebook",
    **dict.fromkeys(
        (
            "VirtualGPUError", "WrongValue", "UnknownName", "BadConfiguration", "NotSupported", "NoSuchLayer",
            "ExistingFile",
        ),
        ".errors",
    ),
}  # fmt: skip
__all__ = [
    "CATALOG",
    "BadConfiguration",
    "ExistingFile",
    "GPUSpec",
    "HostOutOfMemory",
    "MemoryReport",
    "NoSuchLayer",
    "NotSupported",
    "Setting",
    "UnknownName",
    "VirtualGPU",
    "VirtualGPUError",
    "WrongValue",
    "activation_budget",
    "card",
    "compare",
    "cuda",
    "diagnose",
    "largest_fitting",
    "largest_model",
    "load_ipython_extension",
    "machine",
    "plan_training",
    "predict",
    "replay",
    "set_language",
    "unload_ipython_extension",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
