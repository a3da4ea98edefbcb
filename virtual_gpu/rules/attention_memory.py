"""What attention's kernels take beside their outputs: sums in fp32, workspaces, copies, the random state."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from .registry import Rule

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
# Compute capabilities of which a block may have 160 KiB of shared memory and more; the others have 64 to 99.
_LARGE_SHARED_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))
_LOCK = 16  # bytes before each tile of GradQTempStorage
CUDNN_BYTES = 256  # of cuDNN's own, in every workspace that one H100 was seen to ask for but those of decoding


def flash_splits(blocks: int, key_length: int, head_dim: int, multiprocessors: int) -> int:
    """Into how many parts flash attention cuts the keys where its blocks of 64 queries are too few for the card.

    blocks: batch × heads × blocks of queries. Source: set_params_splitkv, num_splits_heuristic in flash_api.cpp.
    """
    slots = 2 * multiprocessors
    if blocks >= 0.8 * slots:
        return 1
    tiles = -(-key_length // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    counts = [n for n in range(1, min(128, slots, tiles) + 1) if n == 1 or -(-tiles // n) != -(-tiles // (n - 1))]
    waves = {n: blocks * n / slots for n in counts}
    used = {n: wave / -int(-wave // 1) for n, wave in waves.items()}
    return next(n for n in counts if used[n] >= 0.85 * max(used.values()))


def flash_forward(query: torch.Tensor, key: torch.Tensor, dropout: float, multiprocessors: int) -> tuple[int, ...]:
    """Bytes of logsumexp and output of each part, in fp32; nothing where the keys are not cut.

    query, key: (batch, heads, length, head_dim).
    """
    batch, heads, length, dim = query.shape
    blocks = batch * heads * -(-length // 64)
    splits = 1 if dropout else flash_splits(blocks, key.shape[2], dim, multiprocessors)
    rows = splits * batch * heads * length
    return () if splits == 1 else (rows * 4, rows * _widened(dim) * 4)


def flash_backward(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """softmax_d and dq_accum in fp32, lengths rounded to 128 and heads to 32; dk and dv for every query head.

    query, key: (batch, heads, length, head_dim). Source: mha_bwd in flash_api.cpp.
    """
    batch, heads, length, dim = query.shape
    rows = -(-length // 128) * 128
    return batch * heads * rows * 4, batch * rows * heads * _widened(dim) * 4, *[_of_every_head(key, heads)] * 2


def _widened(head_dim: int) -> int:
    return 256 if head_dim > 192 else -(-head_dim // 32) * 32


def _of_every_head(tensor: torch.Tensor, heads: int) -> int:
    """Bytes of a gradient with one part for each of the query's heads; 0 where the heads are not grouped."""
    own = tensor.shape[1]
    return tensor.numel() // own * heads * tensor.element_size() if own != heads else 0


def efficient_forward(query: torch.Tensor, value: torch.Tensor) -> int:
    """Bytes of the output in fp32 where a 16-bit one with heads above 128 does not stay in registers.

    Source: kNeedsOutputAccumulatorBuffer in mem_eff_attention/kernel_forward.h.
    """
    wide = max(query.shape[-1], value.shape[-1]) > 128
    return 4 * query.numel() // query.shape[-1] * value.shape[-1] if wide and query.dtype in _HALF else 0


