"""Values that are known after all: tensors of the program's own data, integer and bool ones and small float ones.

Token ids, labels, masks and lengths are real until they are moved to the GPU. Their values are kept beside the fake
tensor, and what is computed from nothing else is computed on them too. So padding is where it is, `mask.all()` is the
truth, and a tensor can be indexed by such a mask. What a float takes part in is not known; but an `or` with what is
all True is True, and an `and` with what is all False is False, whatever the other side is: so `generate` ends.
Of floats what the program moved to the GPU is known where it is little (a detector's boxes, with the number of their
picture and class) or a mask, a matrix of zeros and ones, and what is computed from it and other known values. So peft's
prompts are masked: it puts float ones before a mask of integers.
Which experts a router takes is assumed (`routing`), and what follows from that is marked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map

_aten = torch.ops.aten
LIMIT = 2**22  # elements: the labels of a batch of pictures, a graph's edges
FLOATS, MASKS = 2**14, 2**18  # elements of what came, of what is a mask or computed
ASSUMED_LIMIT = 2**23  # of what follows from an assumption: the experts of 4,096 tokens, one-hot, are half of this
DTYPES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
_OR_MASKS = DTYPES | {torch.float32}
_UNDEFINED = frozenset((_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided))
_SHAPE_ONLY = frozenset(
    getattr(_aten, name) for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
_ZEROS = frozenset((_aten.zeros, _aten.new_zeros, _aten.zeros_like))  # which experts are counted, or marked, in
# Their running mean and variance, the fourth and fifth argument, are written, and their schemas do not say so.
_STATISTICS = frozenset((_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default))
_RANDOM = torch.Tag.nondeterministic_seeded
# of boolean values (0 alone for integers): the operand that decides the result, whatever the other one is
_DECIDES = {
    _aten.bitwise_or.Tensor: 1,
    _aten.logical_or.default: 1,
    _aten.bitwise_and.Tensor: 0,
    _aten.logical_and.default: 0,
}


class Unknown(Exception):
    """Some value is not known."""


class _Values:
    """Real values; the views of one tensor share `valid`, which ends with a write of something unknown.

    assumed: they rest on an assumption (`routing`), of which is said where they are used.
    """

    __slots__ = ("assumed", "real", "valid")

    def __init__(self, real: torch.Tensor, valid: list[bool], assumed: bool = False):
        self.real, self.valid, self.assumed = real, valid, assumed


def know(fake: torch.Tensor, real: torch.Tensor) -> None:
    """These are the values of a tensor that was just made from a real one; larger and other ones are not kept."""
    if real.device.type == "cpu" and (_is_data(real) if fake.is_floating_point() else _fits(fake.dtype, real)):
        kept = torch.empty_like(
            real, dtype=fake.dtype, requires_grad=False
        )  # not by `to`: it is not the program's copy
        fake.known = _Values(kept.copy_(real.detach()), [True])


def give(fake: torch.Tensor, real: torch.Tensor, assumed: bool = False) -> None:
    """These are from now on the values of a tensor. Not of a part of one whose other values are not known."""
    known = values_of(fake) is not None
    if not _fits(fake.dtype, real, assumed) or (fake._base is not None and not known):
        forget(fake)
    elif known:
        fake.known.real.copy_(real)
        fake.known.assumed |= assumed
    else:
        fake.known = _Values(real.to(fake.dtype).contiguous(), [True], assumed)


def is_assumed(*values: Any) -> bool:
    """Whether any of these, or of what is in them, rests on an assumption."""
    found = (getattr(value, "known", None) for value in tree_flatten(values)[0])
    return any(known is not None and known.assumed and known.valid[0] for known in found)


def _most(dtype: torch.dtype, assumed: bool) -> int:
    """Elements of a tensor of that type whose values are kept; 0 for other types."""
    if dtype not in _OR_MASKS:
        return 0
    return ASSUMED_LIMIT if assumed else MASKS if dtype.is_floating_point else LIMIT


def _fits(dtype: torch.dtype, real: torch.Tensor, assumed: bool = False) -> bool:
    return real.numel() <= _most(dtype, assumed)


def forget(fake: torch.Tensor) -> None:
    """The values of a tensor, and of its views, are not known any more."""
    if (known := getattr(fake, "known", None)) is not None:
        known.valid[0] = False


def _is_data(real: torch.Tensor) -> bool:
    """Whether a tensor of floats is little, or a matrix of zeros and ones; not where it is a parameter."""
    if real.dtype not in _OR_MASKS or real.requires_grad or isinstance(real, torch.nn.Parameter):
        return False
    if real.numel() <= FLOATS:
        return True
    return real.dim() == 2 and real.numel() <= MASKS and bool(((real == 0) | (real == 1)).all())


def concerns(args: tuple, out: Any) -> bool:
    """Whether anything may be known of what an operation made, or of what it wrote over."""
    if type(out) is not FakeTensor or out.dtype in DTYPES:
        return True
    first = args[0] if args else None
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    return type(first) is FakeTensor and "known" in first.__dict__


def values_of(tensor: Any) -> torch.Tensor | None:
    """The values of a tensor, where they are known."""
    known = getattr(tensor, "known", None)
    return known.real if known is not None and known.valid[0] else None


def follow(func: Any, args: tuple, kwargs: dict, out: Any) -> None:
    """After an operation: know the values of what it made from known ones, forget those that it wrote over."""
    writes = func._schema.is_mutable or func in _STATISTICS
    if isinstance(out, torch.Tensor):
        may_be_known = out.dtype in _OR_MASKS
    else:
        several = isinstance(out, (tuple, list)) and bool(out)
        may_be_known = several and isinstance(out[0], torch.Tensor) and out[0].dtype in DTYPES
    if not may_be_known:
        for tensor in _written(func, args, kwargs) if writes else ():  # a batch norm's running mean, foreach
            forget(tensor)
        return
    try:
        if _RANDOM in func.tags or func.overloadpacket in _UNDEFINED:
            raise Unknown
        results = run(func, args, kwargs)
    except Unknown:
        if writes:
            for tensor in _written(func, args, kwargs):
                forget(tensor)
        elif func in _DECIDES and any(_is_all(value, _DECIDES[func]) for value in args):
            know(out, torch.full((), _DECIDES[func], dtype=out.dtype).expand(out.shape))
        return
    assumed = is_assumed(args, kwargs)
    if writes:
        for tensor in _written(func, args, kwargs) if assumed else ():
            tensor.known.assumed = True
        return
    tokens = {
        known.real.untyped_storage()._cdata: known.valid
        for known in (getattr(value, "known", None) for value in tree_flatten((args, kwargs))[0])
        if known is not None
    }
    counted = func.overloadpacket in _ZEROS
    for fake, real in zip(*(tree_flatten(value)[0] for value in (out, results)), strict=True):
        if isinstance(fake, torch.Tensor) and _fits(fake.dtype, real, assumed or counted):
            fake.known = _Values(real, tokens.get(real.untyped_storage()._cdata, [True]), assumed)


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The tensors that an operation writes into."""
    if func in _STATISTICS:
        return [tensor for tensor in args[3:5] if tensor is not None]
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return tree_flatten(written)[0]


def _is_all(value: Any, number: int) -> bool:
    real = values_of(value)
    return real is not None and (not number or real.dtype == torch.bool) and bool((real == number).all())


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operation on the real values. Unknown where one of them is not known, or where it would be large work."""
    assumed = is_assumed(args, kwargs)

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found = values_of(value) if type(value) is FakeTensor else value
            if found is None or not _fits(found.dtype, found, assumed):
                raise Unknown
            return found
        return torch.device("cpu") if isinstance(value, torch.device) else value

    if func.overloadpacket in _SHAPE_ONLY:
        args = (torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
        return func(*args, **tree_map(real, kwargs))
    args, kwargs = tree_map(real, args), tree_map(real, kwargs)
    if not tree_flatten((args, kwargs))[0]:
        raise Unknown
    return func(*args, **kwargs)
