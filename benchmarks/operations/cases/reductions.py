"""Sums and their kin, sorting, and what is drawn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .run import BF16, FP16, FP32, NAMES, Run, of_floats, whole


def reductions() -> Iterator[tuple]:
    shapes = (
        (1000,),
        (100_003,),
        (2**20,),
        (2**24 + 3,),
        (4096, 4096),
        (8, 32768),
        (32768, 8),
        (3, 5, 7),
        (8, 512, 768),
        (1, 50257),
        (8, 50257),
        (65536, 65),
        (33, 4099),
        (7, 1_000_003),
        (1_000_003, 7),
        (2, 64, 40, 50),
    )
    names = [
        "sum",
        "mean",
        "prod",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "logsumexp",
        "any",
        "all",
        "norm",
        "std",
        "var",
        "var_mean",
        "median",
        "max",
        "min",
        "count_nonzero",
        "cumsum",
        "logcumsumexp",
        "cummax",
        "softmax",
        "nansum",
    ]
    full = {"sum", "mean", "amax", "norm", "std", "argmax", "any", "max", "var"}
    for name, shape, dtype in itertools.product(names, shapes, (FP32, BF16)):
        if name not in full and (dtype is BF16 or shape in ((2**24 + 3,), (7, 1_000_003), (1_000_003, 7), (65536, 65))):
            continue
        function = getattr(torch, name)
        end = f"{shape} {NAMES[dtype]}"
        dims: list[Any] = [0, -1] if len(shape) > 1 else [0]
        dims += [(0, 1)] if len(shape) > 2 and name in full - {"argmax", "max", "any"} else []
        dims += [(0, 2, 3)] if len(shape) > 3 and name in full - {"argmax", "max", "any"} else []
        if name not in ("logsumexp", "cumsum", "logcumsumexp", "cummax", "softmax"):
            yield f"{name} {end}", functools.partial(of_floats, function, shape, dtype=dtype)
        for dim in dims:
            along = functools.partial(function, **({"p": 2, "dim": dim} if name == "norm" else {"dim": dim}))
            yield f"{name} {dim} {end}", functools.partial(of_floats, along, shape, dtype=dtype)
    for shape in shapes:
        yield f"sum in fp32 {shape}", functools.partial(of_floats, lambda x: x.sum(dtype=FP32), shape, dtype=BF16)
        yield f"mean autocast {shape}", functools.partial(of_floats, torch.mean, shape, dtype=BF16, autocast=BF16)
        yield f"sum autocast {shape}", functools.partial(of_floats, torch.sum, shape, dtype=BF16, autocast=BF16)
        yield f"norm 1 {shape}", functools.partial(of_floats, lambda x: torch.linalg.vector_norm(x, 1), shape)
        yield (
            f"norm inf {shape}",
            functools.partial(of_floats, lambda x: torch.linalg.vector_norm(x, float("inf")), shape),
        )
        yield (
            f"norm in fp32 {shape}",
            functools.partial(of_floats, lambda x: torch.linalg.vector_norm(x, 2, dtype=FP32), shape, dtype=BF16),
        )
        yield (
            f"sum of transposed {shape}",
            functools.partial(of_floats, lambda x: x.t().sum(0) if x.dim() == 2 else x.sum(), shape),
        )
        yield f"keepdim {shape}", functools.partial(of_floats, lambda x: x.sum(-1, keepdim=True), shape)
        yield f"aminmax {shape}", functools.partial(of_floats, torch.aminmax, shape, backward=False)

    def integers(function: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> Run:
        values = whole(100, *shape).to(dtype)
        return Run(lambda: function(values), backward=False)

    for name, shape, dtype in itertools.product(
        ("sum", "any", "all", "max", "argmax", "cumsum", "prod"), shapes[:8], (torch.int64, torch.int32, torch.bool)
    ):
        function = functools.partial(torch.cumsum, dim=-1) if name == "cumsum" else getattr(torch, name)
        yield f"{name} {shape} {dtype}", integers, function, shape, dtype
    for function in (torch.ne, torch.eq):
        yield f"{function.__name__} sum", integers, lambda t, f=function: f(t, 3).sum(), (8, 4096), torch.int64


def sorting() -> Iterator[tuple]:
    shapes = (
        (100,),
        (4096,),
        (4097,),
        (100_000,),
        (1_000_000,),
        (3_000_000,),
        (8, 100),
        (8, 4097),
        (100, 5000),
        (128, 5000),
        (200, 5000),
        (2000, 129),
        (2000, 1000),
        (4, 1_000_001),
        (8, 50257),
        (256, 50257),
        (33, 17, 19),
    )
    for shape, dtype in itertools.product(shapes, (FP32, BF16)):
        end = f"{shape} {NAMES[dtype]}"
        part = functools.partial(of_floats, dtype=dtype)
        yield f"sort {end}", functools.partial(part, torch.sort, shape)
        yield f"sort descending {end}", functools.partial(part, lambda x: x.sort(-1, descending=True), shape)
        yield f"sort stable {end}", functools.partial(part, lambda x: x.sort(dim=-1, stable=True), shape)
        yield f"argsort {end}", functools.partial(part, torch.argsort, shape)
        for k in (1, 10, 50):
            yield (
                f"topk {k} {end}",
                functools.partial(part, functools.partial(torch.topk, k=k) if k <= shape[-1] else torch.sort, shape),
            )
        if shape[-1] > 1000:
            yield f"topk 1000 {end}", functools.partial(part, functools.partial(torch.topk, k=1000), shape)
        if len(shape) > 1:
            yield f"sort 0 {end}", functools.partial(part, lambda x: x.sort(0), shape)
        yield f"kthvalue {end}", functools.partial(part, lambda x: x.kthvalue(2), shape)
        yield f"median {end}", functools.partial(part, lambda x: x.median(-1), shape)
        yield f"mode {end}", functools.partial(part, lambda x: x.mode(-1) if x.shape[-1] < 2048 else x.max(-1), shape)
        if shape[-1] < 16_000_000 and dtype is FP32:
            yield f"quantile {end}", functools.partial(part, lambda x: torch.quantile(x, 0.5, -1), shape)

    def integers(function: Callable, high: int, *shape: int) -> Run:
        values = whole(high, *shape)
        return Run(lambda: function(values), backward=False)

    for shape, high in itertools.product(((100,), (3000,), (5000,), (200_000,), (64, 512), (2_000_000,)), (50, 10_000)):
        for name, function in (
            ("sort", torch.sort),
            ("argsort", torch.argsort),
            ("unique", torch.unique),
            ("bincount", lambda t: t.flatten().bincount()),
            ("unique inverse", lambda t: torch.unique(t, return_inverse=True)),
            ("unique counts", lambda t: torch.unique(t, return_counts=True)),
            ("unique consecutive", torch.unique_consecutive),
            ("histc", lambda t: t.float().histc(100)),
            ("isin", lambda t: torch.isin(t, t[:10])),
            ("unique dim", lambda t: torch.unique(t, dim=0) if t.numel() < 100_000 else t + 1),
            ("bincount min", lambda t: t.flatten().bincount(minlength=20_000)),
            ("searchsorted", lambda t: torch.searchsorted(torch.arange(100, device="cuda"), t)),
            ("bucketize", lambda t: torch.bucketize(t, torch.arange(100, device="cuda"))),
        ):
            yield f"{name} {shape} {high}", integers, function, high, *shape
    for count in (10, 1000, 5000, 30_000, 100_000, 3_000_000):
        yield (
            f"randperm {count}",
            functools.partial(Run, lambda n=count: torch.randperm(n, device="cuda"), backward=False),
        )
        yield f"arange {count}", functools.partial(Run, lambda n=count: torch.arange(n, device="cuda"), backward=False)
        yield (
            f"linspace {count}",
            functools.partial(Run, lambda n=count: torch.linspace(0, 1, n, device="cuda"), backward=False),
        )
        yield (
            f"randint {count}",
            functools.partial(Run, lambda n=count: torch.randint(9, (n,), device="cuda"), backward=False),
        )
        yield f"rand {count}", functools.partial(Run, lambda n=count: torch.rand(n, device="cuda"), backward=False)

    def draw(rows: int, classes: int, count: int, replacement: bool, dtype: torch.dtype) -> Run:
        weights = torch.ones(rows, classes, device="cuda", dtype=dtype)
        return Run(lambda: torch.multinomial(weights, count, replacement), backward=False)

    for classes, count, replacement, dtype in itertools.product((100, 50257), (1, 10), (True, False), (FP32, FP16)):
        for rows in (1, 8):
            yield (
                f"multinomial {rows}×{classes} {count} {replacement} {NAMES[dtype]}",
                draw,
                rows,
                classes,
                count,
                replacement,
                dtype,
            )
