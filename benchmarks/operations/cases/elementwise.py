"""Operations of one element at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from .run import BF16, FP16, FP32, NAMES, Run, of_floats, real


def elementwise() -> Iterator[tuple]:
    ones: dict[str, Callable] = {
        name: getattr(F, name)
        for name in [
            "gelu",
            "relu",
            "silu",
            "mish",
            "softplus",
            "elu",
            "selu",
            "leaky_relu",
            "sigmoid",
            "tanh",
            "hardswish",
            "hardtanh",
            "relu6",
            "logsigmoid",
            "softsign",
            "glu",
            "celu",
        ]
    }
    ones |= {
        name: getattr(torch, name)
        for name in [
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "sin",
            "cos",
            "abs",
            "neg",
            "sign",
            "square",
            "reciprocal",
            "floor",
            "erf",
            "log1p",
            "expm1",
            "clone",
            "isnan",
            "isfinite",
            "logical_not",
            "zeros_like",
            "ones_like",
            "rand_like",
            "empty_like",
            "tril",
            "triu",
        ]
    }
    ones |= {
        "gelu tanh": functools.partial(F.gelu, approximate="tanh"),
        "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))),
        "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        "dropout": functools.partial(F.dropout, p=0.1),
        "dropout 0": functools.partial(F.dropout, p=0.0),
        "dropout 1": functools.partial(F.dropout, p=1.0),
        "alpha_dropout": functools.partial(F.alpha_dropout, p=0.1, training=True),
        "feature_dropout": functools.partial(F.dropout1d, p=0.1),
        "native_dropout": lambda x: torch.native_dropout(x, 0.1, True),
        "dropout in place": lambda x: F.dropout(x * 1, 0.1, inplace=True),
        "pow 2": lambda x: x**2,
        "pow 3": lambda x: x**3,
        "pow .5": lambda x: x**0.5,
        "2 pow": lambda x: 2.0**x,
        "clamp": lambda x: x.clamp(-1, 1),
        "clamp min": lambda x: x.clamp(min=0),
        "add 1": lambda x: x + 1,
        "rsub": lambda x: 1 - x,
        "mul 2": lambda x: x * 2,
        "div 2": lambda x: x / 2,
        "rdiv": lambda x: 1 / x,
        "add_": lambda x: (x * 1).add_(1),
        "mul_": lambda x: (x * 1).mul_(2),
        "relu_": lambda x: (x * 1).relu_(),
        "exp_": lambda x: (x * 1).exp_(),
        "masked_fill half": lambda x: x.masked_fill(x > 0, 0.0),
        "where self": lambda x: torch.where(x > 0, x, 0.0),
        "nan_to_num": torch.nan_to_num,
        "cast up": lambda x: x.to(FP32),
        "cast down": lambda x: x.to(BF16),
        "cast double": lambda x: x.double(),
        "contiguous transposed": lambda x: x.transpose(0, 1).contiguous(),
        "detach": lambda x: x.detach() + x,
        "rotate half": lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
        "lerp": lambda x: torch.lerp(x, x, 0.5),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
        "addcdiv": lambda x: torch.addcdiv(x, x, x),
        "bernoulli": torch.bernoulli,
        "normal_": lambda x: torch.empty_like(x).normal_(),
        "uniform_": lambda x: torch.empty_like(x).uniform_(),
        "gumbel": F.gumbel_softmax,
        "sum of two": lambda x: x.sin() + x.cos(),
        "three uses": lambda x: x.sin() + x.cos() + x.tanh(),
    }
    for (name, function), dtype in itertools.product(ones.items(), (FP32, BF16, FP16)):
        for shape in ((8, 512, 1024), (3, 7, 10)):
            yield f"{name} {shape} {NAMES[dtype]}", functools.partial(of_floats, function, shape, dtype=dtype)
        yield (
            f"{name} autocast {NAMES[dtype]}",
            functools.partial(of_floats, function, (8, 512, 1024), dtype=dtype, autocast=BF16),
        )
    twos: dict[str, Callable] = {
        name: getattr(torch, name)
        for name in "add sub mul div maximum minimum pow atan2 fmod eq lt hypot".split()  # noqa: SIM905
    }
    shapes = (
        ((512, 1024), (512, 1024)),
        ((512, 1024), (1024,)),
        ((512, 1024), (512, 1)),
        ((512, 1), (1, 1024)),
        ((8, 512, 64), ()),
    )
    for (name, function), pair, dtype in itertools.product(twos.items(), shapes, (FP32, BF16)):
        yield f"{name} {pair} {NAMES[dtype]}", functools.partial(of_floats, function, *pair, dtype=dtype)

    def mixed(function: Callable, first: torch.dtype, second: torch.dtype) -> Run:
        return Run(function, real(512, 1024, dtype=first, grad=True), real(512, 1024, dtype=second, grad=True))

    for name, (first, second) in itertools.product(
        ("add", "mul", "maximum"), ((BF16, FP32), (FP32, FP16), (FP16, BF16))
    ):
        yield f"{name} {NAMES[first]} {NAMES[second]}", mixed, twos[name], first, second

    def rotary(dtype: torch.dtype) -> Run:
        def apply(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return (q * cos) + (ones["rotate half"](q) * sin)

        return Run(
            apply, real(4, 16, 512, 64, dtype=dtype, grad=True), real(512, 64, dtype=dtype), real(512, 64, dtype=dtype)
        )

    def complex_rotary() -> Run:
        angles = torch.polar(torch.ones(512, 32), torch.rand(512, 32)).cuda()
        return Run(
            lambda q: torch.view_as_real(torch.view_as_complex(q.float().reshape(4, 512, 32, 2)) * angles).flatten(2),
            real(4, 512, 64, grad=True),
        )

    for dtype in (FP32, BF16):
        yield f"rotary {NAMES[dtype]}", rotary, dtype
    yield "complex rotary", complex_rotary
    for name, function in (
        ("complex", lambda x: torch.complex(x, x)),
        ("to complex", lambda x: x.to(torch.complex64)),
        ("complex abs", lambda x: torch.complex(x, x).abs()),
        ("complex mul", lambda x: torch.complex(x, x) * torch.complex(x, x)),
        ("complex real", lambda x: torch.complex(x, x).real),
        ("complex mm", lambda x: torch.complex(x, x) @ torch.complex(x, x).T),
        ("complex conj mm", lambda x: torch.complex(x, x) @ torch.complex(x, x).conj().T),
        ("fft", torch.fft.fft),
        ("rfft", torch.fft.rfft),
        ("irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x))),
        ("fft2", torch.fft.fft2),
        ("rfft2", torch.fft.rfft2),
        ("fft of columns", lambda x: torch.fft.fft(x, dim=0)),
        ("fftn", torch.fft.fftn),
        ("fftshift", torch.fft.fftshift),
        ("stft", lambda x: torch.stft(x, 64, return_complex=True, window=torch.ones(64, device="cuda"))),
    ):
        yield name, functools.partial(of_floats, function, (256, 1000))
    yield "fft prime", functools.partial(of_floats, torch.fft.fft, (64, 10007))
    yield "fft fp16", functools.partial(of_floats, torch.fft.fft, (64, 1024), dtype=FP16)
