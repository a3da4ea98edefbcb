"""Softmax on CUDA: fp16 to fp32 without a copy, a dense copy of a sliced input, a product in backward."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Rule, parts, with_temporaries

_aten = torch.ops.aten
_KERNELS = {_aten.softmax.int: torch._softmax, _aten.log_softmax.int: torch._log_softmax}


def _half_to_float(
    rules: Any, op: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return _KERNELS[op](input, dim, True)
    return parts(op, input, dim, dtype)


def _product(args: tuple) -> tuple[int]:
    """`grad * output`; args: those of _softmax_backward_data."""
    grad, output = args[:2]
    return (grad.numel() * max(grad.element_size(), output.element_size()),)


def _dense_copies(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Bytes of the copies of those that do not lie densely, as `logits[:, :-1]` of more than one sequence."""
    return tuple(one.numel() * one.element_size() for one in tensors if not one.is_contiguous())


FUSED = Rule(
    name="softmax_half",
    what="softmax and log_softmax of an fp16 tensor in fp32 make no fp32 copy of it",
    source="half_to_float in softmax and log_softmax of aten/src/ATen/native/SoftMax.cpp",
    kernels={("AutogradCPU", op): _half_to_float for op in _KERNELS},
)
# log_softmax's backward has none.
BACKWARD = Rule(
    name="softmax_backward",
    what="the product of gradient and output beside the gradient that softmax's backward makes",
    source="softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu",
    operators={_aten._softmax_backward_data.default: with_temporaries(_product)},
)
DENSE = Rule(
    name="softmax_dense",
    what="softmax and log_softmax copy an input that does not lie densely, for the time of their kernel",
    source="contiguous() in host_softmax and host_softmax_backward of aten/src/ATen/native/cuda/SoftMax.cu; the same "
    "was seen on a card in https://github.com/CarperAI/trlx/pull/583",
    operators={
        _aten._softmax.default: with_temporaries(lambda args: _dense_copies(args[0])),
        _aten._log_softmax.default: with_temporaries(lambda args: _dense_copies(args[0])),
        _aten._log_softmax_backward_data.default: with_temporaries(lambda args: _dense_copies(*args[:2])),
    },
)
