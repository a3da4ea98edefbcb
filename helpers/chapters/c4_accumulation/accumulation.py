"""Chapter 4: comparing gradients, a small GPT-2 for the trainers, the splits of a batch as bars."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model
from virtual_gpu.report import MemoryTable
from virtual_gpu.step.splits import Combination

from ...small_model import sentences


def gradient(model: nn.Module) -> torch.Tensor:
    """All gradients of a model as one vector (elements,), a copy. ValueError where there is none."""
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    if not found:
        raise ValueError(
            tr(
                ko="그레이디언트가 없다. backward()를 먼저 부르고, zero_grad()보다 앞에서 꺼낸다.",
                en="There is no gradient: call backward() first, and look before zero_grad().",
            )
        )
    return torch.cat(found)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of a - b as a share of the norm of b."""
    return float((a - b).norm() / b.norm())


def small_gpt2(seed: int = 0) -> nn.Module:
    """transformers' GPT-2 with 2 layers on the CPU, without dropout, in fp64 (printed digits are every machine's)."""
    from transformers import GPT2Config

    inputs, _ = sentences()
    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        vocab_size=int(inputs.max()) + 1,
        n_positions=inputs.shape[1],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(config, torch.float64, device="cpu")


def capital_samples(rows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Some of the 64 sentences as transformers wants them: input_ids and labels (length,), which it shifts itself."""
    inputs, labels = sentences()
    shifted = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], dim=1)
    return [{"input_ids": inputs[row], "labels": shifted[row]} for row in rows]


def moved(model: nn.Module) -> torch.Tensor:
    """How far training has taken a `small_gpt2()` from where it began, as one vector (elements,)."""
    pairs = zip(model.parameters(), small_gpt2().parameters(), strict=True)
    return torch.cat([(after - before).detach().flatten() for after, before in pairs])


def draw_splits(found: list[Combination], chosen: Combination | None = None) -> Any:
    """The splits' memory as bars, the steps as they are (not as they were predicted); the others than `chosen` pale."""
    table = MemoryTable(split.report for split in found)
    for split, report in zip(found, table, strict=True):
        report.setting = {"batch_size": split.micro_batch, "gradient_accumulation_steps": split.steps}
    return table.chart(marked=None if chosen is None else found.index(chosen))
