"""What an operation on fake tensors gives, remembered: the same shapes in, the same shapes out.

PyTorch's own cache of this kind spends most of its time on its key. Ours knows less: strided tensors of one fake mode,
operations of `_LIBRARIES`. What it does not know is run by PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from ..rules.registry import overload

_NUMBERS = frozenset((int, float))
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))

# Whose outputs PyTorch's C++ tells on meta tensors as on a card: structured kernels, and views. A fake-tensor mode asks
# Python first, by decompositions, which takes five to twenty times as long.
_NAMES = (
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy", "_unsafe_view",
    "add.Tensor", "addmm", "baddbmm", "bmm", "cat", "clone", "cos", "cumsum", "div.Scalar", "div.Tensor",
    "eq.Scalar", "exp", "expand", "gelu", "gelu_backward", "index_select", "mean.dim", "mm", "mul.Scalar",
    "mul.Tensor", "native_layer_norm_backward", "ne.Scalar", "neg", "nll_loss_backward", "nll_loss_forward",
    "permute", "pow.Tensor_Scalar", "relu", "rsqrt", "select.int", "sigmoid", "sigmoid_backward", "silu",
    "silu_backward", "sin", "slice.Tensor", "slice_backward", "split.Tensor", "split_with_sizes", "sqrt",
    "squeeze.dim", "sub.Tensor", "sum.dim_IntList", "t", "tanh", "tanh_backward", "threshold_backward",
    "transpose.int", "unsqueeze", "view",
)  # fmt: skip
_LIBRARIES = ("aten", "bitsandbytes")  # of whose fake outputs the key says all; what kernels take, `rules` knows
_IN_ONE_STEP = frozenset(op for name in _NAMES if (op := overload(name)) is not None)


_gives: dict[int, bool] = {}  # id of an operation → whether it gives anything
_DEVICE = "_fake_device"  # where a fake tensor keeps its device in PyTorch 2.13, behind a property


def device_of(fake: FakeTensor) -> torch.device:
    """The device that a fake tensor is said to lie on."""
    return fake.__dict__.get(_DEVICE) or fake.fake_device


class FakeOutputs:
    """Runs operations, and makes their outputs itself where it has seen the operation with such inputs before.

    The key is all that an output's metadata can depend on. An output is made again as what it was: an input itself, a
    view of an input, or a tensor with a storage of its own. What is not one of these is not remembered, nor are
    operations that change their inputs' metadata or raise. It holds at most `limit` entries of keys, then starts anew.
    """

    def __init__(self, limit: int = 2**19):
        self.limit = limit
        self.held = 0
        self.recipes: dict[tuple, tuple] = {}

    def __call__(
        self, mode: FakeTensorMode, func: Any, args: Sequence, kwargs: dict, run: Callable[[], tuple[Any, bool]]
    ) -> Any:
        """The outputs of func(*args, **kwargs) under the mode.

        `run` finds them where they are not known, and says whether they may be.
        """
        key, tensors = _start(func), []
        if not _described(mode, func, args, kwargs, key, tensors):
            return run()[0]
        recipe = self.recipes.get(key := tuple(key))
        if recipe is not None:
            return _make(mode, recipe, tensors)
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        here = func in _IN_ONE_STEP and "device" not in kwargs and len({tensor.fake_device for tensor in tensors}) == 1
        if here:
            out, may_be_known = _in_one_step(mode, func, args, kwargs, tensors[0].fake_device), True
        else:
            out, may_be_known = run()
        recipe = _recipe(mode, func, out, tensors, storages) if may_be_known else None
        if recipe is not None:
            again = _start(func)
            if _described(mode, func, args, kwargs, again, []) and tuple(again) == key:
                self._remember(key, recipe)
        return out

    def known(self, mode: FakeTensorMode, func: Any, args: Sequence, kwargs: dict) -> Any:
        """The outputs of func(*args, **kwargs) where they are known; None where not, or where they are None."""
        key, tensors = _start(func), []
        if _described(mode, func, args, kwargs, key, tensors):
            recipe = self.recipes.get(tuple(key))
            if recipe is not None:
                return _make(mode, recipe, tensors)
        return None

    def _remember(self, key: tuple, recipe: tuple) -> None:
        if self.held + len(key) > self.limit:
            self.recipes.clear()
            self.held = 0
        if len(key) <= self.limit:
            self.recipes[key] = recipe
            self.held += len(key)


def _start(func: Any) -> list:
    """How a key begins. By its address: such an operation is never freed, and its hash is a function of Python's."""
    return [id(func), torch.get_default_dtype()]


