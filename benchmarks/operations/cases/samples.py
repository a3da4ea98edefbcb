"""PyTorch's own samples of nearly all its operations."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .run import BF16, FP16, FP32, NAMES, Case, Recorded, Run

SAMPLES = 6  # so many of PyTorch's own samples of an operation


SAMPLE_DTYPES = (FP32, BF16, FP16, torch.int64)


_LARGE = {"S": 37, "M": 67, "L": 131}  # of its samples' sizes, 5, 10 and 20: large enough that different tensors differ


def _no_test_library() -> None:
    """`expecttest`, which PyTorch's tests import and its samples do not use, need not be installed."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in


def samples() -> Iterator[Case]:
    """Every operation of PyTorch's `op_db`, by type and size of sample: the first `SAMPLES`, forward and backward."""
    _no_test_library()
    from torch.testing._internal import common_methods_invocations as database

    for op, dtype in itertools.product(database.op_db, SAMPLE_DTYPES):
        name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''} {NAMES[dtype]}"
        floats = dtype.is_floating_point
        if not (dtype in op.dtypes or dtype in (getattr(op, "dtypesIfCUDA", None) or ()) or floats):
            continue
        for size in ("small",) if op.name == "grid_sampler_3d" else ("small", "large"):  # five dimensions
            yield f"samples: {name} {size}", functools.partial(_samples, op, dtype, size == "large")


def _samples(op: Any, dtype: torch.dtype, large: bool) -> Recorded:
    from torch.testing._internal import common_methods_invocations as database

    before = {name: getattr(database, name) for name in _LARGE}
    runs = []
    try:
        if large:
            vars(database).update(_LARGE)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained = op.supports_autograd and dtype.is_floating_point
            for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=trained), SAMPLES):
                runs.append(_sample(op, sample))
    finally:
        vars(database).update(before)
    return runs


def _sample(op: Any, sample: Any) -> Callable[[], Run]:
    """Makes the run of one sample, its tensors copied to the card."""

    def up(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cuda").requires_grad_(value.requires_grad)
        if isinstance(value, torch.device):
            return torch.device("cuda") if value.type == "cpu" else value
        return "cuda" if isinstance(value, str) and value == "cpu" else value

    def make() -> Run:
        first, args, kwargs = tree_map(up, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        return Run(lambda x, a, k: op(x, *a, **k), first, args, kwargs)

    return make
