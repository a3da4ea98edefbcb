"""Names from before PyTorch 0.4 that programs still use: `torch.cuda.FloatTensor`, `Tensor.type`, `Tensor.new`.

A PyTorch without CUDA has types of those names that raise; a card's are (torch/csrc/tensor/python_tensor.cpp) what is
called for a tensor, what `isinstance` is asked, and what `type` takes and names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .device import ProgramGPU
from .patches import Patches

NAMES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
_NAME_OF = {dtype: name for name, dtype in NAMES.items()}


class _Kind(type):
    """The type of `torch.cuda.FloatTensor` and its like."""

    dtype: torch.dtype

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.dtype

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        return _made(cls.dtype, "cuda" if device is None else device, *args)


def _made(dtype: torch.dtype, device: Any, *args: Any) -> torch.Tensor:
    """The old constructor: of sizes a tensor with whatever lies there, of a sequence or an array with its values."""
    if len(args) == 1 and isinstance(args[0], torch.Tensor):
        return args[0].to(device, dtype)
    if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
        return torch.tensor(args[0], dtype=dtype, device=device)
    sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args or (0,)
    return torch.empty(tuple(sizes), dtype=dtype, device=device)


def install(patches: Patches, gpu: ProgramGPU) -> None:
    """Let these names make, ask for and name the virtual GPU's tensors."""
    kinds = {f"torch.cuda.{name}": _Kind(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
             for name, dtype in NAMES.items()}  # fmt: skip
    on_cpu = {getattr(torch, name): dtype for name, dtype in NAMES.items()}
    by_name: dict[Any, Any] = {f"torch.{name}": getattr(torch, name) for name in NAMES} | kinds
    type_of, by_default = torch.Tensor.type, torch.set_default_tensor_type

    def ours(tensor: Any) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_mode is gpu.mode

    def typed(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **more: Any) -> Any:
        kind = by_name.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if kind is None and ours(tensor) and tensor.dtype in _NAME_OF:
            return f"torch.cuda.{_NAME_OF[tensor.dtype]}"
        if isinstance(kind, _Kind):
            return tensor.to("cuda", kind.dtype, non_blocking=non_blocking)
        if ours(tensor) and kind in on_cpu:
            return tensor.to("cpu", on_cpu[kind])
        return type_of(tensor) if kind is None else type_of(tensor, kind, non_blocking=non_blocking, **more)

    def new(like: torch.Tensor, *args: Any, device: Any = None) -> torch.Tensor:
        if like.layout is torch.sparse_coo and args and isinstance(args[0], torch.Tensor):  # SparseAdam asks so
            return torch.sparse_coo_tensor(*args, dtype=like.dtype)
        return _made(like.dtype, like.device if device is None else device, *args)

    def set_default_tensor_type(kind: Any) -> None:
        kind = by_name.get(kind, kind) if isinstance(kind, str) else kind
        if not isinstance(kind, _Kind):
            by_default(kind)
            return
        torch.set_default_dtype(kind.dtype)
        torch.set_default_device("cuda")

    for name, kind in kinds.items():
        patches.set(torch.cuda, name.rpartition(".")[2], kind)
    patches.set(torch.Tensor, "type", typed)
    patches.set(FakeTensor, "new", new)
    patches.set(FakeTensor, "share_memory_", lambda tensor: tensor)  # of a card's tensors all are (torch/_tensor.py)
    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)
