"""Triton's kernels (https://github.com/triton-lang/triton; 3.4, 3.5, 3.9), which are not run.

A kernel writes into tensors that Python has made before, and asks nothing of the caching allocator itself: `run` in
triton/runtime/jit.py compiles and launches. So the Python around a kernel runs, and a launch does nothing but end what
was known of the tensors that it gets. Two things around it do allocate, and are in Triton's Python: an autotuner that
times its configurations holds 256 MiB while it does (`do_bench` in triton/testing.py, to empty the L2 cache between two
of them), and a kernel with descriptors on the card gets its scratch from the program's own `triton.set_allocator`,
which is not seen here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ..language import tr
from . import known
from .device import ProgramGPU
from .driver import properties
from .imports import Imports
from .patches import Patches
from .watch import Watch


def install(patches: Patches, imports: Imports, gpu: ProgramGPU, watch: Watch) -> None:
    """Launches do nothing, and Triton finds the virtual card."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                known.forget(value)
        watch.note(
            tr(
                ko="Triton 커널은 실행하지 않았다. 받은 텐서에 쓸 뿐 할당하는 것은 없다",
                en="Triton's kernels are not run: they write into the tensors that they get and allocate nothing",
            )
        )

    def timed(function: Any, *args: Any, quantiles: Any = None, **settings: Any) -> Any:
        """As long as any other: an autotuner takes its first configuration."""
        function()
        sys.modules["triton.runtime.driver"].driver.active.get_empty_cache_for_benchmark()
        return 1.0 if quantiles is None else [1.0 for _ in quantiles]

    def in_backend(module: ModuleType) -> None:
        patches.set(module, "libcuda_dirs", list)  # where it looks for the driver's library to link with

    def in_runtime(module: ModuleType) -> None:
        """Not one of the patches that are suspended while PyTorch's compiler works: it has Triton read a kernel for the
        card, to see which tensors it changes, and takes all of them where that fails."""
        held = vars(module.driver)
        before = dict(held)
        module.driver.set_active(_driver(gpu))
        patches.later(lambda: (held.clear(), held.update(before)))

    imports.after("triton.runtime.jit", lambda module: patches.set(module.JITFunction, "run", run))
    imports.after("triton.runtime.driver", in_runtime)
    imports.after("triton.testing", lambda module: patches.set(module, "do_bench", timed))
    imports.after("triton.backends.nvidia.driver", in_backend)


def _driver(gpu: ProgramGPU) -> Any:
    """Triton's own driver of CUDA's cards, which is told what it would ask CUDA's library."""
    kind, facts = import_module("triton.backends.nvidia.driver").CudaDriver, properties(gpu)
    driver = object.__new__(kind)
    driver.get_device_capability = lambda device=None: gpu.spec.compute_capability
    driver.get_current_device = lambda: gpu.index
    driver.set_current_device = torch.cuda.set_device
    driver.get_current_stream = lambda device=None: 0
    described = {
        "multiprocessor_count": facts.multi_processor_count,
        "max_shared_mem": facts.shared_memory_per_block_optin,
        "warpSize": facts.warp_size,
    }
    driver.utils = SimpleNamespace(get_device_properties=lambda device: described)
    return driver
