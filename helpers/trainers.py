"""transformers' Trainer, quietly and on the CPU, and what two trainings differ by."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn


def trainer_arguments(folder: str, gradient_checkpointing: bool = False, **settings: Any) -> Any:
    """TrainingArguments for a short silent run on the CPU; checkpointing under whichever name transformers has for it.

    `gradient_checkpointing` is called `activation_checkpointing` since transformers 5.23.
    """
    from transformers import TrainingArguments

    known = TrainingArguments.__dataclass_fields__
    prefix = "activation" if "activation_checkpointing" in known else "gradient"
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    return TrainingArguments(
        folder,
        **quiet,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{f"{prefix}_checkpointing": gradient_checkpointing},
        **{f"{prefix}_checkpointing_kwargs": {"use_reentrant": False}},
        **settings,
    )


def train_with_trainer(model: nn.Module, dataset: Any, **settings: Any) -> nn.Module:
    """Train with transformers' Trainer in a folder that is gone afterwards, printing nothing."""
    from transformers import PrinterCallback, Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, trainer_arguments(folder, **settings), train_dataset=dataset)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """The largest absolute difference between the parameters of two models of one architecture."""
    with torch.no_grad():
        return max(float((p - q).abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
