"""Chapter 5: a small GPT-2 with dropout, and three ways to train it: a loop of one's own, Accelerate, Trainer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from virtual_gpu.step.run import set_checkpointing

from ...data import make_dummy_dataset
from ...trainers import train_with_trainer


def small_gpt(checkpointing: bool = False) -> nn.Module:
    """Four layers of 64, from the seed, with GPT-2's dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).train()
    model.loss_type = "ForCausalLM"  # what transformers takes anyway for GPT-2, with a warning
    return set_checkpointing(model, checkpointing)


@lru_cache(maxsize=1)
def _dataset() -> Any:
    return make_dummy_dataset(size=16, sequence_length=64, vocab_size=512)


def _loop(model: nn.Module) -> nn.Module:
    """bf16 autocast and a GradScaler, batches of 4."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for rows in torch.arange(16).split(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**_dataset()[rows.tolist()], use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def _accelerate(model: nn.Module) -> nn.Module:
    """Batches of 1, four of them a step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(_dataset(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


def _trainer(model: nn.Module) -> nn.Module:
    """Batches of 1, four of them a step; what the model has switched on is said to the Trainer."""
    return train_with_trainer(
        model,
        _dataset(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=3,
        gradient_checkpointing=model.transformer.h[0].gradient_checkpointing,
    )


TRAININGS = {"loop": _loop, "Accelerate": _accelerate, "Trainer": _trainer}  # name → model trained in place
