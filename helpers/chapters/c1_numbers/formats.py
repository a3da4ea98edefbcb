"""Number formats taken apart: any split into sign, exponent and mantissa, and the bits of a number in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from virtual_gpu.language import tr


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format: 1 sign bit, `exponent_bits`, `mantissa_bits`.

    reserved: the patterns at the top that are no finite numbers. "ieee": all those whose exponent is all ones;
        "nan": the very last (fp8 e4m3fn, OCP 8-bit floating point, 2023); "none" (fp4 e2m1, OCP microscaling, 2023).
    saturates: what is beyond the range becomes the largest number (torch 2.13 for e4m3fn; older versions gave nan).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    reserved: str = "ieee"
    saturates: bool = False
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> NumberFormat:
        """The format of a torch dtype, read off `torch.finfo`: bits, and the mantissa's from the machine epsilon."""
        info = torch.finfo(dtype)
        mantissa = -round(math.log2(info.eps))
        beyond = torch.tensor(math.inf).to(dtype).double().item()
        reserved = "ieee" if math.isinf(beyond) else "nan"
        return cls(name, info.bits - 1 - mantissa, mantissa, reserved, beyond == info.max, dtype)

    @property
    def bits(self) -> int:
        """Bits that carry information (tf32's 19 are stored in 32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with the full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal one."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return self.decode(self._largest_pattern)

    def spacing(self, value: float) -> float:
        """The distance from |value| to the next larger number of the format."""
        exponent = max(math.frexp(value)[1] - 1, 1 - self.bias) if value else 1 - self.bias
        return math.ldexp(1.0, exponent - self.mantissa_bits)

    def encode(self, value: float) -> int:
        """The bit pattern of the nearest number, ties to even; beyond the range inf, or what `saturates` says."""
        sign = int(math.copysign(1.0, value) < 0) << (self.bits - 1)
        if math.isnan(value):
            return self._nan
        if not math.isinf(value):
            magnitude = abs(value)
            exponent = max(math.frexp(magnitude)[1] - 1, 1 - self.bias) if magnitude else 1 - self.bias
            # In units of the spacing there; exact, a division by a power of two. round() takes ties to even.
            steps = round(math.ldexp(magnitude, self.mantissa_bits - exponent))
            # A carry out of the mantissa lands in the exponent, where it belongs.
            pattern = ((exponent + self.bias - 1) << self.mantissa_bits) + steps
            if pattern <= self._largest_pattern:
                return sign | pattern
        if self.saturates:
            return sign | self._largest_pattern
        return sign | (self._infinity if self.reserved == "ieee" else self._nan)

    def decode(self, pattern: int) -> float:
        """The number that a bit pattern stands for."""
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        magnitude = pattern & (2 ** (self.bits - 1) - 1)
        if magnitude > self._largest_pattern:
            return sign * math.inf if self.reserved == "ieee" and magnitude == self._infinity else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & (2**self.mantissa_bits - 1)
        if exponent:
            mantissa += 2**self.mantissa_bits
        return sign * math.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa_bits)

    def round(self, value: float) -> float:
        """What is left of `value` when it is stored in this format."""
        return self.decode(self.encode(value))

    def parts(self, value: float) -> tuple[str, str, str]:
        """Sign, exponent and mantissa of the stored number, as text of bits."""
        text = f"{self.encode(value):0{self.bits}b}"
        return text[0], text[1 : 1 + self.exponent_bits], text[1 + self.exponent_bits :]

    @property
    def _infinity(self) -> int:
        return (2**self.exponent_bits - 1) << self.mantissa_bits

    @property
    def _largest_pattern(self) -> int:
        last = 2 ** (self.bits - 1) - 1
        return {"ieee": self._infinity - 1, "nan": last - 1, "none": last}[self.reserved]

    @property
    def _nan(self) -> int:
        last = 2 ** (self.bits - 1) - 1
        # A format that has no nan stores the largest number.
        return {"ieee": self._infinity | 1 << (self.mantissa_bits - 1), "nan": last, "none": last}[self.reserved]


FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat.of("fp64", torch.float64),
        NumberFormat.of("fp32", torch.float32),
        # No dtype: tensor cores round fp32 to it (NVIDIA, A100 whitepaper, 2020).
        NumberFormat("tf32", 8, 10),
        NumberFormat.of("fp16", torch.float16),
        NumberFormat.of("bf16", torch.bfloat16),
        NumberFormat.of("fp8 e4m3", torch.float8_e4m3fn),
        NumberFormat.of("fp8 e5m2", torch.float8_e5m2),
        # torch has it in pairs only (float4_e2m1fn_x2).
        NumberFormat("fp4 e2m1", 2, 1, reserved="none", saturates=True),
    )
}


def parse_number(text: str) -> float:
    """A number as a reader types it: "0.1", "1e-8", "1/3", "2**-14", "inf", "nan"; ValueError where it is none."""
    cleaned = text.strip().replace(",", "").replace("_", "")
    try:
        if "**" in cleaned:
            base, exponent = cleaned.split("**")
            return float(base) ** float(exponent)
        return float(Fraction(cleaned)) if "/" in cleaned else float(cleaned)
    except (ValueError, OverflowError, ZeroDivisionError, TypeError):
        raise ValueError(
            tr(
                ko=f"{text!r:.80}: 숫자로 읽을 수 없다. 0.1, 1e-8, 1/3, 2**-14, inf, nan처럼 쓴다.",
                en=f"{text!r:.80} is not a number. Write 0.1, 1e-8, 1/3, 2**-14, inf or nan.",
            )
        ) from None


def stochastic_round_to_bf16(
    x: torch.Tensor, generator: torch.Generator | None = None, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 → bf16, up or down by chance so that the mean is kept: random bits below bf16's mantissa, added, then cut.

    x: fp32, any shape; noise: int32 of that shape, 0 to 65535, by default drawn from the generator. As in stochastic
    rounding for bf16 training (Zamirai et al. 2020, arXiv 2010.06192).
    """
    if noise is None:
        noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=generator)
    return ((x.detach().view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()
