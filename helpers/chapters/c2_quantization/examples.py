"""Numbers to quantize, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from virtual_gpu.language import tr
from virtual_gpu.step.setting import check_size
from virtual_gpu.units import choose, positive_int, seed_of_random


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Numbers of a normal distribution, in fp64."""
    # In fp64, whose random numbers do not depend on the CPU's vector instructions.
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _heavy(count: int, seed: int) -> torch.Tensor:
    """Student's t with 3 degrees of freedom."""
    return normal(count, seed=seed) / normal(count, 3, seed=seed + 1).square().mean(1).sqrt()


def _outliers(count: int, seed: int) -> torch.Tensor:
    values = normal(count, seed=seed)
    values[count // 7 :: max(count // 4, 1)] *= 20
    return values


NINE_NUMBERS = (0.6, -1.1, 0.3, 1.4, -0.8, 0.5, -0.2, 9.0, 0.9)  # one outlier


def book_numbers(count: int = 24) -> torch.Tensor:
    """Numbers whose smallest is -17 and whose largest is 15, as in the book's example."""
    numbers = normal(count, seed=1).sort().values
    return torch.where(numbers < 0, numbers * 17 / -numbers[0], numbers * 15 / numbers[-1]).float()


DISTRIBUTIONS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda count, seed: normal(count, seed=seed),
    "heavy_tailed": _heavy,
    "outliers": _outliers,
    "one_sided": lambda count, seed: normal(count, seed=seed).clamp_min(0),
}


def example_tensor(distribution: str = "normal", count: int = 4096, seed: int = 0) -> torch.Tensor:
    """Numbers to quantize, the same on every machine: normal, heavy_tailed, outliers, one_sided (normal after ReLU)."""
    make = DISTRIBUTIONS[choose(distribution, DISTRIBUTIONS, tr(ko="분포", en="distribution"))]
    count = positive_int(count, "count")
    check_size(count, 1)
    return make(count, seed_of_random(seed)).float()
