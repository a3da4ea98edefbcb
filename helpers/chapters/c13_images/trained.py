"""The chapter's program: a step of Qwen3-VL-2B with LoRA, as its users write it."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from virtual_gpu.models.attention import kv_repeated
from virtual_gpu.step.run import enable_checkpointing
from virtual_gpu.units import choose

from .tokens import MOST, config, conversation, grid_of

# Which layers carry adapters: every linear layer of the language model, or of both towers.
TARGETS = {"language": r".*language_model.*_proj", "all": "all-linear"}


def train(
    width: int,
    height: int,
    images: int = 1,
    *,
    adapters: str = "language",
    checkpointing: bool = False,
    answer_only: bool = False,
    repeat_kv: bool = False,
    max_pixels: int = MOST,
    dtype: torch.dtype = torch.float16,
) -> None:
    """A training step on one sample: pictures of so many pixels and 64 tokens of text.

    adapters: a key of TARGETS. answer_only: no logits before the first token that has a label.
    repeat_kv: grouped heads are repeated before attention (see `models.attention`).
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3VLForConditionalGeneration

    adapters = choose(adapters, TARGETS, "adapters")
    batch = conversation(grid_of(width, height, max_pixels), images)

    model = Qwen3VLForConditionalGeneration._from_config(config(), dtype=dtype).cuda()
    model = get_peft_model(model, LoraConfig(r=16, target_modules=TARGETS[adapters]))
    model.train()
    if checkpointing:
        enable_checkpointing(model)
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])

    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    if answer_only:
        labels = batch.pop("labels")
        first = int((labels != -100).any(0).nonzero()[0])
        kept = labels.shape[1] - first + 1  # the token before the first with a label predicts it
        batch |= {"logits_to_keep": kept, "labels": labels[:, -kept:]}
    on_card = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with kv_repeated() if repeat_kv else nullcontext():
        with torch.autocast("cuda", dtype):
            loss = model(**on_card, use_cache=False).loss
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
