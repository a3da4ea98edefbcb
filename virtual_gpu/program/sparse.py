"""Sparse tensors (COO) on a virtual GPU: their indices and values are tensors of their own, and are counted as these.

PyTorch's rules of shapes know such a tensor, and lose its entries in most of what is made of it: here it is made of its
parts. What is not in `_KERNELS` is refused by name. Entries at the same place become one on a card (`coalesce`); which
are is a matter of values, so all stay: the most that there can be. What cuSPARSE and thrust take for themselves (the
buffer of a product, a sort's) is not counted: no source states it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..language import tr
from . import known

_aten = torch.ops.aten
_MAKE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_TO_SPARSE = _aten._to_sparse
_MAKES = frozenset((_MAKE, _TO_SPARSE.default, _TO_SPARSE.sparse_dim))
_OF_BAGS = _aten._embedding_bag_backward.default
_PARTS = frozenset(
    getattr(_aten, name)
    for name in ("_indices", "_values", "_nnz", "is_coalesced", "_coalesced_", "sparse_dim", "dense_dim", "detach",
                 "alias", "zero_", "sym_size", "sym_numel", "_dimI", "_dimV")
    if hasattr(_aten, name)
)  # fmt: skip
_ON_VALUES = frozenset(
    getattr(_aten, name) for name in ("clone", "_to_copy", "mul", "div", "neg", "abs", "sqrt", "pow", "sin", "tanh")
)


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse tensor on a virtual GPU."""
    return type(value) is FakeTensor and value.layout is torch.sparse_coo


def among(args: tuple) -> bool:
    """Whether one of an operation's arguments is such a tensor."""
    return any(is_sparse(one) or (isinstance(one, (list, tuple)) and any(map(is_sparse, one))) for one in args)


def makes(func: Any, args: tuple) -> bool:
    """Whether an operation makes such a tensor of dense ones."""
    return func in _MAKES or (func is _OF_BAGS and args[_SPARSE])


