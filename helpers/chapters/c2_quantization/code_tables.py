"""What the codes of the 4-bit formats stand for."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from statistics import NormalDist
from typing import Any

# Sign, 2 bits of exponent, 1 of mantissa: the magnitudes in the order of their codes, then the negative ones (OCP
# microscaling formats 1.0, 2023, section 5.3.3). Codes 0 and 8 are +0 and -0.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_LARGEST, E2M1_LARGEST_EXPONENT = 6.0, 2


@cache
def nf4_table() -> tuple[float, ...]:
    """The 16 values of NF4, from the normal distribution's quantiles (QLoRA, arXiv 2305.14314, appendix E).

    8 quantiles above 0 and 7 below, evenly spaced in probability, and 0 itself; all divided by the largest. The
    outermost is at the probability 0.9677083, halfway between the
    middle of the last of 16 shares and that of the last of 15.
    """
    offset = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    below = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    return tuple(value / above[0] for value in sorted([*above, 0.0, *below]))


def load_bitsandbytes() -> Any:
    """The module bitsandbytes, without its warning of optional CPU kernels that the course does not use."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    return importlib.import_module("bitsandbytes")
