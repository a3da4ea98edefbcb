"""Chapter 1's cases: trainings small enough for a CPU, in which 16 bits go wrong as in the reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.units import GB, boolean, choose

from .formats import stochastic_round_to_bf16

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
PARAMETERS_7B = 8.29e9  # Qwen2.5-VL-7B-Instruct, as the hub counts them
WIDTH, RANK, ROWS = 32, 4, 64


@dataclass(frozen=True)
class Training:
    """What a training came to: its loss before and after, or the error that ended it; bytes of all its weights."""

    before: float
    after: float
    nbytes: float
    note: str = ""
    error: str = ""

    @property
    def learned(self) -> bool:
        """The loss fell to a tenth."""
        return not self.error and self.after < self.before / 10

    def __repr__(self) -> str:
        if self.error:
            return self.error
        loss = tr(ko="손실", en="loss")
        return " · ".join(filter(None, [f"{loss} {self.before:.3g} → {self.after:.3g}", self.note]))


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    # In fp64, whose random numbers do not depend on the CPU's vector instructions.
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).float()


# ---- 1-A: LoRA in fp16 on a card without bf16 -----------------------------------------------------------------------


def train_adapter(frozen: str = "fp16", adapter: str = "fp16", scaler: bool = True, steps: int = 60) -> Training:
    """LoRA on one frozen layer under autocast to fp16, its loss as small as a mean over many tokens makes gradients.

    frozen, adapter: "fp32" or "fp16"; scaler: with GradScaler or without. Bytes are those of a 7B model's weights.
    """
    kinds = [DTYPES[choose(name, DTYPES, tr(ko="형식", en="format"))] for name in (frozen, adapter)]
    weight = (_numbers(WIDTH, WIDTH, seed=1) / WIDTH**0.5).to(kinds[0])
    down = (_numbers(RANK, WIDTH, seed=2) / WIDTH**0.5).to(kinds[1]).requires_grad_()
    up = torch.zeros(WIDTH, RANK, dtype=kinds[1], requires_grad=True)
    inputs = _numbers(ROWS, WIDTH, seed=3)
    target = inputs @ (weight.float() + _numbers(WIDTH, RANK, seed=4) @ _numbers(RANK, WIDTH, seed=5) / WIDTH).T
    optimizer = torch.optim.Adam([down, up], lr=0.02)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=boolean(scaler, "scaler"))
    losses = []
    nbytes = PARAMETERS_7B * kinds[0].itemsize
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = functional.linear(inputs, weight) + functional.linear(functional.linear(inputs, down), up)
        loss = (output.float() - target).square().mean() * 1e-5
        losses.append(loss.item() * 1e5)
        grad_scaler.scale(loss).backward()
        try:
            grad_scaler.unscale_(optimizer)
        except ValueError as error:  # the very error that was reported is what there is to see
            return Training(losses[0], losses[-1], nbytes, error=f"ValueError: {error}")
        grad_scaler.step(optimizer)
        grad_scaler.update()
    note = tr(ko=f"83억 파라미터의 가중치 {nbytes / GB:.1f} GB", en=f"weights of 8.3B parameters: {nbytes / GB:.1f} GB")
    return Training(losses[0], losses[-1], nbytes, note)


# ---- 1-B: the same training, in bf16 ---------------------------------------------------------------------------------


def train_weights(
    weights: str = "bf16",
    master: bool = False,
    rounding: str = "nearest",
    learning_rate: float = 1e-5,
    steps: int = 300,
) -> Training:
    """Adam on a layer whose weights are stored as fp32 or bf16. The step itself is computed in fp32, always.

    master: fp32 weights beside the bf16 ones take the step; rounding: how the result is stored as bf16, "nearest" or
    "stochastic". Bytes are those of one parameter's weights.
    """
    kinds, roundings = ("fp32", "bf16"), ("nearest", "stochastic")
    weights = choose(weights, kinds, tr(ko="형식", en="format"))
    rounding = choose(rounding, roundings, tr(ko="반올림", en="rounding"))
    if not 0 < learning_rate < 1:
        raise WrongValue(
            tr(
                ko=f"learning_rate={learning_rate!r}: 0과 1 사이여야 한다.",
                en=f"learning_rate={learning_rate!r}: 0 to 1.",
            )
        )
    is_bf16, keeps_master = weights == "bf16", boolean(master, "master")
    start = _numbers(WIDTH, WIDTH, seed=6) * 0.02
    weight = (start.bfloat16().float() if is_bf16 else start.clone()).requires_grad_()
    first = weight.detach().clone()
    inputs = _numbers(ROWS, WIDTH, seed=7)
    target = inputs @ (start + _numbers(WIDTH, WIDTH, seed=8).sign() * 1e-3).T
    optimizer = torch.optim.Adam([weight], lr=learning_rate)
    noise = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        used = weight.bfloat16().float() if is_bf16 and keeps_master else weight
        loss = (inputs @ used.T - target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        if is_bf16 and not keeps_master:
            with torch.no_grad():
                stored = stochastic_round_to_bf16(weight, noise) if rounding == "stochastic" else weight.bfloat16()
                weight.copy_(stored.float())
    moved = float((weight.detach() != first).double().mean())
    nbytes = 4 if not is_bf16 else 6 if keeps_master else 2
    note = tr(
        ko=f"움직인 가중치 {moved:.0%}, 파라미터당 {nbytes}바이트",
        en=f"{moved:.0%} of the weights moved, {nbytes} bytes each",
    )
    return Training(losses[0], losses[-1], nbytes, note)
