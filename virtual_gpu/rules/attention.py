"""Attention on CUDA: which kernel `scaled_dot_product_attention` takes, and what that kernel saves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from .registry import Rule

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_SOURCE = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"


@dataclass(frozen=True)
class Request:
    """What the choice of a kernel looks at. `trains`: an input asks for a gradient."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    query_length: int
    key_length: int
    has_mask: bool = False
    grouped_query: bool = False
    is_causal: bool = False
    dropout: float = 0.0
    trains: bool = True
    mask_trains: bool = False


KERNELS = ("cudnn", "flash", "efficient", "math")
_NUMBERS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}  # SDPBackend in aten/src/ATen/SDPBackend.h


def attention_kernel(
    compute_capability: tuple[int, int],
    request: Request,
    *,
    rules: Collection[str] = (),
    enabled: Collection[str] = KERNELS,
) -> str:
    """One of `KERNELS`, by the order and the conditions of select_sdp_backend.

    rules: names of those in force that it asks for ("cudnn_attention", "cudnn_wide_heads", "cudnn_dropout",
    "efficient_gqa"). enabled: what the program allows. RuntimeError, as PyTorch's, where nothing is left.

    Source: can_use_cudnn_attention, can_use_flash_attention, can_use_mem_efficient_attention in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_attn_mask_shape in sdp_utils_cpp.h.
    """
    fits = {
        "cudnn": lambda: _cudnn(compute_capability, request, rules),
        "flash": lambda: _flash(compute_capability, request),
        "efficient": lambda: _efficient(compute_capability, request, "efficient_gqa" in rules),
        "math": lambda: True,
    }
    order = KERNELS if "cudnn_attention" in rules else ("flash", "efficient", "math", "cudnn")
    for kernel in order:
        if kernel in enabled and fits[kernel]():
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def _cudnn(capability: tuple[int, int], r: Request, rules: Collection[str]) -> bool:
    widest = 256 if "cudnn_wide_heads" in rules else 128
    narrow = max(r.head_dim, r.value_dim) <= widest or (r.head_dim, r.value_dim) == (192, 128)
    fine = "cudnn_dropout" not in rules or (r.dropout * 16).is_integer()
    return (
        capability >= (8, 0)
        and r.dtype in _HALF
        and narrow
        and not r.mask_trains
        and r.head_dim % 8 == r.value_dim % 8 == 0
        and r.key_length != 1
        and (not r.dropout or (fine and r.query_length != 1))
    )


def _flash(capability: tuple[int, int], r: Request) -> bool:
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    small_shared_memory = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    too_wide = small_shared_memory and r.trains and r.head_dim > 192 and (r.head_dim <= 224 or r.dropout > 0)
    return (
        capability >= (8, 0)
        and r.dtype in _HALF
        and not r.has_mask
        and r.head_dim == r.value_dim <= 256
        and not too_wide
        and not (r.is_causal and r.query_length != r.key_length)
    )


def _efficient(capability: tuple[int, int], r: Request, gqa: bool) -> bool:
    if (r.grouped_query and not gqa) or r.dtype not in (*_HALF, torch.float32):
        return False
    if r.dtype == torch.bfloat16 and capability < (8, 0):
        return False
    half = r.dtype in _HALF  # minimum_gemm_alignment: 128 bits where tensor cores multiply
    alignment = 8 if half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    return capability >= (5, 0) and r.head_dim % alignment == r.value_dim % alignment == 0


