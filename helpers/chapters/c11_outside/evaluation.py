"""transformers' `Trainer.evaluate` on a model with a large vocabulary, for the case."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch

from virtual_gpu.models.configs import load_config

KEPT = ("logits", "nothing")  # or how many of a token's largest scores, each with its index
_LENGTH = 512


def evaluate(samples: int, batch_size: int, keep: str | int = "logits", accumulate: int | None = None) -> None:
    """Evaluate Qwen2.5-0.5B in fp16; keep: one of KEPT or a number of scores; accumulate: `eval_accumulation_steps`.

    Batches are collected in a list, so what is moved to RAM is there once.
    """
    from transformers import Qwen2ForCausalLM, Trainer, TrainingArguments

    def largest(logits: torch.Tensor, labels: Any) -> tuple[torch.Tensor, ...]:
        return tuple(logits.topk(keep, -1))  # scores and int64 indices

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_eval_batch_size=batch_size, prediction_loss_only=keep == "nothing", report_to="none",
            eval_accumulation_steps=accumulate, eval_do_concat_batches=False, disable_tqdm=True,
        )  # fmt: skip
        Trainer(
            Qwen2ForCausalLM._from_config(load_config("Qwen/Qwen2.5-0.5B"), dtype=torch.float16),
            arguments,
            eval_dataset=[{"input_ids": [1] * _LENGTH, "labels": [1] * _LENGTH}] * samples,
            compute_metrics=lambda found: {},
            preprocess_logits_for_metrics=None if keep in KEPT else largest,
        ).evaluate()
