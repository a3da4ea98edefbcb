"""The buffer through which the blocks of a large sum meet on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule

_aten = torch.ops.aten
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim)
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


def _sum(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    out = run()
    mode.count(out)
    summed = args[0]
    outputs = out.numel()
    if outputs and summed.is_contiguous() and summed.numel() >= outputs * _MANY_VALUES:
        inner = summed.dim() > 0 and (len(args) < 2 or not args[1] or _has_last(args[1], summed.dim()))
        whole = outputs == 1
        vectors = 4 if (whole and summed.numel() > 128) or (not inner and summed.shape[-1] % 4 == 0) else 1
        resident = mode.gpu.spec.multiprocessors * mode.gpu.spec.threads_per_multiprocessor
        inputs = summed.numel() // outputs
        mode.gpu.temporaries(*reduction_buffers(outputs, inputs, fastest=inner, vectors=vectors, resident=resident))
    return out


def _has_last(dims: Any, count: int) -> bool:
    return any(dim % count == count - 1 for dim in ([dims] if isinstance(dims, int) else dims))


BUFFERS = Rule(
    name="reduction_buffers",
    what="a buffer and semaphores for a large sum or mean, for its time: 16 MiB for the gradient of a norm's weight",
    source="setReduceConfig, global_memory_size, semaphore_size in aten/src/ATen/native/cuda/Reduce.cuh",
    operators=dict.fromkeys(_SUMS, _sum),
)
