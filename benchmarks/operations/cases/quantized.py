"""bitsandbytes' functions, layers and optimizers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from .optimizers import Step, fresh_weights
from .run import BF16, FP16, FP32, NAMES, Run, real


def bitsandbytes() -> Iterator[tuple]:
    def functional() -> Any:
        import bitsandbytes.functional

        return bitsandbytes.functional

    def quantize(dtype: torch.dtype, size: int, kind: str, compress: bool, shape: tuple[int, ...]) -> Run:
        bnb, x = functional(), real(*shape, dtype=dtype)
        return Run(
            lambda: bnb.quantize_4bit(x, blocksize=size, compress_statistics=compress, quant_type=kind), backward=False
        )

    def dequantize(dtype: torch.dtype, size: int, kind: str, compress: bool, shape: tuple[int, ...]) -> Run:
        bnb, x = functional(), real(*shape, dtype=dtype)
        packed, state = bnb.quantize_4bit(x, blocksize=size, compress_statistics=compress, quant_type=kind)
        return Run(lambda: bnb.dequantize_4bit(packed, state), backward=False)

    shapes = ((4096, 4096), (1024, 768), (333, 65))
    for name, function in (("quantize_4bit", quantize), ("dequantize_4bit", dequantize)):
        for dtype, size, kind, compress, shape in itertools.product(
            (FP32, BF16, FP16), (64, 256), ("nf4", "fp4"), (True, False), shapes
        ):
            if size == 256 and (kind == "fp4" or shape != shapes[0]):
                continue
            yield (
                f"{name} {shape} {NAMES[dtype]} {size} {kind} {compress}",
                function,
                dtype,
                size,
                kind,
                compress,
                shape,
            )

    def blockwise(dtype: torch.dtype, shape: tuple[int, ...], back: bool) -> Run:
        bnb, x = functional(), real(*shape, dtype=dtype)
        if not back:
            return Run(lambda: bnb.quantize_blockwise(x), backward=False)
        packed, state = bnb.quantize_blockwise(x)
        return Run(lambda: bnb.dequantize_blockwise(packed, state), backward=False)

    for dtype, shape, back in itertools.product((FP32, BF16), shapes, (False, True)):
        yield f"{'de' if back else ''}quantize_blockwise {shape} {NAMES[dtype]}", blockwise, dtype, shape, back

    def four(
        rows: tuple[int, ...],
        dtype: torch.dtype,
        compress: bool,
        bias: bool,
        grad: bool,
        autocast: torch.dtype | None = None,
        cast: bool = False,
    ) -> Run:
        import bitsandbytes as bnb

        module = bnb.nn.Linear4bit(
            1024, 4096, bias=bias, compute_dtype=dtype, compress_statistics=compress, quant_type="nf4"
        )
        module = (module.to(dtype) if cast else module).cuda()
        return Run(
            module,
            real(*rows, 1024, dtype=dtype, grad=grad),
            parameters=module.parameters(),
            autocast=autocast,
            backward=grad,
        )

    for rows, dtype, compress, grad in itertools.product(
        ((1,), (4,), (5,), (16,), (40,), (128,), (600,), (2, 1024)), (BF16, FP16), (True, False), (True, False)
    ):
        end = f"{rows} {NAMES[dtype]} {compress} {'train' if grad else 'infer'}"
        yield f"Linear4bit {end}", four, rows, dtype, compress, False, grad
        if compress:
            yield f"Linear4bit bias {end}", four, rows, dtype, compress, True, grad
    yield "Linear4bit autocast", four, (2, 1024), BF16, True, True, True, BF16
    yield "Linear4bit cast", four, (2, 1024), BF16, True, True, True, None, True

    def product(rows: tuple[int, ...], dtype: torch.dtype, compress: bool, grad: bool) -> Run:
        import bitsandbytes as bnb

        packed, state = bnb.functional.quantize_4bit(
            real(4096, 1024, dtype=dtype), blocksize=64, compress_statistics=compress, quant_type="nf4"
        )
        return Run(
            lambda x: bnb.matmul_4bit(x, packed.t(), quant_state=state),
            real(*rows, 1024, dtype=dtype, grad=grad),
            backward=grad,
        )

    for rows, dtype, compress, grad in itertools.product(
        ((1,), (4,), (5,), (16,), (40,), (128,), (600,), (2, 1024)), (BF16, FP16), (True, False), (True, False)
    ):
        yield (
            f"matmul_4bit {rows} {NAMES[dtype]} {compress} {'train' if grad else 'infer'}",
            product,
            rows,
            dtype,
            compress,
            grad,
        )

    def eight(rows: tuple[int, ...], bias: bool, threshold: float, keep: bool, grad: bool) -> Run:
        import bitsandbytes as bnb

        module = bnb.nn.Linear8bitLt(1024, 4096, bias=bias, has_fp16_weights=keep, threshold=threshold).half().cuda()
        return Run(module, real(*rows, 1024, dtype=FP16, grad=grad), parameters=module.parameters(), backward=grad)

    for rows, bias, threshold, keep, grad in itertools.product(
        ((1,), (40,), (2, 512)), (True, False), (0.0, 6.0), (False, True), (True, False)
    ):
        end = f"{rows} {bias} {threshold} {keep} {'train' if grad else 'infer'}"
        yield f"Linear8bitLt {end}", eight, rows, bias, threshold, keep, grad

    def optimizer(kind: str, dtype: torch.dtype, **kwargs: Any) -> Step:
        import bitsandbytes as bnb

        weights = fresh_weights(dtype)
        return Step(getattr(bnb.optim, kind)(weights, lr=0.001, **kwargs).step, weights)

    for kind, dtype in itertools.product(
        [
            "AdamW8bit",
            "Adam8bit",
            "Lion8bit",
            "SGD8bit",
            "RMSprop8bit",
            "Adagrad8bit",
            "AdEMAMix8bit",
            "LAMB8bit",
            "LARS8bit",
            "AdamW32bit",
            "PagedAdamW8bit",
            "PagedAdamW",
            "PagedLion8bit",
            "AdamW",
            "Lion",
            "PagedAdamW32bit",
            "AdEMAMix",
        ],
        (FP32, BF16),
    ):
        momentum = {"momentum": 0.9} if kind in ("SGD8bit", "LARS8bit") else {}
        yield f"{kind} {NAMES[dtype]}", functools.partial(optimizer, kind, dtype, **momentum)