def _kernel(
    rules: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    fits = query.dim() == key.dim() == value.dim() == 4  # check_tensor_shapes: else math
    # check_last_dim_stride_equals_1_dense, of all kernels but math
    fits = fits and all(t is None or t.stride(-1) == 1 for t in (query, key, value, attn_mask))
    request = Request(
        query.dtype,
        query.shape[-1],
        value.shape[-1],
        query.shape[-2],
        key.shape[-2],
        has_mask=attn_mask is not None,
        grouped_query=enable_gqa and query.shape[-3] != key.shape[-3],
        is_causal=is_causal,
        dropout=dropout_p,
        trains=_trains(query, key, value),
        mask_trains=attn_mask is not None and attn_mask.requires_grad,
    )
    enabled = _enabled() if fits else [kernel for kernel in _enabled() if kernel == "math"]
    asked = [rule for rule in _ASKED if rules.applies(rule)]
    return attention_kernel(rules.compute_capability, request, rules=asked, enabled=enabled)


def _trains(*inputs: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _choice(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> int:
    """The kernel's number (`SDPBackend`), for a program that asks before it calls."""
    names = [argument.name for argument in op._schema.arguments]
    given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    given |= dict(zip(names, args, strict=False)) | kwargs
    given.pop("scale", None)
    return _NUMBERS[_kernel(mode.rules, **given)]


def _attention(
    rules: Any,
    op: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    kernel = _kernel(rules, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool and (kernel != "math" or not is_causal):
        attn_mask = _as_float(attn_mask, query.dtype)
    if kernel == "flash":
        return _flash_attention(query, key, value, dropout_p, is_causal, scale)
    if kernel == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, _trains(query, key, value), dropout_p, is_causal, scale=scale
        )[0]
    if kernel == "efficient":
        if attn_mask is not None:
            attn_mask = _aligned(attn_mask).expand(*query.shape[:-1], key.shape[-2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, _trains(query, key, value), dropout_p, is_causal, scale=scale
        )[0]
    rules.math_attention.under_way = True
    if enable_gqa and query.shape[-3] != key.shape[-3] and not rules.math_for_groups:
        rules.math_for_groups = _kernel(rules, query, key, value, attn_mask, dropout_p, is_causal, False) != "math"
    try:
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    finally:
        rules.math_attention.under_way = False


def _add_mask(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> torch.Tensor:
    """In place, as `_scaled_dot_product_attention_math` adds a mask to what is not a tensor subclass."""
    scores, mask = args[:2]
    if not mode.rules.math_attention.under_way or torch.result_type(scores, mask) != scores.dtype:
        return run()
    return _aten.alias(scores)


def _enabled() -> list[str]:
    """What `torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_..._sdp` leave."""
    asked = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    return [kernel for kernel in KERNELS if asked[kernel]()]


def _as_float(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the mask is True, −∞ elsewhere (convert_boolean_attn_mask in transformers/attention.cpp)."""
    zero, minus_infinity = mask.new_zeros((), dtype=dtype), mask.new_full((), float("-inf"), dtype=dtype)
    return torch.where(mask, zero, minus_infinity)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask as it is, before its heads are expanded, with rows of a multiple of 8 elements.

    Source: preprocess_mask, aligned_tensor and pad_bias in aten/src/ATen/native/transformers/attention.cpp; older
    ones padded the expanded mask, to 16.
    """
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _flash_attention(query, key, value, dropout_p, is_causal, scale) -> torch.Tensor:
    """Flash attention, with heads widened to a multiple of 8 (pad_last_dim in transformers/attention.cpp)."""
    width = query.shape[-1]
    if width % 8:
        scale = width**-0.5 if scale is None else scale
        query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :width]


def _grouped_gradients(mode: Any, op: Any, args: tuple, kwargs: dict, run: Any) -> tuple:
    """One gradient for each head of the keys and values, where the shapes alone give one for each of the query's."""
    query_gradient, _, _, mask_gradient = run()
    return query_gradient, mode.empty_like(args[2]), mode.empty_like(args[3]), mask_gradient


_ASKED = ("cudnn_attention", "cudnn_wide_heads", "cudnn_dropout", "efficient_gqa")
KERNEL = Rule(
    name="attention",
    what="flash, memory-efficient or math attention, and what each saves: logsumexp, RNG state, probabilities",
    source=f"{_SOURCE}, attention.cu, attention.cpp",
    kernels={("AutogradCPU", _aten.scaled_dot_product_attention.default): _attention},
    operators={_aten.add.Tensor: _add_mask, _aten._fused_sdp_choice.default: _choice},
)
CUDNN = Rule(
    name="cudnn_attention",
    what="cuDNN's attention goes first, masks and grouped heads too; its output and logsumexp are flash attention's",
    source=f"check_prefer_cudnn_attention in {_SOURCE} (cuDNN above 9.15.0, which wheels for CUDA 13 bring)",
    since="2.11",
    capability=((9, 0), (11, 0)),
)
# 2.12's sources have it, and 2.11's H100; the frontend that 256 needs since came to the sources in June 2026.
CUDNN_WIDE = Rule(
    name="cudnn_wide_heads",
    what="cuDNN's attention takes heads of up to 256 on Hopper, 128 after that",
    source=f"head_dim_limit in check_cudnn_tensor_shapes of {_SOURCE}",
    since="2.11",
    until="2.13",
    capability=((9, 0), (9, 1)),
)
CUDNN_DROPOUT = Rule(
    name="cudnn_dropout",
    what="cuDNN's attention takes no dropout but multiples of 1/16",
    source=f"check_cudnn_dropout in {_SOURCE}, pull request 174245 (26 February 2026, after the 2.11 branch was cut)",
    since="2.12",
)
# Of 25 July 2026, before the 2.14 branch was cut; the kernel's header in the wheel of 2.14.1 has it (q_heads_per_kv in
# mem_eff_attention/kernel_forward.h), that of 2.13.0 has not.
EFFICIENT_GQA = Rule(
    name="efficient_gqa",
    what="memory-efficient attention takes grouped-query heads, which went to math before",
    source=f"supports_gqa in can_use_mem_efficient_attention of {_SOURCE}, pull request 191085",
    since="2.14",
    operators={_aten._scaled_dot_product_efficient_attention_backward.default: _grouped_gradients},
)