def efficient_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]
) -> int:
    """Bytes of the fp32 sums of gradients that a block cannot keep to itself.

    query, key, value: (batch, heads, length, head_dim). A block does I queries and J keys; the kernel with the widest
    tile that the card's shared memory holds is taken. Source: workspace_size in mem_eff_attention/kernel_backward.h,
    dispatch_cutlassB in kernels/cutlassB.h, num_splits_key in attention_backward.cu.
    """
    half, dim, value_dim = query.dtype in _HALF, query.shape[-1], value.shape[-1]
    batch, heads = query.shape[:2]
    tile_i, tile_j, registers = _tile(half, max(dim, value_dim), capability)
    sums = 0
    if half and not registers:
        splits = -(-key.shape[2] // tile_j)
        if batch * heads >= 256 and key.shape[2] <= 2 * tile_j:
            splits = 1
        splits = max(1, min(splits, 200 // (batch * heads)))
        sums = splits * tile_j * sum(-(-width // tile_i) * tile_i for width in (dim, value_dim))
    blocks = -(-query.shape[2] // tile_i) * -(-dim // tile_j) if half or capability >= (7, 0) else 0
    each = sums + blocks * (_LOCK // 4 + tile_i * tile_j)
    return batch * heads * -(-each // 4) * 4 * 4


def _tile(half: bool, width: int, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """(I, J, whether gradients of keys and values stay in registers) for heads of this width."""
    if width <= 64:
        return 64, 64, half
    if capability < (8, 0) or (capability not in _LARGE_SHARED_MEMORY and not half):
        return 64, 64, False
    if half and width <= 96 and capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if capability not in _LARGE_SHARED_MEMORY:
        return 64, 64, False
    return (128, 128, True) if half and width <= 128 else (128, 64, False)


def cudnn_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Bytes of cuDNN's workspace in backward on compute capability 9.0.

    query, key, value: (batch, heads, length, head_dim). softmax_sum and dQ_accum in fp32, dK and dV for every query
    head of grouped ones. Source: CompositeSDPABackwardNode in cudnn_frontend/node/scaled_dot_product_flash_attention.h.
    """
    rows, heads = query.numel() // query.shape[-1], query.shape[1]
    return rows * 4 * (1 + query.shape[-1]) + _of_every_head(key, heads) + _of_every_head(value, heads) + CUDNN_BYTES


# -- the operators, in the order in which a card is seen to ask --------------------------------------------------------


def _flash_forward(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    out = run()
    for item in out[:2]:
        mode.count(item)
    dropout = args[3] if len(args) > 3 else 0.0
    with mode.gpu.holding(*flash_forward(*args[:2], dropout, mode.gpu.spec.multiprocessors)):
        for item in out[6:8]:
            mode.count(item)
    return out


def _flash_backward(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    gradient, query, key, _, output = args[:5]
    out = run()
    copies = [tensor.numel() * tensor.element_size() for tensor in (gradient, output) if not _by_rows(tensor)]
    with mode.gpu.holding(*copies):
        _counted(mode, out)
        mode.gpu.temporaries(*flash_backward(query, key))
    return out


def _by_rows(tensor: torch.Tensor) -> bool:
    """Whether (batch, heads, length, head_dim) lies as (batch, length, heads, head_dim), which the kernels want."""
    return tensor.transpose(1, 2).is_contiguous()


def _counted(mode: Any, out: tuple) -> None:
    for item in out:
        if isinstance(item, torch.Tensor):
            mode.count(item)


def _efficient_forward(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    output, logsumexp, *_ = run()
    mode.count(output)
    mode.count(logsumexp)
    mode.gpu.temporaries(efficient_forward(args[0], args[2]))
    nothing = args[0].new_empty(0, dtype=torch.int64)  # the random state is on the CPU
    return output, logsumexp, nothing, nothing


def _efficient_backward(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    gradient, query, key, value = args[:4]
    capability, heads = mode.gpu.spec.compute_capability, query.shape[1]
    delta, output = query.numel() // query.shape[-1] * 4, gradient.numel() * 4
    out = run()
    with mode.gpu.holding(0 if _by_rows(gradient) else gradient.numel() * gradient.element_size()):
        _counted(mode, out)
        with ExitStack() as kernel:
            if query.dtype in _HALF:
                kernel.enter_context(mode.gpu.holding(delta))
            else:  # not kKernelComputesDelta: a product, its sum, and that with heads first
                with mode.gpu.holding(output, delta):
                    kernel.enter_context(mode.gpu.holding(delta if heads > 1 else 0))
            workspace = efficient_workspace(query, key, value, capability)
            mode.gpu.temporaries(workspace, _of_every_head(key, heads), _of_every_head(value, heads))
    return out


def _cudnn_forward(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    """The random state first; logsumexp only where it is asked for."""
    out = list(run())
    if not args[4]:
        out[1] = out[1].new_empty(0)
    for at in (6, 7, 0, 1):
        mode.count(out[at])
    if mode.rules.applies("cudnn_attention_workspace"):
        mode.gpu.temporaries(CUDNN_BYTES)
    return tuple(out)


def _cudnn_backward(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    gradient, query, key, value = args[:4]
    out = run()
    _counted(mode, out)
    copy = 0 if gradient.stride(-1) == 1 else gradient.numel() * gradient.element_size()
    mode.gpu.temporaries(copy, cudnn_backward(query, key, value))
    return out


def _safe_softmax(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """Which elements are −∞, in which rows all are, and the zero that such rows are filled with."""
    out = run()
    mode.count(out)
    mode.gpu.temporaries(out.numel(), out.numel() // max(1, out.shape[args[1]]), out.element_size())
    return out


TEMPORARIES = Rule(
    name="attention_temporaries",
    what="attention's sums in fp32, gradients of grouped keys and values for every head, copies that lie as it wants",
    source="mha_fwd and mha_bwd in flash_attn/flash_api.cpp, attention.cu, attention_backward.cu, kernel_forward.h and "
    "kernel_backward.h in aten/src/ATen/native/transformers/cuda; _safe_softmax in transformers/attention.cpp",
    operators={
        _aten._scaled_dot_product_flash_attention.default: _flash_forward,
        _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        _aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
        _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        _aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
        _aten._safe_softmax.default: _safe_softmax,
    },
)
CUDNN_WORKSPACE = Rule(
    name="cudnn_attention_workspace",
    what="the workspace of cuDNN's attention: in backward the query's gradient in fp32 and a number a row",
    source="CompositeSDPABackwardNode in cudnn_frontend/node/scaled_dot_product_flash_attention.h, run_cudnn_SDP_bprop "
    "in aten/src/ATen/native/cudnn/MHA.cpp; seen on an H100",
    since="2.11",
    capability=((9, 0), (10, 0)),
    operators={_aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward},
)
