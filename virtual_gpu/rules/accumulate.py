"""Sums in backward that are made in place, unless somebody watches.

Autograd adds a gradient to another in place, and derivatives fill fresh zeros in place, but neither for tensors that
are "subclass-like": fake tensors are, and so is every tensor while a dispatch mode is active. A card that is not
watched makes no new tensor there.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.utils._python_dispatch import _disable_current_modes

from .registry import Rule

_aten = torch.ops.aten
_OPERATORS = (
    _aten.add.Tensor,
    _aten.index_put.default,
    _aten.index_add.default,
    _aten.put.default,
    _aten.scatter.src,
    _aten.scatter_add.default,
)
_OURS = str(Path(__file__).parent.parent)
_ENGINE = graph._engine_run_backward.__code__


def _in_place(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """The first operand as its own sum, where nothing but this backward holds it; else what the operation gives."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return run()
    if not _autograds_own():
        return run()
    if op is _aten.add.Tensor and (args[0].shape, args[0].dtype) != (args[1].shape, args[1].dtype):
        return run()
    if not dense(args[0]) or _holders(args) != references_alone()[op]:
        return run()
    return args[0]


def _autograds_own() -> bool:
    """Whether C++ asks: the frame of a backward that is written in Python would lie between."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code is _ENGINE


def dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie each once and without gaps, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _holders(args: tuple) -> tuple[int, int, int]:
    """References to the first operand: from C++, from Python, to its storage."""
    storage = args[0].untyped_storage()
    return args[0]._use_count(), sys.getrefcount(args[0]), torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def references_alone() -> dict[Any, tuple[int, int, int]]:
    """operator → the references to an operand that nothing but autograd's buffer holds, seen in a backward made for it.

    How often the layers between count it depends on the operator and on the version of PyTorch and of Python.
    """
    seen: dict[Any, tuple[int, int, int]] = {}

    class Probe(FakeTensorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in _OPERATORS and not torch.is_grad_enabled():
                seen.setdefault(func, _holders(args))
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), Probe():
        x = torch.empty(2, 2, requires_grad=True)
        index = torch.empty(2, 1, dtype=torch.int64)
        selected = x.index_select(0, index[:, 0]), x.take(index)
        for y in (x.exp() + x.sin(), x[index[:, 0]], x.max(-1, keepdim=True)[0], x.gather(1, index), *selected):
            y.backward(torch.empty(y.shape))
    return seen


IN_PLACE = Rule(
    name="accumulate_in_place",
    what="gradients that meet are added in place, fresh zeros are filled in place",
    source="InputBuffer::accumulate in torch/csrc/autograd/input_buffer.cpp; areAnyTensorSubclassLike in "
    "index_backward, index_select_backward, take_backward, gather_backward, value_selecting_reduction_backward",
    operators=dict.fromkeys(_OPERATORS, _in_place),
)
