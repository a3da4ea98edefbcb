"""Chapter 2's cases: a model in int8 that falls silent, and an optimizer in 8 bits that does not learn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import choose

from ...small_model import CAPITALS, score, train_small_model, with_outlier_channels
from .code_tables import load_bitsandbytes
from .examples import normal
from .quantization import quantize
from .whole_model import Int8Linear, int8_model, smoothed

# ---- 2-A: weights and activations in int8 ---------------------------------------------------------------------------

OUTLIERS = {"factor": 100.0, "channels": 6}


@dataclass(frozen=True)
class Answers:
    """How a model in int8 does; columns: the most that one layer multiplied in 16 bits."""

    loss: float
    capitals: int
    columns: int

    def __repr__(self) -> str:
        return tr(
            ko=f"손실 {self.loss:.2f}, 맞힌 수도 {self.capitals}/{len(CAPITALS)}, 16비트로 곱한 열 {self.columns}개",
            en=f"loss {self.loss:.2f}, {self.capitals}/{len(CAPITALS)} capitals, {self.columns} columns in 16 bits",
        )


def answer_in_int8(
    activations: str = "tensor", weights: str = "tensor", threshold: float | None = None, smooth: float | None = None
) -> Answers:
    """The small model with outliers in its activations, weights and activations in int8.

    activations: a scale for the "tensor" or for each "token"; weights: for the "tensor" or for each "channel";
    threshold: columns with a number of at least that much in 16 bits; smooth: SmoothQuant's strength, 0 to 1.
    """
    per_token = choose(activations, ("tensor", "token"), "activations") == "token"
    per_channel = choose(weights, ("tensor", "channel"), "weights") == "channel"
    for name, value, most in (("threshold", threshold, math.inf), ("smooth", smooth, 1)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value <= most):
            text = tr(ko="0보다 큰 수여야 한다(smooth는 1까지).", en="must be more than 0 (smooth: up to 1).")
            raise WrongValue(f"{name}={value!r}: {text}")
    model = with_outlier_channels(train_small_model(), **OUTLIERS)
    model = model if smooth is None else smoothed(model, smooth)
    model = int8_model(model, threshold, per_token=per_token, per_channel=per_channel)
    loss, capitals = score(model)
    columns = max(layer.columns for layer in model.modules() if isinstance(layer, Int8Linear))
    return Answers(loss, capitals, columns)


# ---- 2-B: Adam's states in 8 bits -----------------------------------------------------------------------------------

WIDTH, ROWS = 64, 128
KINDS = ("fp32", "linear", "dynamic")
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # those of bitsandbytes; the layer has 4,096 weights
FAR = 1_000  # times the learning rate: Adam's own steps are a few


@dataclass(frozen=True)
class Learning:
    """A training with stored states: its loss before and after, bytes of both states a parameter, the largest step."""

    before: float
    after: float
    nbytes: float
    largest: float

    @property
    def learned(self) -> bool:
        """The loss fell to a tenth."""
        return self.after < self.before / 10

    def __repr__(self) -> str:
        # What has run away differs from machine to machine: from its first large step the last bits of a sum decide.
        away = self.largest > FAR
        after = tr(ko="발산", en="diverged") if away or not self.after < self.before else f"{self.after:.2f}"
        times = f"{FAR:,}" if away else f"{self.largest:.1f}"
        return tr(
            ko=f"손실 {self.before:.2f} → {after}, 상태 파라미터당 {self.nbytes:.2f}바이트, "
            f"가장 큰 갱신은 학습률의 {times}배{' 초과' if away else ''}",
            en=f"loss {self.before:.2f} → {after}, {self.nbytes:.2f} bytes of states each, "
            f"largest step {'over ' if away else ''}{times} times the learning rate",
        )


def stored(state: torch.Tensor, kind: str, block_size: int = 256) -> tuple[torch.Tensor, float]:
    """A state of Adam as it comes back from its store, and the bits a number takes there.

    kind: "fp32", "linear" (255 or 256 even steps) or "dynamic" (the map of bitsandbytes); either 8 bits in blocks.
    """
    if kind == "fp32":
        return state, 32
    signed = bool((state < 0).any())
    if kind == "linear":
        quantized = quantize(state, "absmax" if signed else "zero_point", bits=8, block_size=block_size)
        return quantized.dequantize(), 8 + 32 / block_size
    functional = load_bitsandbytes().functional
    code = functional.create_dynamic_map(signed)
    return functional.dequantize_blockwise(
        *functional.quantize_blockwise(state, code=code, blocksize=block_size)
    ), 8 + 32 / block_size


def train_with_states(momentum: str = "linear", variance: str = "linear", block_size: int = 256) -> Learning:
    """Adam on one layer, its states put away after every step; features differ in size, as real ones do."""
    kinds = [choose(kind, KINDS, tr(ko="형식", en="format")) for kind in (momentum, variance)]
    if block_size not in BLOCKS:
        choices = ", ".join(map(str, BLOCKS))
        raise WrongValue(f"block_size={block_size!r}: {choices}")
    inputs = (normal(ROWS, WIDTH, seed=1) * torch.logspace(-2, 0, WIDTH, dtype=torch.float64)).float()
    target = inputs @ normal(WIDTH, WIDTH, seed=2).float()
    weight, first, second = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
    losses, largest, rate = [], 0.0, 0.03
    for step in range(1, 151):
        difference = inputs @ weight - target
        losses.append(float(difference.square().mean()))
        gradient = inputs.T @ difference / ROWS
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = weight - rate * update
        largest = max(largest, float(update.abs().max()))
        (first, bits_1), (second, bits_2) = (
            stored(state, kind, block_size) for state, kind in zip((first, second), kinds, strict=True)
        )
    return Learning(losses[0], losses[-1], (bits_1 + bits_2) / 8, largest)
