"""The RAM of the host while a program runs: what its CPU tensors are for, pinned memory, and the loaders' processes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .device import ProgramGPU
from .patches import Patches


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Count on the host what no operation shows, and say of what operations make what it is."""
    host = gpu.host
    is_pinned, numpy = torch.Tensor.is_pinned, torch.Tensor.numpy

    def named(category: str) -> Any:
        return lambda module, name, tensor: host.label([tensor], category)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            host.label((p.grad for p in group["params"] if p.grad is not None), "gradients")

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            host.label(state.values(), "optimizer")

    def to_numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is not FakeTensor:
            host.written(tensor)  # NumPy may write into it, and nobody tells
        return numpy(tensor, *args, **kwargs)

    def pinned(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return host.is_pinned(tensor) if type(tensor) is not FakeTensor else is_pinned(tensor, *args, **kwargs)

    patches.later(register_module_parameter_registration_hook(named("parameters")).remove)
    patches.later(register_module_buffer_registration_hook(named("buffers")).remove)
    patches.later(register_optimizer_step_pre_hook(before_step).remove)
    patches.later(register_optimizer_step_post_hook(after_step).remove)
    patches.set(torch.Tensor, "numpy", to_numpy)
    patches.set(torch.Tensor, "is_pinned", pinned)
    patches.set(torch._C, "_host_emptyCache", host.meter.empty_pinned_cache)
    patches.set(torch._C, "_accelerator_emptyHostCache", host.meter.empty_pinned_cache)
    _loaders(patches, gpu)


def _loaders(patches: Patches, gpu: ProgramGPU) -> None:
    """A DataLoader's processes: the least that each is known to take, and the batches that they have ready."""
    meter, kind = gpu.host.meter, _MultiProcessingDataLoaderIter
    begin, process = kind.__init__, kind._process_data
    ready: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders whose batches are counted

    def started(loader: Any, *args: Any, **kwargs: Any) -> None:
        begin(loader, *args, **kwargs)
        gpu.loaders.add(loader)
        meter.processes(loader._num_workers)
        weakref.finalize(loader, meter.processes, -loader._num_workers).atexit = False

    def processed(loader: Any, data: Any, *args: Any) -> Any:
        batch = process(loader, data, *args)
        if loader not in ready:
            ready.add(loader)
            nbytes = sum(leaf.nbytes for leaf in _tensors(batch)) * loader._num_workers * loader._prefetch_factor
            if nbytes:
                weakref.finalize(loader, meter.free, meter.allocate(nbytes, "workers")).atexit = False
        return batch

    patches.set_all(kind, {"__init__": started, "_process_data": processed})


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    data = getattr(batch, "data", batch)  # BatchEncoding keeps its dict there
    return (leaf for leaf in tree_leaves(data if isinstance(data, dict) else batch) if isinstance(leaf, torch.Tensor))
