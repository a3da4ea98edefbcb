"""Everything that belongs to the whole process and that a call must leave as it was: read twice, and what differs."""

from __future__ import annotations

import builtins
import gc
import hashlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import rich.style  # noqa: F401  draws a random number at its import, which TRL makes: before anything is compared
import torch
import torch.distributed as dist

from virtual_gpu import language, turns
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.program.device import ProgramGPU
from virtual_gpu.rules import active

# Whose functions and classes a virtual GPU, a rule or a library could replace.
PATCHED = (
    "torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "datasets", "safetensors", "flash_attn",
    "xformers", "numpy", "IPython", "builtins", "os", "io", "sys", "multiprocessing", "threading", "signal", "pickle",
    "json", "random", "subprocess", "importlib", "warnings", "logging", "contextlib", "functools", "time", "gc",
    "virtual_gpu", "helpers",
)  # fmt: skip
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type, staticmethod, classmethod,
         property, types.ModuleType)  # fmt: skip
_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
          "_global_buffer_registration_hooks", "_global_module_registration_hooks",
          "_global_parameter_registration_hooks")  # fmt: skip


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def random_numbers() -> tuple[str, ...]:
    """What torch, NumPy and Python will draw next."""
    return (
        _digest(torch.get_rng_state().numpy().tobytes()),
        _digest(np.random.get_state()[1].tobytes() + bytes(np.random.get_state()[2])),
        _digest(repr(random.getstate()).encode()),
    )


def process_state() -> dict[str, Any]:
    """name → what it is now, of all that is quick to read."""
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    main = threading.current_thread() is threading.main_thread()
    state = {
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        },
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": (_len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "backends": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random numbers": random_numbers(),
        "hooks of modules": {name: len(getattr(torch.nn.modules.module, name)) for name in _HOOKS},
        "hooks of optimizers": (
            len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks),
        ),
        "rules that are entered": (len(active._entered), len(active._libraries)),
        "process group": dist.is_available() and dist.is_initialized(),
        "cuda": (torch.cuda.is_available(), torch.cuda.is_initialized()),
        "streams": {name: id(getattr(sys, name)) for name in ("stdin", "stdout", "stderr", "__stdout__", "__stderr__")},
        "hooks of Python": {name: getattr(sys, name) for name in ("excepthook", "displayhook", "unraisablehook")},
        "hook of threads": threading.excepthook,
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "arguments": list(sys.argv),
        "path": list(sys.path),
        "finders": (list(map(id, sys.meta_path)), list(map(id, sys.path_hooks))),
        "main module": id(sys.modules["__main__"]),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.dont_write_bytecode),
        "import": builtins.__import__,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "temporary folder": (tempfile.tempdir, tuple(sorted(os.listdir(tempfile.gettempdir())))),
        "umask": _umask(),
        "group": os.getpgrp() if hasattr(os, "getpgrp") else None,
        "signal handlers": {one.name: signal.getsignal(one) for one in signal.Signals},
        "signals blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()) if hasattr(signal, "pthread_sigmask") else None,
        "timers": signal.getitimer(signal.ITIMER_REAL) if main and hasattr(signal, "getitimer") else None,
        "warnings": ([repr(one) for one in warnings.filters], warnings.showwarning, warnings._showwarnmsg_impl),
        "logging": {name: logging.getLogger(name).level for name in ("", "torch", "transformers", "peft", "accelerate")}
        | {"off": logging.root.manager.disable, "handlers": len(logging.root.handlers)},
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_debug()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": _children(),
        "open files": _open_files(),
        "language": language.language(),
        "turn": (_is_free(), turns._holder),
    }  # fmt: skip
    if accelerate := sys.modules.get("accelerate.state"):
        shared = (accelerate.PartialState, accelerate.AcceleratorState, accelerate.GradientState)
        state["accelerate"] = [dict(kind._shared_state) for kind in shared]
    return state


def gpus_alive() -> list[VirtualGPU]:
    """Every virtual GPU that there is, after a collection.

    What an interrupted backward had still to do, with the tensors that were saved for it, PyTorch keeps until the next
    backward of the thread: here is one. One collection does not do: the collector does not see what C++ holds, so the
    first one ends the tensors, and only the next one the GPU that they belonged to, with its cuBLAS workspaces.
    """
    with torch.enable_grad():
        torch.zeros(1, requires_grad=True).sum().backward()
    while gc.collect():
        pass
    return [one for one in gc.get_objects() if type(one) in (VirtualGPU, ProgramGPU)]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return sorted(map(int, path.read_text().split())) if path.exists() else []


def _open_files() -> list[str]:
    """What is open, but for the folder that is being read."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the folder itself
            continue
    return sorted(name for name in found if not name.startswith("/proc/") and "/matplotlib/" not in name)


def _is_free() -> bool:
    """Whether another thread would get its turn."""
    got = []

    def take() -> None:
        got.append(turns._turn.acquire(blocking=False))
        if got[0]:
            turns._turn.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def code_state() -> dict[str, Any]:
    """module.name and module.Class.name → the function, class or module that stands there, of all that is imported."""
    found: dict[str, Any] = {}
    for name, module in [*sys.modules.items()]:
        if module is None or name.split(".")[0] not in PATCHED:
            continue
        found[f"sys.modules[{name}]"] = module
        for key, value in [*vars(module).items()]:
            if issubclass(type(value), _CODE):
                found[f"{name}.{key}"] = value
            if issubclass(type(value), type) and value.__module__ == name:
                for inner, part in [*vars(value).items()]:
                    if issubclass(type(part), _CODE):
                        # PyTorch wraps an optimizer's step when the first of its class is made, and says so on it.
                        found[f"{name}.{key}.{inner}"] = part.__wrapped__ if getattr(part, "hooked", False) else part
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for all that was there and is another thing now; what has come (an import) is no change."""
    lines = []
    for name, value in before.items():
        now = after.get(name, "gone")
        same = now is value if issubclass(type(value), _CODE) else now == value
        if not same:
            lines.append(f"{name}: {value!r} -> {now!r}"[:600])
    return lines


def stand_ins() -> list[str]:
    """Modules of `PATCHED` that no finder has found: things that only stand for a library."""
    builtin = {*sys.builtin_module_names}
    return sorted(
        name
        for name, module in sys.modules.items()
        if name in PATCHED and name not in builtin and getattr(module, "__spec__", None) is None
    )
