"""Where CUDA does something else than a CPU: which attention kernel runs, what autocast keeps in fp32, workspaces.

Fake tensors carry the device "cpu", so PyTorch would choose the CPU's kernels for them. These rules choose CUDA's. Each
of them is listed in `DIFFERENCES` and can be left out, so that a measurement on a card can tell which one is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from ..language import tr
from ..units import choose

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Difference:
    """What CUDA does otherwise than the CPU. source: where PyTorch says so."""

    what: str
    source: str


DIFFERENCES = {
    "attention": Difference(
        "flash, memory-efficient or math attention, and what each saves: logsumexp, RNG state, probabilities",
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, attention.cu",
    ),
    "dropout_mask": Difference(
        "a mask of one byte an element instead of a tensor in the input's dtype",
        "is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp",
    ),
    "layer_norm_statistics": Difference(
        "mean and rstd in fp32 beside a 16-bit input",
        "acc_type in layer_norm_cuda of aten/src/ATen/native/cuda/layer_norm_kernel.cu",
    ),
    "autocast_fp32": Difference(
        "norms, softmax, losses and pow run in fp32 under autocast",
        "AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE in aten/src/ATen/autocast_mode.h",
    ),
    "grouped_mm": Difference(
        "all experts of an MoE layer in one product, for fp32 and fp16 too",
        "create_grouped_gemm_output_tensor in aten/src/ATen/native/GroupedMMUtils.h",
    ),
    "cublas_workspace": Difference(
        "a workspace for each thread that multiplies, sized by architecture; cuBLASLt shares it",
        "parseChosenWorkspaceSize, unified_cublas_and_lt_workspaces in aten/src/ATen/cuda/CublasHandlePool.cpp",
    ),
}


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Bytes that PyTorch gives each cuBLAS handle: 32 MiB on Hopper (9.0), else 8.125 MiB (":4096:2:16:8").

    Torch of 2026 may give Blackwell (10.x, 12.x) 32 MiB too; that is not settled between its versions.

    Source: parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 4096 * 8 * 1024 if compute_capability == (9, 0) else 4096 * 1024 * 2 + 16 * 1024 * 8


def attention_kernel(
    compute_capability: tuple[int, int],
    dtype: torch.dtype,
    *,
    has_mask: bool,
    grouped_query: bool,
    head_dim: int,
    value_dim: int | None = None,
) -> str:
    """The kernel that `scaled_dot_product_attention` takes on CUDA: "flash", "efficient" or "math".

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Flash wants compute capability 8.0, a 16-bit type, no
    mask and values as wide as keys (`value_dim`; None says they are); memory-efficient wants 5.0, no grouped-query
    heads, and 8.0 for bf16; math takes the rest. This is the rule of torch 2.6 to 2.13 without cuDNN's attention, which
    saves tensors of the same size.
    """
    if (
        compute_capability >= (8, 0)
        and dtype in _HALF
        and not has_mask
        and head_dim <= 256
        and value_dim in (None, head_dim)
    ):
        return "flash"
    if not grouped_query and (dtype in (torch.float16, torch.float32) or compute_capability >= (8, 0)):
        return "efficient"
    return "math"


def grouped_mm_shape(mat_a: torch.Tensor, mat_b: torch.Tensor, offsets: torch.Tensor | None) -> list[int]:
    """The shape of `torch.nn.functional.grouped_mm`, the product that runs all experts of an MoE layer at once.

    A 2-dimensional matrix has its groups side by side. The kernel takes fp32, fp16 and bf16, PyTorch's own rule of
    shapes bf16 alone. transformers uses it from compute capability 8.0 on, and below that a loop over the experts with
    the same tensors.

    Source: create_grouped_gemm_output_tensor in aten/src/ATen/native/GroupedMMUtils.h.
    """
    shape = [mat_a.shape[-2], mat_b.shape[-1]]
    if mat_a.dim() == mat_b.dim():
        shape.insert(0, offsets.shape[0] if mat_a.dim() == 2 else mat_a.shape[0])
    return shape


# Of what CUDA's autocast runs in fp32 and the CPU's does not, the functions that language models call.
_FP32_FUNCTIONS = [
    *((F, name) for name in ("layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "cross_entropy")),
    *((F, "softplus"), (torch, "pow")),
]
_entered: list[CudaKernels] = []  # the innermost last; while it is not empty, the functions below are replaced
_originals: dict[tuple[Any, str], Any] = {}


class CudaKernels:
    """While entered, PyTorch's functions treat fake tensors as a CUDA GPU of this compute capability would.

    Functions are replaced for the time of the context, not caught by a `TorchFunctionMode`: autograd switches those off
    while it recomputes a checkpoint. Real tensors are passed on as they are. What a kernel allocates inside and frees
    before it returns is not known here (flash attention's backward, bitsandbytes' dequantization).

    without: names of `DIFFERENCES` to leave out; there the CPU's way is taken.
    """

    def __init__(self, compute_capability: tuple[int, int], without: Iterable[str] = ()):
        self.compute_capability = compute_capability
        self.without = {choose(name, DIFFERENCES, tr(ko="차이", en="difference")) for name in without}

    def applies(self, name: str) -> bool:
        """Whether this one of `DIFFERENCES` is in force."""
        return name not in self.without

    def layer_norm(self, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The outputs of `native_layer_norm` with statistics as CUDA keeps them."""
        if out[0].dtype not in _HALF or not self.applies("layer_norm_statistics"):
            return out
        return out[0], *(statistic.new_empty(statistic.shape, dtype=torch.float32) for statistic in out[1:])

    def __enter__(self) -> CudaKernels:
        if not _entered:
            _replace(
                F, "scaled_dot_product_attention", lambda *args, **kwargs: _entered[-1]._attention(*args, **kwargs)
            )
            _replace(F, "dropout", _dropout)
            for owner, name in _FP32_FUNCTIONS:
                if hasattr(owner, name):
                    _replace(owner, name, _in_fp32(getattr(owner, name)))
        _entered.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _entered.remove(self)
        if not _entered:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)
            _originals.clear()

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if not self.applies("attention"):
            return _originals[F, "scaled_dot_product_attention"](
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(half), key.to(half), value.to(half)
        kernel = attention_kernel(
            self.compute_capability,
            query.dtype,
            has_mask=attn_mask is not None,
            grouped_query=enable_gqa and query.shape[-3] != key.shape[-3],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
        )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), float("-inf")
            )
        if kernel == "flash":
            return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if kernel == "efficient":
            if attn_mask is not None:
                attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
            wants_logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            return _aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, wants_logsumexp, dropout_p, is_causal, scale=scale
            )[0]
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]


def _replace(owner: Any, name: str, cuda: Any) -> None:
    original = _originals[owner, name] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(input: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (cuda if isinstance(input, FakeTensor) else original)(input, *args, **kwargs)

    setattr(owner, name, replacement)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if training and 0 < p < 1 and not inplace and _entered[-1].applies("dropout_mask"):
        return torch.native_dropout(input, p, True)[0]
    return _originals[F, "dropout"](input, p, training, inplace)


def _in_fp32(function: Any) -> Any:
    def in_fp32(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and _entered[-1].applies("autocast_fp32"):
            args = tuple(_to_fp32(value) for value in args)
            kwargs = {name: _to_fp32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return in_fp32


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value
