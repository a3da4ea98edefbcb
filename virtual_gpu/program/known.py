"""Values that are known after all: tensors of the program's own data, integer and bool ones and small float ones.

Token ids, labels, masks and lengths are real until they are moved to the GPU. Their values are kept beside the fake
tensor, and what is computed from nothing else is computed on them too. So padding is where it is, `mask.all()` is the
truth, and a tensor can be indexed by such a mask. What a float takes part in is not known; but an `or` with what is
all True is True, and an `and` with what is all False is False, whatever the other side is: so `generate` ends.
Of floats what the program moved to the GPU is known where it is little (a detector's boxes, with the number of their
picture and class) or a mask, a matrix of zeros and ones, and what is computed from it and other known values. So peft's
prompts are masked: it puts float ones before a mask of integers.
What the program draws on the GPU (`rand`, `randint`, `randperm`) is drawn: other numbers than a card's, as likely.
Which experts a router takes is assumed (`routing`), and what follows from that is marked.
"""

from __future__ import annotations

import functools
import weakref
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
_FILLED = frozenset((_aten.zeros, _aten.ones, _aten.full, _aten.arange, _aten.linspace))  # floats that a program writes
_FILL = _aten.fill_.Tensor
_ZEROS = frozenset((_aten.zeros, _aten.new_zeros, _aten.zeros_like))  # which experts are counted, or marked, in
# Their running mean and variance, the fourth and fifth argument, are written, and their schemas do not say so.
_STATISTICS = frozenset((_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default))
DRAWN = frozenset((_aten.rand, _aten.randint, _aten.randperm, _aten.bernoulli))
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


class _Token:
    """Whether what is known of a storage still holds: it ends with a write of something unknown, through any alias."""

    __slots__ = ("__weakref__", "valid")

    def __init__(self) -> None:
        self.valid = True


# By the address of the storage, as long as a tensor is known that lies in it: so it is not another's meanwhile.
_tokens: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()


def _token_of(fake: torch.Tensor, anew: bool = False) -> _Token:
    key = fake.untyped_storage()._cdata
    token = None if anew else _tokens.get(key)
    if token is None or not token.valid:
        token = _tokens[key] = _Token()
    return token


class _Values:
    """Real values, with the strides of the tensor that has them; views of one tensor share their storage and `token`.

    assumed: they rest on an assumption (`routing`), of which is said where they are used.
    """

    __slots__ = ("assumed", "real", "token")

    def __init__(self, real: torch.Tensor, token: _Token, assumed: bool = False):
        self.real, self.token, self.assumed = real, token, assumed


