"""The libraries that are here, and those that only some things need."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from .language import tr

LIBRARIES = (
    "torch", "numpy", "transformers", "peft", "accelerate", "bitsandbytes", "trl", "datasets", "safetensors",
    "deepspeed", "liger-kernel", "triton", "ipywidgets", "ipykernel", "jupyterlab", "notebook",
)  # fmt: skip


def require(*modules: str) -> None:
    """ImportError, with what to install, for the first of these modules that is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                tr(
                    ko=f"{module}이(가) 없다. 'pip install {module}'로 설치한 뒤 커널을 다시 시작한다.",
                    en=f"{module} is missing: 'pip install {module}', then restart the kernel.",
                )
            )


def installed(*names: str) -> dict[str, str]:
    """Name → version of those of these distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
