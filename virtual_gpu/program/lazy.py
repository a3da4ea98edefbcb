"""Lazy modules (`nn.LazyLinear`, PyG's layers with in_channels=-1): parameters without a shape until the first forward.

PyTorch moves such a parameter to a device by its `data`, which a fake tensor cannot be. Here it stays where it is, with
a note of where it is to go, and is made there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin, is_lazy

from .device import ProgramGPU
from .patches import Patches


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Let modules with such parameters move to the virtual GPU, and the parameters be made there."""
    move, make = torch.nn.Module._apply, UninitializedTensorMixin.materialize

    def apply(module: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        held = [module._parameters, module._buffers]
        lazy = [{name: tensor for name, tensor in some.items() if is_lazy(tensor)} for some in held]
        if not any(lazy):
            return move(module, fn, recurse)
        orders = [[*some] for some in held]
        for some, without in zip(held, lazy, strict=True):
            for name, tensor in without.items():
                tensor.goes_to = fn(torch.empty(0, dtype=tensor.data.dtype))
                del some[name]
        try:
            return move(module, fn, recurse)
        finally:
            for some, without, order in zip(held, lazy, orders, strict=True):
                values = {**some, **without}
                some.clear()
                some.update({name: values[name] for name in order})

    def materialize(tensor: Any, shape: Sequence[int], device: Any = None, dtype: torch.dtype | None = None) -> None:
        there = getattr(tensor, "goes_to", None)
        device = (None if there is None else there.device) if device is None else torch.device(device)
        if device is None or device.type != "cuda":
            make(tensor, shape, device, dtype)
            return
        made = torch.empty(shape, device=device, dtype=dtype or (tensor.data if there is None else there).dtype)
        if isinstance(tensor, torch.nn.Parameter):
            gpu.watch.claim([made], "parameters")
            made = torch.nn.Parameter(made, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)

    patches.set(torch.nn.Module, "_apply", apply)
    patches.set(UninitializedTensorMixin, "materialize", materialize)