def _described(
    mode: FakeTensorMode, func: Any, args: Sequence, kwargs: dict, key: list, tensors: list[FakeTensor]
) -> bool:
    """Append what is to be known of an operation's arguments to the key; False where they are unknown.

    Of one that gives nothing, an optimizer's step, numbers say nothing: a rate and a step are others each time.
    """
    if (numbers := _gives.get(id(func))) is None:
        numbers = _gives[id(func)] = bool(func._schema.returns)
    return _describe(mode, args, key, tensors, numbers) and (
        not kwargs or _describe(mode, kwargs.items(), key, tensors, numbers)
    )


def _describe(mode: FakeTensorMode, values: Any, key: list, tensors: list[FakeTensor], numbers: bool = True) -> bool:
    """Append what is to be known of the values to the key, and the tensors among them to `tensors`; False: unknown."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            dtype, own = value.dtype, value.__dict__
            if own["constant"] is not None or dtype.is_complex:  # PyTorch calculates with a value that is known
                return False
            if own.get("plain_of") is not mode and (
                value.fake_mode is not mode
                or value.layout is not torch.strided
                or value.is_neg()
                or value.is_inference()
            ):
                return False
            key += (dtype, own.get(_DEVICE) or value.fake_device, value.storage_offset(), value.shape, value.stride())
            tensors.append(value)
        elif kind in _PLAIN:
            key += (kind, value if numbers or kind not in _NUMBERS else None)  # 1, 1.0 and True are equal
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _describe(mode, value, key, tensors, numbers):
                return False
        else:
            return False
    return True


def _in_one_step(mode: FakeTensorMode, func: Any, args: Sequence, kwargs: dict, device: torch.device) -> Any:
    """What a fake-tensor mode does last, for inputs and outputs of one device."""
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return fake_tensor(mode, out, device)
    return type(out)(item if item is None else fake_tensor(mode, item, device) for item in out)


def _recipe(mode: FakeTensorMode, func: Any, out: Any, tensors: list[FakeTensor], storages: list[int]) -> tuple | None:
    """(list or tuple or None, parts): how to make `out` again from such inputs; None where that is not certain.

    A part is None, the index of the input that it is, or (index of the input that it is a view of, metadata).
    """
    if func.namespace not in _LIBRARIES or torch.Tag.inplace_view in func.tags:
        return None
    if storages != [tensor.untyped_storage()._cdata for tensor in tensors]:
        return None
    itself = {id(tensor): index for index, tensor in enumerate(tensors)}
    owner = {storage: index for index, storage in enumerate(storages)}
    kind = list if isinstance(out, list) else tuple if isinstance(out, tuple) else None
    parts, new = [], []
    for item in [out] if kind is None else out:
        if item is None:
            parts.append(None)
        elif id(item) in itself:
            parts.append(itself[id(item)])
        elif type(item) is FakeTensor and not item.requires_grad and _describe(mode, [item], [], []):
            base = owner.get(item.untyped_storage()._cdata)
            place = item.storage_offset(), item.shape, item.stride()
            parts.append((base, place, item.dtype, item.fake_device))
            if base is None:
                new.append(item)
        else:
            return None
    if len({item.untyped_storage()._cdata for item in new}) < len(new):
        return None  # they share one
    for item in new:  # offset zero, and no byte more than it needs
        alike = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
        if item.storage_offset() or item.untyped_storage().nbytes() != alike.untyped_storage().nbytes():
            return None
    return kind, tuple(parts)


def _make(mode: FakeTensorMode, recipe: tuple, tensors: list[FakeTensor]) -> Any:
    kind, parts = recipe
    made = []
    for part in parts:
        if part is None:
            made.append(None)
        elif type(part) is int:
            made.append(tensors[part])
        else:
            base, (offset, shape, stride), dtype, device = part
            if base is None:
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                meta = torch.empty(0, dtype=dtype, device="meta")
                meta.set_(tensors[base].untyped_storage(), offset, shape, stride)
            made.append(fake_tensor(mode, meta, device))
    return made[0] if kind is None else kind(made)


def fake_tensor(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """What FakeTensor(mode, meta, device) is, but for the questions that it asks anew each time.

    meta: strided, negates nothing, made outside inference mode: that is noted (`plain_of`), and not asked again.
    """
    attributes = mode.__dict__.setdefault("_attributes_on", {})
    if device not in attributes:
        fake = FakeTensor(mode, torch.empty(0, device="meta"), device)
        attributes[device] = {**fake.__dict__, "plain_of": mode}
    fake = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(attributes[device])
    return fake
