"""The buffer through which the blocks of a large reduction meet on CUDA, and what is cast to be summed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .accumulate import dense
from .registry import Rule, overload

_aten = torch.ops.aten
_THREADS, _FEW_VALUES, _MANY_VALUES = 512, 16, 256  # MAX_NUM_THREADS, min_ and max_values_per_thread


def reduction_buffers(
    outputs: int, inputs: int, *, fastest: bool, vectors: int, resident: int, element: int = 4
) -> tuple[int, int]:
    """(bytes of the buffer, bytes of the semaphores) of a sum; zeros where one block sees all of an output's inputs.

    outputs, inputs: numbers in all, and that each of them sums. fastest: whether the summed dimension is dense.
    vectors: elements that a thread takes at once (4, or 1 where they are not dense). resident: threads that the card
    holds at once. element: bytes of the accumulator.

    Source: setReduceConfig and ReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh.
    """
    wide, high = (inputs, outputs) if fastest else (outputs, inputs)
    output_vectors = 1 if fastest else vectors
    wide //= vectors
    threads = _THREADS // output_vectors
    height = min(_last_power(high, threads), threads // min(_last_power(wide, threads), 32))
    width = min(_last_power(wide, threads), threads // height)
    step_input, step_output = (width, 1) if fastest else (1, width)
    values = -(-inputs // step_input)
    if values < height * _FEW_VALUES and values < _MANY_VALUES:
        return 0, 0
    values = -(-inputs // (step_input * height))
    grid = -(-(outputs // output_vectors) // step_output)
    fitting = resident // (width * height)
    if values < _MANY_VALUES or grid > fitting:
        return 0, 0
    blocks = max(min(-(-fitting // grid), -(-values // _FEW_VALUES)), -(-values // _MANY_VALUES))
    if blocks == 1:
        return 0, 0
    shared = 1 if fastest else width * output_vectors
    return element * outputs * blocks * shared, 4 * grid


def _last_power(number: int, limit: int) -> int:
    """The largest power of two that is no greater than the number, at most `limit`."""
    return limit if number >= limit else 1 << max(0, number.bit_length() - 1)


def _own(summed: torch.Tensor) -> int:
    return summed.element_size()


def _in_fp32(summed: torch.Tensor) -> int:
    """16-bit numbers are added up in fp32, whole numbers as int64."""
    return max(4, summed.element_size()) if summed.is_floating_point() else 8


def _with_index(_: torch.Tensor) -> int:
    return 16  # a value and its index, or what Welford's method needs


_ACCUMULATORS: dict[Callable[[torch.Tensor], int], str] = {
    _in_fp32: "sum sum.dim_IntList mean mean.dim nansum linalg_vector_norm prod prod.dim_int",
    _own: "any any.dim any.dims all all.dim all.dims amax amin max min",
    _with_index: "max.dim min.dim argmax argmin std.correction var.correction std_mean.correction var_mean.correction",
    lambda summed: 2 * summed.element_size(): "aminmax",
}
_ACCUMULATOR = {
    op: element
    for element, names in _ACCUMULATORS.items()
    for name in names.split()
    if (op := overload(name)) is not None
}
_CASTS = frozenset(
    op for name in ["sum", "sum.dim_IntList", "nansum", "prod", "prod.dim_int"] if (op := overload(name)) is not None
)


def _reduction(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> Any:
    out = run()
    outs = out if isinstance(out, tuple) else (out,)
    for item in outs:
        mode.count(item)
    summed = args[0]
    # make_reduction in ReduceOpsUtils.h casts what is not summed in its own type, but for 16-bit numbers to fp32
    casts = op in _CASTS and not summed.dtype.is_floating_point and summed.dtype != out.dtype
    with mode.gpu.holding(summed.numel() * out.element_size() if casts else 0):
        element = _ACCUMULATOR[op](summed)
        mode.gpu.temporaries(*buffers(mode, summed, outs[0].numel(), _dims(op, args, kwargs), element))
    return out


def _count_nonzero(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """`(input != 0).sum()`: which are not zero, and that as int64."""
    out, counted = run(), args[0]
    with mode.gpu.holding(counted.numel()):
        mode.count(out)
        with mode.gpu.holding(8 * counted.numel()):
            mode.gpu.temporaries(*buffers(mode, counted, out.numel(), _dims(op, args, kwargs), 8))
    return out


def _logsumexp(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """The largest of each, whether those are finite, and exp(input - largest), which is summed.

    Source: logsumexp_out_impl in aten/src/ATen/native/ReduceOps.cpp.
    """
    out, summed = run(), args[0]
    each, dims = out.numel() * out.element_size(), _dims(op, args, kwargs)
    with mode.gpu.holding(each):
        mode.gpu.temporaries(*buffers(mode, summed, out.numel(), dims, _own(summed)))
        mode.gpu.temporaries(each, out.numel())
        with mode.gpu.holding(summed.numel() * out.element_size()):
            mode.count(out)
            mode.gpu.temporaries(*buffers(mode, summed, out.numel(), dims, _in_fp32(summed)))
    return out


def buffers(mode: Any, summed: torch.Tensor, outputs: int, dims: Any, element: int) -> tuple[int, int]:
    """The buffers of a reduction over these dimensions (None and none: all) on this card."""
    if not outputs or summed.numel() < outputs * _MANY_VALUES or not _as_they_lie(summed, outputs):
        return 0, 0
    inner = dims is None or dims == [] or _has_last(dims, summed.shape)
    whole = outputs == 1
    vectors = 4 if (whole and summed.numel() > 128) or (not inner and summed.shape[-1] % 4 == 0) else 1
    resident = mode.gpu.spec.multiprocessors * mode.gpu.spec.threads_per_multiprocessor
    inputs = summed.numel() // outputs
    return reduction_buffers(outputs, inputs, fastest=inner, vectors=vectors, resident=resident, element=element)


def _as_they_lie(summed: torch.Tensor, outputs: int) -> bool:
    """Whether a sum goes over its elements as over a contiguous tensor's: dimensions come in the order of strides.

    Known for contiguous tensors, and for dense ones in another order of which all dimensions are summed, or all but
    the one whose elements lie side by side.
    """
    rows = summed.dim() > 0 and outputs == summed.shape[-1] and summed.stride(-1) == 1
    return summed.is_contiguous() or ((rows or outputs == 1) and dense(summed))


@functools.cache
def _place(op: Any) -> int | None:
    """Which argument of an operator says the dimensions."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dim") if "dim" in names else None


def _dims(op: Any, args: tuple, kwargs: dict) -> Any:
    place = _place(op)
    if place is None:
        return None
    return args[place] if len(args) > place else kwargs.get("dim")


def _has_last(dims: Any, shape: torch.Size) -> bool:
    """Whether the last dimension of more than one element is among these."""
    last = max((dim for dim, size in enumerate(shape) if size > 1), default=len(shape) - 1)
    return any(dim % max(1, len(shape)) == last for dim in ([dims] if isinstance(dims, int) else dims))


BUFFERS = Rule(
    name="reduction_buffers",
    what="a buffer and semaphores for a large reduction, for its time: 16 MiB for the gradient of a norm's weight; an "
    "int64 copy of flags and smaller whole numbers that are summed",
    source="setReduceConfig, global_memory_size, semaphore_size in aten/src/ATen/native/cuda/Reduce.cuh, the kernels "
    "in Reduce*.cu beside it; make_reduction in aten/src/ATen/native/ReduceOpsUtils.h",
    operators={
        **dict.fromkeys(_ACCUMULATOR, _reduction),
        _aten.count_nonzero.dim_IntList: _count_nonzero,
        _aten.count_nonzero.default: _count_nonzero,
        _aten.logsumexp.default: _logsumexp,
    },
)
