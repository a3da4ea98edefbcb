"""Embeddings, norms and losses."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .run import BF16, FP16, FP32, NAMES, Run, of_floats, real, whole


def embeddings() -> Iterator[tuple]:
    def embedding(dtype: torch.dtype, rows: int, width: int, count: tuple[int, ...], high: int, **kwargs: Any) -> Run:
        ids = whole(high, *count)
        return Run(lambda w: F.embedding(ids, w, **kwargs), real(rows, width, dtype=dtype, grad=True))

    for dtype in (FP32, BF16, FP16):
        end = NAMES[dtype]
        for count in ((5,), (4, 512), (3071,), (3072,), (3073,), (8, 512), (16, 1024), (1, 100_001)):
            part = functools.partial(embedding, dtype, 50257, 768, count)
            yield f"{count} {end}", part, 50257
            yield f"{count} few tokens {end}", part, 100
            yield f"{count} padding {end}", functools.partial(part, 50257, padding_idx=0)
            yield f"{count} by frequency {end}", functools.partial(part, 50257, scale_grad_by_freq=True)
        yield f"narrow {end}", functools.partial(embedding, dtype, 1000, 33, (8, 1024), 1000)
        yield f"few rows {end}", functools.partial(embedding, dtype, 7, 64, (8, 1024), 7)
        yield f"one row {end}", functools.partial(embedding, dtype, 2, 768, (8, 1024), 1)
        yield f"max_norm {end}", functools.partial(embedding, dtype, 1000, 64, (8, 128), 1000, max_norm=1.0)
        yield f"sparse {end}", functools.partial(embedding, dtype, 1000, 64, (8, 128), 1000, sparse=True)

    def bag(mode: str, dtype: torch.dtype, count: int) -> Run:
        ids, offsets = whole(1000, count), torch.arange(0, count, 10).cuda()
        return Run(lambda w: F.embedding_bag(ids, w, offsets, mode=mode), real(1000, 64, dtype=dtype, grad=True))

    for mode, dtype, count in itertools.product(("sum", "mean", "max"), (FP32, BF16), (1000, 8000)):
        yield f"bag {mode} {NAMES[dtype]} {count}", bag, mode, dtype, count

    def one_hot(count: int) -> Run:
        ids = whole(50, count)
        return Run(lambda: F.one_hot(ids, 50), backward=False)

    yield "one_hot", one_hot, 5000


def norms() -> Iterator[tuple]:
    def layer(
        dtype: torch.dtype, rows: tuple[int, ...], width: int, affine: str, autocast: torch.dtype | None = None
    ) -> Run:
        x = real(*rows, width, dtype=dtype, grad=True)
        weights = [real(width, dtype=dtype, grad=True) for _ in affine]
        return Run(lambda x, *w: F.layer_norm(x, (width,), *w), x, *weights, autocast=autocast)

    def rms(
        dtype: torch.dtype,
        rows: tuple[int, ...],
        width: int,
        weight: bool,
        autocast: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> Run:
        x = real(*rows, width, dtype=dtype, grad=True)
        weights = [real(width, dtype=weight_dtype or dtype, grad=True)] if weight else []
        return Run(lambda x, *w: F.rms_norm(x, (width,), *w), x, *weights, autocast=autocast)

    widths = (
        (768, (8, 512)),
        (4096, (4, 2048)),
        (64, (2048,)),
        (50, (3, 7)),
        (1025, (999,)),
        (16384, (64,)),
        (5120, (1,)),
    )
    for dtype, (width, rows) in itertools.product((FP32, BF16, FP16), widths):
        end = f"{rows}×{width} {NAMES[dtype]}"
        for affine in ("wb", "w", ""):
            yield f"layer_norm {affine} {end}", layer, dtype, rows, width, affine
        for weight in (True, False):
            yield f"rms_norm {weight} {end}", rms, dtype, rows, width, weight
        if dtype is FP32:
            yield f"layer_norm autocast {end}", layer, dtype, rows, width, "wb", BF16
            yield f"rms_norm autocast {end}", rms, dtype, rows, width, True, BF16
    yield "layer_norm autocast bf16 input", layer, BF16, (8, 512), 768, "wb", BF16
    yield "rms_norm autocast bf16 input", rms, BF16, (8, 512), 768, True, BF16
    yield "rms_norm fp32 weight", rms, BF16, (8, 512), 768, True, None, FP32
    permuted = lambda x, w: F.layer_norm(x.transpose(0, 1), (768,), w)  # noqa: E731
    yield "layer_norm of transposed", functools.partial(of_floats, permuted, (8, 512, 768), (768,))
    permuted_rms = lambda x, w: F.rms_norm(x.transpose(0, 1), (768,), w)  # noqa: E731
    yield "rms_norm of transposed", functools.partial(of_floats, permuted_rms, (8, 512, 768), (768,))

    def by_hand(dtype: torch.dtype) -> Run:
        def llama(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            h = x.to(FP32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            return w * h.to(x.dtype)

        return Run(llama, real(4, 1024, 2048, dtype=dtype, grad=True), real(2048, dtype=dtype, grad=True))

    def module(kind: str, shape: tuple[int, ...], dtype: torch.dtype, train: bool = True, **kwargs: Any) -> Run:
        made = getattr(nn, kind)(**kwargs).cuda().to(dtype).train(train)
        return Run(made, real(*shape, dtype=dtype, grad=True), parameters=made.parameters())

    for dtype in (FP32, BF16, FP16):
        end = NAMES[dtype]
        yield f"llama's rms norm {end}", by_hand, dtype
        for shape in ((4, 64, 32, 32), (2, 320, 17, 19), (8, 64)):
            for affine in (True, False):
                yield (
                    f"GroupNorm {shape} {affine} {end}",
                    functools.partial(
                        module, "GroupNorm", shape, dtype, num_groups=32, num_channels=shape[1], affine=affine
                    ),
                )
            dims = {2: 1, 4: 2}[len(shape)]
            for train in (True, False):
                yield (
                    f"BatchNorm {shape} {train} {end}",
                    functools.partial(module, f"BatchNorm{dims}d", shape, dtype, train, num_features=shape[1]),
                )
        yield (
            f"InstanceNorm {end}",
            functools.partial(module, "InstanceNorm2d", (4, 64, 32, 32), dtype, num_features=64, affine=True),
        )
        yield f"normalize {end}", functools.partial(of_floats, F.normalize, (8, 512, 64), dtype=dtype)


def losses() -> Iterator[tuple]:
    def cross(
        dtype: torch.dtype,
        rows: int,
        classes: int,
        *,
        cast: bool = False,
        weighted: bool = False,
        ignored: bool = False,
        autocast: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Run:
        targets = whole(classes, rows)
        if ignored:
            targets = torch.where(torch.arange(rows).cuda() % 3 == 0, -100, targets)
        if weighted:
            kwargs["weight"] = torch.ones(classes, device="cuda", dtype=dtype)

        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x.float() if cast else x, targets, **kwargs)

        return Run(loss, real(rows, classes, dtype=dtype, grad=True), autocast=autocast)

    for dtype, (rows, classes) in itertools.product(
        (FP32, BF16, FP16), ((2048, 50257), (8192, 32000), (100, 1000), (7, 3))
    ):
        end = f"{rows}×{classes} {NAMES[dtype]}"
        part = functools.partial(cross, dtype, rows, classes)
        yield f"cross_entropy {end}", part
        yield f"cross_entropy ignored {end}", functools.partial(part, ignored=True)
        yield f"cross_entropy sum {end}", functools.partial(part, reduction="sum")
        yield f"cross_entropy none {end}", functools.partial(part, reduction="none")
        yield f"cross_entropy smooth {end}", functools.partial(part, label_smoothing=0.1)
        yield f"cross_entropy weighted {end}", functools.partial(part, weighted=True)
        yield f"cross_entropy weighted smooth {end}", functools.partial(part, weighted=True, label_smoothing=0.1)
        yield f"cross_entropy autocast {end}", functools.partial(part, autocast=BF16)
        if dtype is not FP32:
            yield f"cross_entropy cast {end}", functools.partial(part, cast=True)
        for name in ("softmax", "log_softmax"):
            plain, typed = (functools.partial(getattr(F, name), dim=-1, **k) for k in ({}, {"dtype": FP32}))
            yield f"{name} {end}", functools.partial(of_floats, plain, (rows, classes), dtype=dtype)
            yield f"{name} in fp32 {end}", functools.partial(of_floats, typed, (rows, classes), dtype=dtype)
            yield (
                f"{name} autocast {end}",
                functools.partial(of_floats, plain, (rows, classes), dtype=dtype, autocast=BF16),
            )
            other = functools.partial(getattr(F, name), dim=0)
            yield f"{name} of rows {end}", functools.partial(of_floats, other, (rows, classes), dtype=dtype)
    for dtype in (FP32, BF16):
        end = NAMES[dtype]
        shapes = ((512, 1024), (512, 1024))
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy_with_logits",
            "kl_div",
        ):
            for reduction in ("mean", "none"):
                loss = functools.partial(getattr(F, name), reduction=reduction)
                yield f"{name} {reduction} {end}", functools.partial(of_floats, loss, *shapes, dtype=dtype)
        yield f"cosine_similarity {end}", functools.partial(of_floats, F.cosine_similarity, *shapes, dtype=dtype)
        yield f"logsigmoid {end}", functools.partial(of_floats, F.logsigmoid, shapes[0], dtype=dtype)

        def causal(dtype: torch.dtype = dtype) -> Run:
            ids = whole(32000, 4, 512)
            labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
            return Run(
                lambda x: F.cross_entropy(x.float().view(-1, 32000), labels.view(-1)),
                real(4, 512, 32000, dtype=dtype, grad=True),
            )

        def shifted(dtype: torch.dtype = dtype) -> Run:
            ids = whole(32000, 4, 512)
            return Run(
                lambda x: F.cross_entropy(x[:, :-1].reshape(-1, 32000), ids[:, 1:].reshape(-1)),
                real(4, 512, 32000, dtype=dtype, grad=True),
            )

        def gathered(dtype: torch.dtype = dtype) -> Run:
            ids = whole(32000, 4, 512, 1)
            return Run(
                lambda x: F.log_softmax(x, -1).gather(-1, ids).squeeze(-1), real(4, 512, 32000, dtype=dtype, grad=True)
            )

        yield f"causal lm {end}", causal
        yield f"shifted lm {end}", shifted
        yield f"gathered log_softmax {end}", gathered
    image = lambda x: F.cross_entropy(x, torch.zeros(4, 32, 32, dtype=torch.int64, device="cuda"))  # noqa: E731
    yield "cross_entropy 2d", functools.partial(of_floats, image, (4, 10, 32, 32))
    soft = lambda x: F.cross_entropy(x, torch.ones_like(x))  # noqa: E731
    yield "cross_entropy of probabilities", functools.partial(of_floats, soft, (512, 1000))
