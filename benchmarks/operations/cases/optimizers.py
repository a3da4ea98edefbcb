"""Optimizer steps, clipping, foreach functions and loss scaling."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .run import BF16, FP32, NAMES, Run, mark, real

SHAPES = ((2000, 512), (512, 512), (512, 2048), (2048, 512), (512,), (512,), (2048,), (1,), (33, 7), (3, 5, 7))


class Step:
    """An optimizer's step on fresh gradients; the first one makes its state."""

    def __init__(self, step: Callable[[], Any], parameters: list[torch.Tensor]):
        self.step, self.parameters = step, parameters
        self.reset()

    def __call__(self) -> None:
        self.step()
        mark()

    def reset(self) -> None:
        """Gradients, as backward leaves them."""
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)


def fresh_weights(dtype: torch.dtype, shapes: tuple = SHAPES) -> list[torch.Tensor]:
    return [nn.Parameter(real(*shape, dtype=dtype)) for shape in shapes]


def optimizers() -> Iterator[tuple]:
    def step(kind: str, dtype: torch.dtype, **kwargs: Any) -> Step:
        shapes = tuple(shape for shape in SHAPES if len(shape) == 2) if kind == "Muon" else SHAPES
        weights = fresh_weights(dtype, shapes)
        return Step(getattr(torch.optim, kind)(weights, lr=0.001, **kwargs).step, weights)

    loops: dict[str, dict[str, Any]] = {
        "": {},
        "loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    settings: dict[str, list[dict[str, Any]]] = {
        "AdamW": [{}, {"amsgrad": True}, {"capturable": True}, {"maximize": True}, {"weight_decay": 0.0}],
        "Adam": [{}, {"amsgrad": True}, {"capturable": True}, {"weight_decay": 0.1}],
        "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
        "Adagrad": [{}],
        "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
        "Adadelta": [{}],
        "NAdam": [{}],
        "RAdam": [{}],
        "Adamax": [{}],
        "Rprop": [{}],
        "ASGD": [{}],
        "Adafactor": [{}, {"weight_decay": 0.1}],
        "Muon": [{}],
    }
    for (kind, variants), dtype in itertools.product(settings.items(), (FP32, BF16)):
        for kwargs, (loop, how) in itertools.product(variants, loops.items()):
            if loop == "fused" and kind not in ("AdamW", "Adam", "SGD", "Adagrad"):
                continue
            if kind == "Muon" and loop:
                continue
            yield f"{kind} {loop} {kwargs or ''} {NAMES[dtype]}", functools.partial(step, kind, dtype, **kwargs, **how)

    def mixed(**kwargs: Any) -> Step:
        weights = [*fresh_weights(FP32), *fresh_weights(BF16)]
        return Step(torch.optim.AdamW(weights, **kwargs).step, weights)

    for loop, how in loops.items():
        yield f"AdamW of two types {loop}", functools.partial(mixed, **how)

    def clip(dtype: torch.dtype, count: int = 1, **kwargs: Any) -> Step:
        weights = (
            fresh_weights(dtype) * 1 if count == 1 else [nn.Parameter(real(512, dtype=dtype)) for _ in range(count)]
        )
        return Step(lambda: nn.utils.clip_grad_norm_(weights, 1.0, **kwargs), weights)

    for dtype, kwargs in itertools.product(
        (FP32, BF16), ({}, {"foreach": False}, {"norm_type": float("inf")}, {"norm_type": 1.0})
    ):
        yield f"clip_grad_norm_ {NAMES[dtype]} {kwargs or ''}", functools.partial(clip, dtype, **kwargs)
    for count in (3, 100, 500):
        yield f"clip_grad_norm_ of {count}", clip, FP32, count

    def large_clip() -> Step:
        weights = [nn.Parameter(torch.empty(size, device="cuda")) for size in (100_000_000, 1_000_001, 65537, 5)]
        return Step(lambda: nn.utils.clip_grad_norm_(weights, 1.0), weights)

    yield "clip_grad_norm_ of large", large_clip
    yield (
        "clip_grad_value_",
        lambda: (lambda w: Step(lambda: nn.utils.clip_grad_value_(w, 1.0), w))(fresh_weights(FP32)),
    )

    def large(**kwargs: Any) -> Step:
        weights = fresh_weights(FP32, ((8192, 4096), (4096, 4096), (4096,)))
        return Step(torch.optim.AdamW(weights, **kwargs).step, weights)

    for loop, how in loops.items():
        yield f"AdamW large {loop}", functools.partial(large, **how)

    def foreach(name: str, dtype: torch.dtype, *args: Any) -> Run:
        tensors = [real(*shape, dtype=dtype) for shape in SHAPES]
        return Run(
            lambda: getattr(torch, name)(tensors, *(tensors if a == "same" else a for a in args)), backward=False
        )

    for dtype in (FP32, BF16):
        for name, *args in (
            ("_foreach_add", 1.0),
            ("_foreach_mul", 2.0),
            ("_foreach_sqrt",),
            ("_foreach_norm",),
            ("_foreach_norm", 1.0),
            ("_foreach_norm", float("inf")),
            ("_foreach_add", "same"),
            ("_foreach_mul", "same"),
            ("_foreach_mul_", 1.0),
            ("_foreach_lerp", "same", 0.5),
            ("_foreach_max",),
            ("_foreach_zero_",),
            ("_foreach_addcmul", "same", "same"),
            ("_foreach_addcdiv_", "same", "same"),
            ("_foreach_pow", 2.0),
            ("_foreach_sign",),
            ("_foreach_copy_", "same"),
        ):
            yield f"{name} {args} {NAMES[dtype]}", functools.partial(foreach, name, dtype, *args)


