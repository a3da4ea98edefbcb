"""The flash_attn package's functions: what its kernels keep and what they allocate while they run, and no kernel.

Source, flash_attn 2.7 and 2.8: csrc/flash_attn/flash_api.cpp (mha_fwd, mha_varlen_fwd, mha_bwd, mha_varlen_bwd) for
what is allocated, flash_attn/flash_attn_interface.py (FlashAttnFunc, FlashAttnVarlenFunc) for what is saved. Left out:
what a forward pass without dropout over few blocks accumulates in splits, and deterministic=True's splits.
It is there where a program asks for it and the package is not installed.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from ..language import tr
from .device import ProgramGPU
from .frames import is_program
from .imports import Imports
from .patches import Patches
from .watch import Watch

_LEAST = (8, 0)  # "FlashAttention only supports Ampere GPUs or newer" (flash_api.cpp)
_BLOCK = 128  # rows that seqlen_q is rounded up to


def install(patches: Patches, imports: Imports, watch: Watch) -> None:
    """Let transformers' flash_attention_2, and the program's own `import flash_attn`, find the functions."""
    gpu = watch.gpu

    def models(module: ModuleType) -> None:
        check = getattr(module.PreTrainedModel, "_flash_attn_import_error", None)
        if check is None:
            return  # transformers 4 asks in other ways: only its sdpa and eager attention are followed

        def checked(model: Any, flash_attn_version: int, *args: Any, **kwargs: Any) -> Any:
            if flash_attn_version != 2:
                return check(model, flash_attn_version, *args, **kwargs)
            return _need_ampere(gpu)

        patches.set(module.PreTrainedModel, "_flash_attn_import_error", checked)

    def functions(module: ModuleType) -> None:
        load = getattr(module, "_lazy_imports", None)
        if load is None:
            return

        def loaded(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            if implementation != "flash_attention_2":
                return load(implementation, *args, **kwargs)
            watch.note(
                tr(
                    ko="flash_attention_2: flash_attn의 커널이 할당하는 것만 세고, 커널은 실행하지 않았다",
                    en="flash_attention_2: what the flash_attn package's kernels allocate; none of them is run",
                )
            )
            return flash_attn_func, flash_attn_varlen_func, None, module._pad_input, module._unpad_input

        patches.set(module, "_lazy_imports", loaded)
        for name in ("_flash_fn", "_flash_varlen_fn", "_loaded_implementation"):  # what another GPU's run left there
            if hasattr(module, name):
                patches.set(module, name, None)

    imports.after("transformers.modeling_utils", models)
    imports.after("transformers.modeling_flash_attention_utils", functions)
    imports.stand_in("flash_attn", _package, _asked_by_the_program)


def _need_ampere(gpu: ProgramGPU) -> None:
    if gpu.spec.compute_capability < _LEAST:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def _asked_by_the_program() -> bool:
    """Whether the import that runs stands in the program itself: libraries that look for the package find none."""
    frame = sys._getframe(1)
    while frame is not None:
        if (
            not frame.f_code.co_filename.startswith("<frozen importlib")
            and frame.f_globals.get("__name__") not in _HOOKS
        ):
            return is_program(frame.f_code)
        frame = frame.f_back
    return False


_HOOKS = (__name__, Imports.__module__)


def _package(module: ModuleType) -> None:
    module.__version__ = "2.8.3"
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """q (batch, length, heads, width), k and v (batch, length, key heads, width) → like q."""
    _check(q)
    return _Flash.apply(q, k, v, q.shape[0], False)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """q (tokens, heads, width), k and v (tokens, key heads, width) of several sequences in a row → like q."""
    _check(q)
    return _Flash.apply(q, k, v, cu_seqlens_q.numel() - 1, True)


def _check(tensor: Any) -> None:
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    _need_ampere(tensor.fake_mode.gpu)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class _Flash(torch.autograd.Function):
    """Saves q, k, v, out, softmax_lse and rng_state."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, varlen: bool) -> torch.Tensor:
        width = q.shape[-1]
        if width % 8:
            q, k, v = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (q, k, v))
        out = torch.empty_like(q)
        heads = q.shape[-2]
        shape = (heads, q.shape[0]) if varlen else (batch, heads, q.shape[1])
        softmax_lse = q.new_empty(shape, dtype=torch.float32)
        rng_state = q.new_empty(2, dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, softmax_lse, rng_state)
        ctx.batch, ctx.varlen, ctx.width = batch, varlen, width
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        q, k, v, *_ = ctx.saved_tensors
        width, heads = q.shape[-1], q.shape[-2]
        grad = torch.nn.functional.pad(grad, (0, 8 - ctx.width % 8)) if ctx.width % 8 else grad.contiguous()
        grads = [torch.empty_like(t) for t in (q, k, v)]
        rounded = _up(width, 32) if width <= 192 else 256
        if ctx.varlen:
            rows = q.shape[0] + _BLOCK * ctx.batch
            softmax_d = q.new_empty((heads, rows), dtype=torch.float32)
            dq_accum = q.new_empty((rows, heads, rounded), dtype=torch.float32)
        else:
            rows = _up(q.shape[1], _BLOCK)
            softmax_d = q.new_empty((ctx.batch, heads, rows), dtype=torch.float32)
            dq_accum = q.new_empty((ctx.batch, rows, heads, rounded), dtype=torch.float32)
        if k.shape[-2] != heads:  # each query head's own, summed up over those that share a key head
            expanded = [t.new_empty((*t.shape[:-2], heads, width)) for t in (k, v)]
            for place, part in enumerate(expanded, 1):
                grads[place] = part.view(*part.shape[:-2], k.shape[-2], -1, width).sum(-2)
        del softmax_d, dq_accum
        return *(t[..., : ctx.width] for t in grads), None, None
