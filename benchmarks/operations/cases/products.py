"""Matrix products: warm, the first of a thread or a stream, in 8 bits and grouped."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .attention import attend
from .run import BF16, FP16, FP32, NAMES, Run, of_floats, real, whole


def linear(
    dtype: torch.dtype,
    rows: tuple[int, ...],
    width: int,
    out: int,
    bias: bool = True,
    autocast: torch.dtype | None = None,
    train: tuple[bool, bool] = (True, True),
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    context: Callable[[], Any] = contextlib.nullcontext,
) -> Run:
    weight = real(out, width, dtype=dtype, grad=train[1])
    inputs = [real(*rows, width, dtype=dtype, grad=train[0]), weight]
    if bias:
        inputs.append(real(out, dtype=dtype, grad=train[1]))

    def function(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return F.linear(x if change is None else change(x), *others)

    return Run(function, *inputs, autocast=autocast, context=context)


def products() -> Iterator[tuple]:
    sizes = (
        (1024, 1024, 1024),
        (8192, 4096, 4096),
        (1, 4096, 4096),
        (4096, 4096, 1),
        (17, 33, 65),
        (2048, 768, 50257),
        (3, 5, 7),
        (16, 1024, 4096),
        (4096, 64, 4096),
        (64, 16384, 64),
    )
    for (m, k, n), dtype in itertools.product(sizes, (FP32, BF16, FP16, torch.float64)):
        end = f"{m}×{k}×{n} {NAMES[dtype]}"
        yield f"mm {end}", functools.partial(of_floats, torch.mm, (m, k), (k, n), dtype=dtype)
        yield f"addmm {end}", functools.partial(of_floats, torch.addmm, (n,), (m, k), (k, n), dtype=dtype)
        yield f"linear {end}", functools.partial(linear, dtype, (m,), k, n)
        yield f"linear no bias {end}", functools.partial(linear, dtype, (m,), k, n, False)
        yield f"linear 3d {end}", functools.partial(linear, dtype, (2, -(-m // 2)), k, n)
        yield f"linear 3d no bias {end}", functools.partial(linear, dtype, (2, -(-m // 2)), k, n, False)
        if dtype is FP32:
            for half in (BF16, FP16):
                yield f"linear autocast {end} {NAMES[half]}", functools.partial(linear, dtype, (m,), k, n, True, half)
                yield (
                    f"linear 3d autocast {end} {NAMES[half]}",
                    functools.partial(linear, dtype, (2, -(-m // 2)), k, n, True, half),
                )
    changes = {
        "transposed": lambda x: x.transpose(0, 1),
        "expanded": lambda x: x[:, :1].expand(-1, 8, -1),
        "sliced": lambda x: x[..., 1:, :],
        "permuted": lambda x: x.permute(1, 0, 2),
        "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "every other": lambda x: x[:, ::2],
    }
    for (label, change), dtype, bias in itertools.product(changes.items(), (FP32, BF16), (True, False)):
        name = f"linear of {label} {NAMES[dtype]} {'bias' if bias else ''}"
        yield name, functools.partial(linear, dtype, (16, 256), 512, 768, bias, change=change)
    for train, dtype in itertools.product(((True, False), (False, True)), (FP32, BF16)):
        yield (
            f"linear trains {train} {NAMES[dtype]}",
            functools.partial(linear, dtype, (4, 512), 1024, 768, train=train),
        )
    for dtype in (FP32, BF16, FP16):
        end = NAMES[dtype]
        part = functools.partial(of_floats, dtype=dtype)
        yield f"bmm {end}", functools.partial(part, torch.bmm, (16, 512, 64), (16, 64, 512))
        yield f"bmm ragged {end}", functools.partial(part, torch.bmm, (7, 33, 65), (7, 65, 31))
        yield f"baddbmm {end}", functools.partial(part, torch.baddbmm, (16, 512, 512), (16, 512, 64), (16, 64, 512))
        yield f"baddbmm row {end}", functools.partial(part, torch.baddbmm, (1, 1, 512), (16, 512, 64), (16, 64, 512))
        yield f"matmul 4d {end}", functools.partial(part, torch.matmul, (2, 8, 512, 64), (2, 8, 64, 512))
        yield f"matmul shared {end}", functools.partial(part, torch.matmul, (2, 8, 512, 64), (64, 512))
        yield f"matmul broadcast {end}", functools.partial(part, torch.matmul, (2, 8, 512, 64), (8, 64, 512))
        yield f"matmul broadcast rows {end}", functools.partial(part, torch.matmul, (512, 64), (8, 64, 512))
        yield (
            f"q kᵀ {end}",
            functools.partial(part, lambda q, k: q @ k.transpose(-1, -2), (2, 8, 512, 64), (2, 8, 512, 64)),
        )
        heads = lambda q, k: q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2)  # noqa: E731
        yield f"q kᵀ of projections {end}", functools.partial(part, heads, (2, 512, 8, 64), (2, 512, 8, 64))
        yield f"mv {end}", functools.partial(part, torch.mv, (4096, 1024), (1024,))
        yield f"addmv {end}", functools.partial(part, torch.addmv, (4096,), (4096, 1024), (1024,))
        yield f"dot {end}", functools.partial(part, torch.dot, (100_000,), (100_000,))
        yield f"outer {end}", functools.partial(part, torch.outer, (4096,), (1024,))
        yield f"addmm matrix {end}", functools.partial(part, torch.addmm, (512, 256), (512, 128), (128, 256))
        yield f"addbmm {end}", functools.partial(part, torch.addbmm, (64, 32), (8, 64, 16), (8, 16, 32))
        mms = lambda x, a, b: (x @ a) @ b  # noqa: E731
        yield f"lora {end}", functools.partial(part, mms, (4, 512, 1024), (1024, 16), (16, 4096))
        gelu = lambda b, x, w: torch._addmm_activation(b, x, w, use_gelu=True)  # noqa: E731
        yield f"addmm gelu {end}", functools.partial(part, gelu, (4096,), (512, 1024), (1024, 4096), backward=False)
        for equation, *shapes in (
            ("bhqd,bhkd->bhqk", (2, 8, 256, 64), (2, 8, 256, 64)),
            ("bhqk,bkhd->bqhd", (2, 8, 256, 256), (2, 256, 8, 64)),
            ("bld,de->ble", (2, 512, 256), (256, 1024)),
            ("bqhd,bkhd->bhqk", (2, 256, 8, 64), (2, 256, 8, 64)),
            ("i,j->ij", (1000,), (2000,)),
            ("bij->bji", (4, 300, 500)),
            ("bii->b", (8, 300, 300)),
        ):
            yield (
                f"einsum {equation} {end}",
                functools.partial(part, functools.partial(torch.einsum, equation), *shapes),
            )
        yield (
            f"multi_dot {end}",
            functools.partial(part, lambda *m: torch.linalg.multi_dot(m), (300, 40), (40, 500), (500, 20)),
        )
        yield f"bilinear {end}", functools.partial(part, F.bilinear, (64, 32), (64, 48), (16, 32, 48))
        yield f"cdist {end}", functools.partial(part, torch.cdist, (4, 300, 32), (4, 200, 32))
    yield "cdist small", functools.partial(of_floats, torch.cdist, (20, 5), (10, 5))
    yield "cdist p1", functools.partial(of_floats, functools.partial(torch.cdist, p=1.0), (4, 300, 32), (4, 200, 32))
    for name in ("matmul", "bmm", "einsum"):
        function = functools.partial(torch.einsum, "bij,bjk->bik") if name == "einsum" else getattr(torch, name)
        for half in (BF16, FP16):
            yield (
                f"{name} autocast {NAMES[half]}",
                functools.partial(of_floats, function, (8, 256, 64), (8, 64, 512), autocast=half),
            )


@contextlib.contextmanager
def _blas(library: str) -> Iterator[None]:
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library("default")


def cold_products() -> Iterator[tuple]:
    """The first product of a thread or a stream, which makes its workspace."""

    def cold(make: Callable[[], Run]) -> Run:
        run = make()
        torch._C._cuda_clearCublasWorkspaces()
        return run

    def streams(dtype: torch.dtype, bias: bool) -> Run:
        run, other = linear(dtype, (512,), 1024, 768, bias), torch.cuda.Stream()

        def on_the_other(*inputs: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(other):
                return run.function(*inputs)

        return Run(on_the_other, *run.inputs)

    for dtype, bias in itertools.product((FP32, BF16, FP16, torch.float64), (True, False)):
        end = f"{NAMES[dtype]} {'bias' if bias else ''}"
        make = functools.partial(linear, dtype, (512,), 1024, 768, bias)
        yield f"linear {end}", cold, make
        yield f"linear 3d {end}", cold, functools.partial(linear, dtype, (2, 256), 1024, 768, bias)
        yield f"linear on a stream {end}", streams, dtype, bias
        for library in ("cublas", "cublaslt"):
            preferred = functools.partial(make, context=functools.partial(_blas, library))
            yield f"linear {library} {end}", cold, preferred
    for name, shapes in (
        ("bmm", ((8, 64, 32), (8, 32, 64))),
        ("baddbmm", ((8, 64, 64), (8, 64, 32), (8, 32, 64))),
        ("mv", ((64, 32), (32,))),
        ("dot", ((1000,), (1000,))),
        ("addmv", ((64,), (64, 32), (32,))),
    ):
        yield name, cold, functools.partial(of_floats, getattr(torch, name), *shapes)
    yield "attention fp32", cold, functools.partial(attend, FP32, backend="MATH")
    yield "infer", cold, functools.partial(of_floats, torch.mm, (64, 32), (32, 64), backward=False)


def low_precision() -> Iterator[tuple]:
    def scaled(rowwise: bool, bias: bool, out: torch.dtype, fast: bool) -> Run:
        m, k, n = 256, 1024, 512
        a = real(m, k).to(torch.float8_e4m3fn)
        b = real(n, k).to(torch.float8_e4m3fn).t()
        scales = (
            (torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda"))
            if rowwise
            else (torch.ones((), device="cuda"), torch.ones((), device="cuda"))
        )
        extra = real(n, dtype=out) if bias else None
        return Run(
            lambda: torch._scaled_mm(a, b, *scales, bias=extra, out_dtype=out, use_fast_accum=fast), backward=False
        )

    for rowwise, bias, out, fast in itertools.product((False, True), (False, True), (BF16, FP16, FP32), (False, True)):
        yield (
            f"_scaled_mm {'rows' if rowwise else 'tensor'} {bias} {NAMES[out]} {fast}",
            scaled,
            rowwise,
            bias,
            out,
            fast,
        )

    def int_mm(m: int, k: int, n: int) -> Run:
        a, b = whole(100, m, k, dtype=torch.int8), whole(100, k, n, dtype=torch.int8)
        return Run(lambda: torch._int_mm(a, b), backward=False)

    for shape in ((256, 1024, 512), (32, 4096, 4096), (17, 64, 8)):
        yield f"_int_mm {shape}", int_mm, *shape

    def grouped(dtype: torch.dtype, kind: str, grad: bool) -> Run:
        experts, width, out, rows = 8, 256, 512, 1024
        ends = torch.arange(1, experts + 1, dtype=torch.int32).mul(rows // experts).cuda()
        a = (
            real(experts, 128, width, dtype=dtype, grad=grad)
            if kind == "3d"
            else real(rows, width, dtype=dtype, grad=grad)
        )
        b = real(experts, width, out, dtype=dtype, grad=grad)
        offsets = None if kind == "3d" else ends
        return Run(lambda a, b: F.grouped_mm(a, b, offs=offsets), a, b, backward=grad)

    for dtype, kind, grad in itertools.product((BF16, FP16, FP32), ("2d", "3d"), (True, False)):
        yield f"grouped_mm {NAMES[dtype]} {kind} {'train' if grad else 'infer'}", grouped, dtype, kind, grad
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool):
        yield (
            f"to {dtype}",
            functools.partial(of_floats, functools.partial(_to, dtype=dtype), (1000, 999), backward=False),
        )


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)