def scaling() -> Iterator[tuple]:
    def scaler(kind: str, clip: bool, dtype: torch.dtype, **kwargs: Any) -> Step:
        weights = fresh_weights(dtype)
        optimizer, scale = (
            getattr(torch.optim, kind)(weights, lr=0.1, **kwargs),
            torch.amp.GradScaler("cuda", init_scale=4.0),
        )
        scale.scale(torch.zeros((), device="cuda"))

        def step() -> None:
            if clip:
                scale.unscale_(optimizer)
                mark()
                nn.utils.clip_grad_norm_(weights, 1.0)
                mark()
            scale.step(optimizer)
            mark()
            scale.update()

        return Step(step, weights)

    for kind, clip, kwargs in itertools.product(
        ("AdamW", "SGD"), (True, False), ({}, {"fused": True}, {"foreach": False})
    ):
        yield f"GradScaler {kind} {clip} {kwargs or ''}", functools.partial(scaler, kind, clip, FP32, **kwargs)

    def loss() -> Run:
        scale = torch.amp.GradScaler("cuda")
        return Run(lambda x: scale.scale(x.mean()), real(512, 512, grad=True))

    yield "scaled loss", loss
    yield "zero_grad", lambda: (lambda w: Step(lambda: torch.optim.SGD(w).zero_grad(), w))(fresh_weights(FP32))
    yield (
        "zero_grad to zeros",
        lambda: (lambda w: Step(lambda: torch.optim.SGD(w).zero_grad(set_to_none=False), w))(fresh_weights(FP32)),
    )

    def accumulated(dtype: torch.dtype) -> Run:
        weight = real(1024, 1024, dtype=dtype, grad=True)

        def twice(x: torch.Tensor) -> torch.Tensor:
            F.linear(x, weight).backward(torch.ones(64, 1024, device="cuda", dtype=dtype))
            mark()
            return F.linear(x, weight)

        return Run(twice, real(64, 1024, dtype=dtype, grad=True), parameters=[weight])

    for dtype in (FP32, BF16):
        yield f"accumulated {NAMES[dtype]}", accumulated, dtype
