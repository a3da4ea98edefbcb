"""Scaled dot-product attention as PyTorch chooses its kernel, and with the kernel forced."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .run import BF16, FP16, FP32, NAMES, Run, ones_and_zeros, real


def attend(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int, int, int] = (2, 8, 8, 512, 512, 64, 64),
    mask: tuple | None = None,
    backend: str | None = None,
    grad: bool = True,
    transposed: bool = False,
    autocast: torch.dtype | None = None,
    **kwargs: Any,
) -> Run:
    """shape: batch, heads, heads of keys, length, length of keys, head_dim, value_dim. mask: (kind, *shape)."""
    batch, heads, key_heads, length, key_length, dim, value_dim = shape

    def operand(count: int, rows: int, width: int) -> torch.Tensor:
        if transposed:  # as projections give it
            return real(batch, rows, count, width, dtype=dtype).transpose(1, 2).requires_grad_(grad)
        return real(batch, count, rows, width, dtype=dtype, grad=grad)

    inputs = operand(heads, length, dim), operand(key_heads, key_length, dim), operand(key_heads, key_length, value_dim)
    if mask is not None:
        kind, *sizes = mask
        made = ones_and_zeros(*sizes) if kind == "bool" else real(*sizes, dtype=dtype, grad=kind == "grad")
        if kind == "expanded":
            made = made.expand(batch, heads, length, key_length)
        kwargs["attn_mask"] = made
    context = contextlib.nullcontext
    if backend is not None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context = functools.partial(sdpa_kernel, getattr(SDPBackend, backend))
    attention = functools.partial(F.scaled_dot_product_attention, **kwargs)
    return Run(attention, *inputs, backward=grad, context=context, autocast=autocast)


def attention() -> Iterator[tuple]:
    for dtype, dim, grad in itertools.product((FP32, BF16, FP16), (64, 80, 96, 128, 256, 40, 36, 192, 100), (1, 0)):
        shape = (2, 8, 8, 512, 512, dim, dim)
        for label, settings in (
            ("", {}),
            ("causal", {"is_causal": True}),
            ("bool mask", {"mask": ("bool", 2, 1, 512, 512)}),
            ("float mask", {"mask": ("float", 2, 8, 512, 512)}),
        ):
            name = f"{NAMES[dtype]} {dim} {label} {'train' if grad else 'infer'}"
            yield name, functools.partial(attend, dtype, shape, grad=bool(grad), **settings)
    shapes = {
        "long": (1, 4, 4, 2048, 2048, 64, 64),
        "ragged": (3, 5, 5, 509, 509, 64, 64),
        "cross": (2, 8, 8, 77, 333, 64, 64),
        "decode": (2, 8, 8, 1, 777, 128, 128),
        "one key": (2, 8, 8, 512, 1, 64, 64),
        "two": (2, 8, 8, 2, 2, 64, 64),
        "long decode": (1, 4, 4, 1, 8192, 128, 128),
        "few rows": (1, 4, 4, 16, 8192, 128, 128),
        "wide value": (2, 8, 8, 512, 512, 64, 128),
        "mla": (2, 8, 8, 512, 512, 192, 128),
        "big": (8, 32, 32, 1024, 1024, 128, 128),
    }
    for (label, shape), dtype, grad in itertools.product(shapes.items(), (FP32, BF16, FP16), (True, False)):
        name = f"{label} {NAMES[dtype]} {'train' if grad else 'infer'}"
        yield name, functools.partial(attend, dtype, shape, grad=grad)
        if shape[3] > 1 and label != "one key":
            yield f"{name} causal", functools.partial(attend, dtype, shape, grad=grad, is_causal=True)
        mask = ("bool", shape[0], 1, shape[3], shape[4])
        yield f"{name} bool mask", functools.partial(attend, dtype, shape, grad=grad, mask=mask)
    for dtype, grad in itertools.product((FP32, BF16, FP16), (True, False)):
        name = f"{NAMES[dtype]} {'train' if grad else 'infer'}"
        part = functools.partial(attend, dtype, grad=grad)
        yield f"transposed {name}", functools.partial(part, transposed=True, is_causal=True)
        yield f"transposed mask {name}", functools.partial(part, transposed=True, mask=("bool", 2, 1, 512, 512))
        for label, mask in (
            ("per head", ("bool", 2, 8, 512, 512)),
            ("one row", ("bool", 2, 1, 1, 512)),
            ("2d", ("bool", 512, 512)),
            ("expanded", ("expanded", 1, 1, 512, 512)),
            ("trained", ("grad", 2, 8, 512, 512)),
            ("trained for all", ("grad", 1, 1, 512, 512)),
            ("float one row", ("float", 2, 1, 1, 512)),
        ):
            yield f"mask {label} {name}", functools.partial(part, mask=mask)
        for keys in (509, 505, 516, 511):
            odd = (2, 8, 8, 512, keys, 64, 64)
            for kind in ("bool", "float"):
                yield f"{kind} mask {keys} {name}", functools.partial(part, odd, mask=(kind, 2, 1, 512, keys))
        for heads in (1, 2):
            gqa = functools.partial(part, (2, 8, heads, 512, 512, 128, 128), enable_gqa=True)
            yield f"gqa {heads} {name}", gqa
            yield f"gqa {heads} causal {name}", functools.partial(gqa, is_causal=True)
            yield f"gqa {heads} mask {name}", functools.partial(gqa, mask=("bool", 2, 1, 512, 512))
        for p in (0.1, 0.25):
            yield f"dropout {p} {name}", functools.partial(part, dropout_p=p)
            yield f"dropout {p} causal {name}", functools.partial(part, dropout_p=p, is_causal=True)
            yield f"dropout {p} mask {name}", functools.partial(part, dropout_p=p, mask=("bool", 2, 1, 512, 512))
        yield f"mask and causal {name}", functools.partial(part, mask=("bool", 2, 1, 512, 512), is_causal=True)
        yield f"scale {name}", functools.partial(part, scale=0.3)
    for half in (BF16, FP16):
        part = functools.partial(attend, FP32, autocast=half)
        yield f"autocast {NAMES[half]}", part
        yield f"autocast {NAMES[half]} causal", functools.partial(part, is_causal=True)
        yield f"autocast {NAMES[half]} mask", functools.partial(part, mask=("bool", 2, 1, 512, 512))
        yield f"autocast {NAMES[half]} float mask", functools.partial(part, mask=("float", 2, 1, 512, 512))

    def three_dimensions(dtype: torch.dtype) -> Run:
        return Run(F.scaled_dot_product_attention, *(real(8, 512, 64, dtype=dtype, grad=True) for _ in range(3)))

    def multihead(dtype: torch.dtype, **kwargs: Any) -> Run:
        module = nn.MultiheadAttention(512, 8, batch_first=True, device="cuda", dtype=dtype)
        x = real(4, 256, 512, dtype=dtype, grad=True)
        return Run(lambda x: module(x, x, x, **kwargs)[0], x, parameters=module.parameters())

    def encoder(train: bool) -> Run:
        module = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, device="cuda").train(train)
        return Run(module, real(4, 256, 512, grad=train), parameters=module.parameters(), backward=train)

    for dtype in (FP32, BF16):
        yield f"3d {NAMES[dtype]}", three_dimensions, dtype
        yield f"MultiheadAttention {NAMES[dtype]}", multihead, dtype
        yield f"MultiheadAttention no weights {NAMES[dtype]}", functools.partial(multihead, dtype, need_weights=False)
    yield "TransformerEncoderLayer train", encoder, True
    yield "TransformerEncoderLayer infer", encoder, False


def forced() -> Iterator[tuple]:
    backends = {
        "flash": "FLASH_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
        "math": "MATH",
        "cudnn": "CUDNN_ATTENTION",
    }
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}),
        ("causal", {"is_causal": True}),
        ("bool mask", {"mask": ("bool", 2, 1, 512, 512)}),
        ("float mask", {"mask": ("float", 2, 1, 512, 512)}),
        ("trained mask", {"mask": ("grad", 2, 8, 512, 512)}),
        ("dropout", {"dropout_p": 0.1}),
        ("dropout causal", {"dropout_p": 0.25, "is_causal": True}),
        ("transposed causal", {"transposed": True, "is_causal": True}),
        ("infer", {"grad": False}),
    )
    for (name, backend), dtype, dim in itertools.product(
        backends.items(), (BF16, FP16, FP32), (64, 128, 80, 96, 256, 36, 192)
    ):
        part = functools.partial(attend, dtype, (2, 8, 8, 512, 512, dim, dim), backend=backend)
        for label, settings in variants:
            yield f"{name} {NAMES[dtype]} {dim} {label}", functools.partial(part, **settings)
    for (name, backend), dtype, grad in itertools.product(backends.items(), (BF16, FP32), (True, False)):
        part = functools.partial(attend, dtype, backend=backend, grad=grad)
        end = f"{name} {NAMES[dtype]} {'train' if grad else 'infer'}"
        for heads, causal in itertools.product((1, 2), (True, False)):
            gqa = functools.partial(part, (2, 8, heads, 512, 512, 128, 128), enable_gqa=True, is_causal=causal)
            yield f"gqa {heads} {causal} {end}", gqa
        for label, shape in (
            ("ragged", (3, 5, 5, 509, 509, 64, 64)),
            ("cross", (2, 8, 8, 77, 333, 64, 64)),
            ("decode", (2, 8, 8, 1, 777, 128, 128)),
            ("long", (1, 4, 4, 4096, 4096, 64, 64)),
            ("long decode", (1, 4, 4, 1, 8192, 128, 128)),
            ("wide value", (2, 8, 8, 512, 512, 64, 128)),
        ):
            yield f"{label} {end}", functools.partial(part, shape)
