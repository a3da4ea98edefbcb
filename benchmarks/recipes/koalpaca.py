"""Beomi/KoAlpaca: Polyglot-Ko 5.8B trained whole on one A100 of 80 GB, as nvidia-smi shows the card meanwhile.

The program is transformers' run_clm.py of April 2023, here its `Trainer` on the model's configuration: weights in fp16
that the Trainer's scaler is made to accept (the source says which line of PyTorch to change), Adafactor, eager
attention, texts cut to one length. nvidia-smi shows what the allocator reserves and the context; of that only a range
is known, from other people's messages, so the prediction is one. Not stated: the releases (here those of that week, on
the running PyTorch).
"""

from __future__ import annotations

import tempfile
from functools import cache
from unittest import mock

import torch

from virtual_gpu.models.bundled import architectures
from virtual_gpu.program.context import cuda
from virtual_gpu.room import room_on

from .recipe import ANY, SIZE, Prediction, Recipe, Refused, Row, from_source, gpu_of

MICRO_BATCHES = 3  # of a step: each further one does what the third does


def predict(row: Row) -> Prediction:
    """Bytes of the card in use."""
    settings, spec = row["settings"], gpu_of(row).spec
    if settings.gpus > 1:
        raise Refused("several cards of one process, or ZeRO-3 with settings that are not stated")
    if (settings.weights, settings.optimizer) != ("float16", "adafactor") or not settings.change:
        raise Refused("another program than the one of one card, whose weights and gradients are fp16")
    reserved = _reserved(row["model"], settings.batch, settings.length, settings.accumulation, spec.name)
    context = room_on(spec).outside[0].bytes
    low, high = reserved + context.low, reserved + context.high
    return Prediction((low + high) // 2, low=low, high=high, note="with the context, of which a range is known")


@cache
def _reserved(model: str, batch: int, length: int, accumulation: int, card: str) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    described = {**architectures()[model]["config"]}
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    ids, steps, accumulation = [1] * length, 2, min(accumulation, MICRO_BATCHES)
    texts = [{"input_ids": ids, "attention_mask": ids, "labels": ids}] * (batch * accumulation * steps)
    with cuda(card), tempfile.TemporaryDirectory() as folder, fp16_gradients():
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
            max_steps=steps, fp16=True, optim="adafactor", learning_rate=2e-5, logging_first_step=True,
            save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trained = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float16)
        Trainer(trained, arguments, train_dataset=texts, data_collator=default_data_collator).train()
        return torch.cuda.max_memory_reserved()


def fp16_gradients() -> mock._patch:
    """The change that the source asks its readers to make to PyTorch: the scaler takes fp16 gradients."""
    scaler, unscale = torch.amp.GradScaler, torch.amp.GradScaler._unscale_grads_
    return mock.patch.object(
        scaler, "_unscale_grads_", lambda self, optimizer, scale, found, _: unscale(self, optimizer, scale, found, True)
    )


RECIPES = (
    Recipe(
        name="KoAlpaca",
        what="Polyglot-Ko 5.8B trained whole in fp16 with Adafactor (run_clm.py, transformers 4.28)",
        what_ko="Polyglot-Ko 5.8B 전체 학습 (fp16, Adafactor)",
        handles=from_source("Beomi/KoAlpaca"),
        predict=predict,
        packages=lambda row: ("transformers==4.28.1", "accelerate==0.18.0", "datasets==4.3.0", "setuptools==80.9.0"),
        settings={
            **dict.fromkeys(("gpus", "batch", "length", "accumulation"), SIZE),
            "weights": ("float16", "float32"),
            "precision": ("fp16",),
            "optimizer": ("adafactor", "adam"),
            "sharding": ANY,
            "change": ("GradScaler takes fp16 gradients",),
        },
    ),
)
