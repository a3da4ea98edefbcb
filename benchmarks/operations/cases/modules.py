"""Convolutions and recurrent layers."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .run import BF16, FP16, FP32, NAMES, Run, real


@contextlib.contextmanager
def _searching(on: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _module(
    kind: str,
    shape: tuple[int, ...],
    *args: Any,
    dtype: torch.dtype = FP32,
    benchmark: bool = False,
    autocast: torch.dtype | None = None,
    grad: bool = True,
    last: bool = False,
    **kwargs: Any,
) -> Run:
    made = getattr(nn, kind)(*args, **kwargs).cuda().to(dtype)
    x = real(*shape, dtype=dtype)
    if last:
        made, x = made.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    context = functools.partial(_searching, True) if benchmark else contextlib.nullcontext
    return Run(
        made, x.requires_grad_(grad), parameters=made.parameters(), context=context, autocast=autocast, backward=grad
    )


def convolutions() -> Iterator[tuple]:
    layers: dict[str, tuple] = {
        "1d k4 depthwise": ("Conv1d", (4, 512, 1024), 512, 512, 4, 1, 3, 1, 512),
        "1d k3": ("Conv1d", (4, 256, 1000), 256, 512, 3),
        "1d k1": ("Conv1d", (4, 256, 1000), 256, 512, 1),
        "1d k10 s5": ("Conv1d", (4, 1, 16000), 1, 512, 10, 5),
        "2d k3": ("Conv2d", (8, 64, 56, 56), 64, 128, 3, 1, 1),
        "2d k7 s2": ("Conv2d", (8, 3, 224, 224), 3, 64, 7, 2, 3),
        "2d k1": ("Conv2d", (8, 64, 56, 56), 64, 256, 1),
        "2d patch": ("Conv2d", (8, 3, 224, 224), 3, 768, 16, 16),
        "2d depthwise": ("Conv2d", (8, 96, 56, 56), 96, 96, 7, 1, 3, 1, 96),
        "2d odd": ("Conv2d", (3, 17, 31, 29), 17, 33, 5),
        "2d groups": ("Conv2d", (8, 64, 56, 56), 64, 64, 3, 1, 1, 1, 4),
        "2d dilated": ("Conv2d", (8, 64, 56, 56), 64, 64, 3, 1, 2, 2),
        "3d k3": ("Conv3d", (2, 16, 8, 32, 32), 16, 32, 3, 1, 1),
        "3d patch": ("Conv3d", (2, 3, 8, 112, 112), 3, 256, (2, 16, 16), (2, 16, 16)),
        "transposed": ("ConvTranspose2d", (4, 128, 28, 28), 128, 64, 2, 2),
        "transposed 1d": ("ConvTranspose1d", (4, 128, 500), 128, 64, 4, 2),
    }
    for (name, (kind, shape, *args)), dtype in itertools.product(layers.items(), (FP32, BF16, FP16)):
        end = f"{name} {NAMES[dtype]}"
        part = functools.partial(_module, kind, shape, *args, dtype=dtype)
        yield end, part
        yield f"{end} benchmark", functools.partial(part, benchmark=True)
        yield f"{end} infer", functools.partial(part, grad=False)
        yield f"{end} no bias", functools.partial(part, bias=False)
        if dtype is FP32:
            yield f"{end} autocast", functools.partial(part, autocast=BF16)
        if len(shape) == 4:
            yield f"{end} channels last", functools.partial(part, last=True)
    for name in ("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "Upsample", "PixelShuffle", "ZeroPad2d", "Unfold"):
        argument = {"Upsample": None}.get(name, 2)
        for dtype in (FP32, BF16):
            kwargs = {"scale_factor": 2} if name == "Upsample" else {}
            args = () if argument is None else (argument,)
            yield (
                f"{name} {NAMES[dtype]}",
                functools.partial(_module, name, (4, 64, 56, 56), *args, dtype=dtype, **kwargs),
            )


def recurrences() -> Iterator[tuple]:
    def recurrent(kind: str, dtype: torch.dtype, layers: int, dropout: float, both: bool, grad: bool) -> Run:
        module = (
            getattr(nn, kind)(256, 512, layers, dropout=dropout, bidirectional=both, batch_first=True).cuda().to(dtype)
        )
        return Run(
            lambda x: module(x)[0],
            real(16, 100, 256, dtype=dtype, grad=grad),
            parameters=module.parameters(),
            backward=grad,
        )

    for kind, dtype, (layers, dropout), both, grad in itertools.product(
        ("LSTM", "GRU", "RNN"), (FP32, BF16, FP16), ((1, 0.0), (2, 0.1)), (False, True), (True, False)
    ):
        yield (
            f"{kind} {NAMES[dtype]} {layers} {dropout} {both} {'train' if grad else 'infer'}",
            recurrent,
            kind,
            dtype,
            layers,
            dropout,
            both,
            grad,
        )

    def cell(kind: str) -> Run:
        module = getattr(nn, kind)(256, 512).cuda()
        return Run(module, real(16, 256, grad=True), parameters=module.parameters())

    for kind in ("LSTMCell", "GRUCell", "RNNCell"):
        yield kind, cell, kind

    def packed() -> Run:
        module = nn.LSTM(64, 128, batch_first=True).cuda()
        lengths = torch.tensor([50, 40, 30, 20])

        def function(x: torch.Tensor) -> torch.Tensor:
            sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(module(sequence)[0], batch_first=True)[0]

        return Run(function, real(4, 50, 64, grad=True), parameters=module.parameters())

    yield "packed LSTM", packed
