"""Autocast as CUDA does it, for tensors that carry a CPU's dispatch key.

CUDA casts other operations than a CPU: about sixty stay in fp32 (`exp`, `pow`, `sum`, norms, losses), and einsum and
matrix-vector products go to 16 bits. The kernels below stand at the dispatcher's key AutocastCPU, so that functions,
methods and what a library calls inside meet them alike. Where the CPU casts an operation as CUDA does, its own kernel
stays. Tensors that are not virtual keep the CPU's way.

Casts go from the last argument to the first, as in PyTorch's wheels (C++ leaves the order to the compiler), operands in
a list (einsum) from the first to the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.utils._python_dispatch import _disable_current_modes

from .registry import Kernel, Rule, overload

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)

# AT_FORALL_LOWER_PRECISION_FP of aten/src/ATen/autocast_mode.h
LOWER_PRECISION = frozenset(
    """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention""".split()  # noqa: SIM905
)
# AT_FORALL_FP32
FP32 = frozenset(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""".split()  # noqa: SIM905
)
# AT_FORALL_FP32_SET_OPT_DTYPE: the input stays, the output is asked for in fp32
FP32_OUTPUT = frozenset(
    """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()  # noqa: SIM905
)
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: operator → the overload that takes a dtype
FP32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# AT_FORALL_PROMOTE: to the widest of the arguments' types
PROMOTE = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()  # noqa: SIM905
)


def _casts(value: Any) -> bool:
    """is_eligible: floating point, and not double."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value.to(dtype) if _casts(value) and value.dtype != dtype else value


def _below(op: Any, args: tuple, kwargs: dict, cast: Callable[[Any], Any]) -> Any:
    """The operation below autocast, on arguments that were cast from the last to the first, freed the other way."""
    named = {name: cast(value) for name, value in reversed(kwargs.items())}
    cast_args = [cast(value) for value in reversed(args)]
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        out = op(*reversed(cast_args), **named)
    while cast_args:
        value = cast_args.pop()
        if isinstance(value, list):
            value.reverse()  # a list frees its last item first
    return out


def _fp32(rules: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return _below(op, args, kwargs, lambda value: _cast(value, torch.float32))


def _promote(rules: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    flat = [item for value in args for item in (value if isinstance(value, (list, tuple)) else [value])]
    wide = any(_casts(item) and item.dtype == torch.float32 for item in flat)
    dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
    return _below(op, args, kwargs, lambda value: _cast(value, dtype))


def _fp32_output(rules: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """softmax(x) as softmax(x, dtype=float32): the cast, if there is one, is the kernel's own affair."""
    if _casts(args[0]):
        positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
        at = positional.index("dtype") if "dtype" in positional else len(args)
        if len(args) > at:
            args = (*args[:at], args[at] or torch.float32, *args[at + 1 :])
        else:
            kwargs["dtype"] = kwargs.get("dtype") or torch.float32
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


def _fp32_appended(rules: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """norm(x, p) as norm(x, p, dtype=float32), which is another overload."""
    if _casts(args[0]):
        given = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)} | kwargs
        given = {a.name: given.get(a.name, a.default_value) for a in op._schema.arguments}
        op = overload(FP32_APPENDED[f"norm.{op._overloadname}"])
        args, kwargs = tuple(given.values()), {"dtype": torch.float32}
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


class _WeightCasts:
    """Casts of weights to 16 bits, kept until autocast drops its own: when its outermost context ends.

    autocast's cache is C++'s, and cannot be asked. A tensor is put into it; when that one's cast dies, these go too.
    """

    def __init__(self) -> None:
        self.casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.alive: weakref.ref | None = None

    def __call__(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return [self(item, dtype) for item in value]
        if not _casts(value) or value.dtype == dtype:
            return value
        keeps = (
            value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )
        if not keeps:
            return value.to(dtype)
        if self.alive is None or self.alive() is None:  # dead, and not forgotten: Ctrl+C fell into that
            self.casts.clear()
            self._watch()
        if id(value) not in self.casts:
            self.casts[id(value)] = value, value.to(dtype)
        return self.casts[id(value)][1]

    def _watch(self) -> None:
        with _disable_current_modes(), torch.enable_grad():
            seed = torch.zeros(1, 1, requires_grad=True)
            storage = torch.mm(seed, seed).grad_fn._saved_self.untyped_storage()

        def forget(_: Any) -> None:
            self.alive = None
            self.casts.clear()

        self.alive = weakref.ref(storage, forget)


_weight_casts = _WeightCasts()


def _lower_precision(rules: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    return _below(op, args, kwargs, lambda value: _weight_casts(value, half))


def _kernels() -> dict[tuple[str, Any], Kernel | None]:
    """(AutocastCPU, operator) → kernel, for what CUDA and a CPU cast differently."""
    cpu = {name.removeprefix("aten::") for name in _registered("AutocastCPU") if name.startswith("aten::")}
    ours: dict[str, Kernel | None] = dict.fromkeys(cpu - LOWER_PRECISION)  # not at all
    ours |= dict.fromkeys(LOWER_PRECISION - cpu, _lower_precision)
    ours |= dict.fromkeys(FP32, _fp32) | dict.fromkeys(FP32_OUTPUT, _fp32_output)
    ours |= dict.fromkeys(FP32_APPENDED, _fp32_appended) | dict.fromkeys(PROMOTE, _promote)
    return {("AutocastCPU", op): kernel for name, kernel in ours.items() if (op := overload(name)) is not None}


def _registered(key: str) -> list[str]:
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


CUDAS_LIST = Rule(
    name="autocast",
    what="CUDA's lists of what autocast casts to 16 bits, to fp32, or not at all",
    source="aten/src/ATen/autocast_mode.h and autocast_mode.cpp",
    kernels=_kernels(),
)