def _laid_out_as(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A copy of these values with the strides of the fake tensor. Not by `to`: it is not the program's copy."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(real.detach())


def know(fake: torch.Tensor, real: torch.Tensor) -> None:
    """These are the values of a tensor that was just made from a real one; larger and other ones are not kept.

    Nor those of two tensors in one storage, as they come from a file: neither would hear of a write through the other.
    """
    if fake.untyped_storage()._cdata in _tokens:
        forget(fake)
    elif real.device.type == "cpu" and (_is_data(real) if fake.is_floating_point() else _fits(fake.dtype, real)):
        fake.known = _Values(_laid_out_as(fake, real), _token_of(fake))


def give(fake: torch.Tensor, real: torch.Tensor, assumed: bool = False) -> None:
    """These are from now on the values of a tensor. Not of a part of one whose other values are not known."""
    known = values_of(fake) is not None
    if not _fits(fake.dtype, real, assumed) or (fake._base is not None and not known):
        forget(fake)
    elif known:
        fake.known.real.copy_(real)
        fake.known.assumed |= assumed
    else:
        fake.known = _Values(_laid_out_as(fake, real), _token_of(fake, anew=True), assumed)


def draw(func: Any, args: tuple, fake: torch.Tensor, generator: torch.Generator) -> None:
    """Give what an operation of DRAWN drew its numbers, where they are few enough to be kept."""
    if func.overloadpacket not in DRAWN or fake.numel() > _most(fake.dtype, False):
        return
    if func.overloadpacket is _aten.bernoulli:  # of its chances: those of a tensor, or one for all
        chances = torch.full(fake.shape, args[1]) if len(args) > 1 else values_of(args[0])
        if chances is None:
            return
        args = (chances.to(fake.dtype),)
    draws = getattr(torch, func.overloadpacket.__name__)
    give(fake, draws(*args, generator=generator))


def is_assumed(*values: Any) -> bool:
    """Whether any of these, or of what is in them, rests on an assumption."""
    found = (getattr(value, "known", None) for value in tree_flatten(values)[0])
    return any(known is not None and known.assumed and known.token.valid for known in found)


def _most(dtype: torch.dtype, assumed: bool) -> int:
    """Elements of a tensor of that type whose values are kept; 0 for other types."""
    if dtype not in _OR_MASKS:
        return 0
    return ASSUMED_LIMIT if assumed else MASKS if dtype.is_floating_point else LIMIT


def _fits(dtype: torch.dtype, real: torch.Tensor, assumed: bool = False) -> bool:
    return real.numel() <= _most(dtype, assumed)


def forget(fake: torch.Tensor) -> None:
    """The values of a tensor, and of all that lies in its storage, are not known any more."""
    fake.__dict__.pop("known", None)
    if (token := _tokens.get(fake.untyped_storage()._cdata)) is not None:
        token.valid = False


def _is_data(real: torch.Tensor) -> bool:
    """Whether a tensor of floats is little, or a matrix of zeros and ones; not where it is a parameter."""
    if real.dtype not in _OR_MASKS or real.requires_grad or isinstance(real, torch.nn.Parameter):
        return False
    if real.numel() <= FLOATS:
        return True
    return real.dim() == 2 and real.numel() <= MASKS and bool(((real == 0) | (real == 1)).all())


def concerns(func: Any, args: tuple, out: Any) -> bool:
    """Whether anything may be known of what an operation made, or of what it wrote over."""
    if type(out) is not FakeTensor or out.dtype in DTYPES:
        return True
    if func.overloadpacket in _FILLED:
        return 1 < out.numel() <= FLOATS
    first = args[0] if args else None
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    return type(first) is FakeTensor and "known" in first.__dict__


def values_of(tensor: Any) -> torch.Tensor | None:
    """The values of a tensor, where they are known."""
    known = getattr(tensor, "known", None)
    return known.real if known is not None and known.token.valid else None


def follow(func: Any, args: tuple, kwargs: dict, out: Any) -> None:
    """After an operation: know the values of what it made from known ones, forget those that it wrote over."""
    writes = func._schema.is_mutable or func in _STATISTICS
    assumed, counted = is_assumed(args, kwargs), func.overloadpacket in _ZEROS
    if isinstance(out, torch.Tensor):
        may_be_known = out.dtype in _OR_MASKS
    else:
        several = isinstance(out, (tuple, list)) and bool(out)
        may_be_known = several and isinstance(out[0], torch.Tensor) and out[0].dtype in _OR_MASKS
    if not may_be_known:
        for tensor in _written(func, args, kwargs) if writes else ():  # a batch norm's running mean, foreach
            forget(tensor)
        return
    try:
        if _RANDOM in func.tags or func.overloadpacket in _UNDEFINED:
            raise Unknown
        made = [one for one in tree_flatten(out)[0] if isinstance(one, torch.Tensor)]
        if not any(_fits(one.dtype, one, assumed or counted) for one in made):  # before it is made for real
            raise Unknown
        results = run(func, args, kwargs)
    except Unknown:
        if writes:
            for tensor in _written(func, args, kwargs):
                forget(tensor)
        elif func in _DECIDES and any(_is_all(value, _DECIDES[func]) for value in args):
            know(out, torch.full((), _DECIDES[func], dtype=out.dtype).expand(out.shape))
        return
    if writes:
        for tensor in _written(func, args, kwargs) if assumed else ():
            tensor.known.assumed = True
        return
    for fake, real in zip(*(tree_flatten(value)[0] for value in (out, results)), strict=True):
        if isinstance(fake, torch.Tensor) and _fits(fake.dtype, real, assumed or counted):
            fake.known = _Values(real, _token_of(fake), assumed)


def forget_written(func: Any, args: tuple, kwargs: dict) -> None:
    """What an operation wrote, with values of which nothing is known, is not known any more."""
    if _tokens and _places_written(func):
        for tensor in _written(func, args, kwargs):
            forget(tensor)


@functools.cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The tensors that an operation writes into."""
    if func in _STATISTICS:
        return [tensor for tensor in args[3:5] if tensor is not None]
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in _places_written(func)]
    return [tensor for tensor in tree_flatten(written)[0] if type(tensor) is FakeTensor]


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

    if func is _FILL and (number := getattr(args[1], "answer", None)) is not None:  # x[:, 5:] = 1
        args = (args[0], torch.full((), number, dtype=args[1].dtype))
    if func.overloadpacket in _SHAPE_ONLY:
        args = (torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
        return func(*args, **tree_map(real, kwargs))
    args, kwargs = tree_map(real, args), tree_map(real, kwargs)
    if not tree_flatten((args, kwargs))[0]:
        raise Unknown
    return func(*args, **kwargs)