class Sparse:
    """What operations on sparse tensors do on a mode's card."""

    def __init__(self, mode: Any):
        self._mode = mode
        self.met = False  # whether there was any

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The operation. NotImplementedError where its memory on a card is not known here."""
        self.met = True
        packet = func.overloadpacket
        if packet is _TO_SPARSE:
            return self._from_dense(func, args, kwargs)
        if func is _OF_BAGS:
            with self._mode:
                return _backward_of_bags(*args)
        if func is _MAKE or packet in _PARTS:
            return self._bare(func, args, kwargs)
        kernel = _KERNELS.get(packet)
        if kernel is None and packet in _ON_VALUES:
            kernel = functools.partial(_on_values, func)
        if kernel is None:
            raise NotImplementedError(f"{func} of a sparse tensor on a virtual GPU")
        with self._mode:
            return kernel(self, *args, **kwargs)

    def _from_dense(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        """Of known values; `ValueStop` where it is not known which are zero."""
        if (real := known.values_of(args[0])) is None:
            raise self._mode.values.stop(
                tr(ko=f"0이 아닌 값이 몇 개인지를 묻는다({func})", en=f"{func} asks which numbers are not zero")
            )
        return self._mode._upload(func(real, *args[1:], **kwargs), {})

    def make(
        self, size: Any, indices: torch.Tensor, values: torch.Tensor, coalesced: bool, device: Any = None
    ) -> torch.Tensor:
        """A sparse tensor of these parts, which are on that device; None: on the card whose operation runs."""
        self.met = True
        dense = values.dim() - 1
        return self._bare(
            _MAKE,
            (len(size) - dense, dense, list(size), indices, values),
            {"dtype": values.dtype, "layout": torch.sparse_coo, "device": device or self._mode.gpu.here,
             "pin_memory": False, "is_coalesced": coalesced},
        )  # fmt: skip

    def become(self, tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Give a tensor the parts of one that was just made and goes: PyTorch's rule copies them, a card does not."""
        self._bare(_aten.copy_sparse_to_sparse_.default, (tensor, made), {})
        del made
        for part in _parts(tensor):
            self._mode.count(part)
        return tensor

    def _bare(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """By PyTorch's rule of shapes, with nothing counted: the parts are."""
        with self._mode, self._mode.uncounted():
            return func(*args, **kwargs)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor._indices(), tensor._values()


def _on_values(func: Any, card: Sparse, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """By a number, of another type, or on another card: a copy of the indices.

    Source: aten/src/ATen/native/sparse/SparseTensorMath.cpp, copy_sparse_to_sparse_ in SparseTensor.cpp.
    """
    if any(isinstance(one, torch.Tensor) and one.dim() for one in args) or not is_sparse(tensor):
        raise NotImplementedError(f"{func} of a sparse tensor and another on a virtual GPU")
    kwargs.pop("layout", None)
    indices, values = _parts(tensor)
    device = kwargs.get("device")
    indices = indices.clone() if device is None else indices.to(device, copy=True)
    return card.make(tensor.shape, indices, func(values, *args, **kwargs), tensor.is_coalesced(), device)


def _backward_of_bags(*args: Any) -> torch.Tensor:
    """What EmbeddingBag(sparse=True) has for a gradient: PyTorch's own, made of operations that are counted.

    Source: _embedding_bag_backward_symint in aten/src/ATen/native/EmbeddingBag.cpp.
    """
    gradient, indices, offsets, bags, *others = args
    if not bags.numel():  # of each index the bag: the CPU's shortcut for sums has none, CUDA's forward always
        bags = torch.empty_like(indices)
    sizes, _, weights, by_frequency, mode, _, *rest = others
    return _aten._embedding_bag_sparse_backward(
        gradient, indices, offsets, bags, sizes, weights, by_frequency, mode, *rest
    )


_SPARSE = 9  # which of its arguments says so


def _coalesce(card: Sparse, tensor: torch.Tensor) -> torch.Tensor:
    """Source: _coalesce_sparse_cuda in aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu."""
    indices, values = _parts(tensor)
    flat, places, offsets = (indices.new_empty(indices.shape[1]) for _ in range(3))
    again = torch.empty_like(values, memory_format=torch.contiguous_format)
    new = flat.unsqueeze(0) if len(indices) == 1 else torch.empty_like(indices)
    del places, offsets
    return card.make(tensor.shape, new, again, True)


def _transpose(card: Sparse, tensor: torch.Tensor, one: int = 0, other: int = 1) -> torch.Tensor:
    """Source: transpose in aten/src/ATen/native/TensorShape.cpp: a clone, whose rows of indices are swapped."""
    size = list(tensor.shape)
    size[one], size[other] = size[other], size[one]
    indices, values = _parts(tensor)
    return card.make(size, indices.clone(), values.clone(), False)


def _product(card: Sparse, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **_: Any) -> torch.Tensor:
    """Source: s_addmm_out_sparse_dense_cuda in aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu."""
    if not is_sparse(left) or is_sparse(right) or is_sparse(added):
        raise NotImplementedError("a product of two sparse tensors, or with one on the right, on a virtual GPU")
    rows, columns = left.shape[0], right.shape[1]
    out = right.new_empty((rows, columns))
    merged = left if left.is_coalesced() else _coalesce(card, left)
    indices = merged._indices()
    compressed = indices.new_empty(rows + 1, dtype=torch.int32)
    indices[0].to(torch.int32)
    places = indices[1].to(torch.int32)
    by_columns = right.new_empty((columns, rows))
    dense = right.contiguous()
    del merged, indices, compressed, places, by_columns, dense
    return out


def _mm(card: Sparse, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Source: _sparse_mm in aten/src/ATen/native/sparse/SparseTensorMath.cpp: added to zeros."""
    return _product(card, right.new_zeros((left.shape[0], right.shape[1])), left, right)


def _add_(card: Sparse, one: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    """Into a dense tensor: add_out_dense_sparse_cuda in SparseCUDATensorMath.cu. Into a sparse one: as `_add`."""
    if is_sparse(one):
        return card.become(one, _add(card, one, other))
    indices = other._indices()
    flat = None if other.is_coalesced() or len(indices) == 1 else indices.new_empty(indices.shape[1])
    one.mul_(1)  # its numbers are others now
    del flat
    return one


def _add(card: Sparse, one: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    """Two sparse ones have the entries of both (add_out_sparse_cuda)."""
    if not is_sparse(one):
        return _add_(card, one.clone(), other)
    if not is_sparse(other):
        raise NotImplementedError("a dense tensor added to a sparse one on a virtual GPU")
    (indices, values), (more, others) = _parts(one), _parts(other)
    return card.make(one.shape, torch.cat([indices, more], 1), torch.cat([values, others]), False)


def _to_dense(card: Sparse, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Zeros, to which it is added (sparse_to_dense in aten/src/ATen/native/TensorConversions.cpp)."""
    return _add_(card, tensor._values().new_zeros(tensor.shape), tensor)


def _mask(card: Sparse, dense: torch.Tensor, mask: torch.Tensor, *_: Any) -> torch.Tensor:
    """A tensor's numbers at the places of a sparse one."""
    indices, values = _parts(mask)
    return card.make(
        mask.shape, indices.clone(), values.new_empty(values.shape, dtype=dense.dtype), mask.is_coalesced()
    )


_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten._coalesce: _coalesce, _aten.t: _transpose, _aten.transpose: _transpose, _aten.mm: _mm,
    _aten.addmm: _product, _aten._sparse_addmm: _product, _aten.add_: _add_, _aten.add: _add,
    _aten._to_dense: _to_dense, _aten.sparse_mask: _mask,
}  # fmt: skip
