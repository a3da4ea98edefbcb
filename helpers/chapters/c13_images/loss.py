"""The loss with all logits and with those of the text alone, on a small model of the same kind that has values."""

from __future__ import annotations

import copy
from typing import Any

import torch

from .tokens import TEXT, config, conversation, grid_of


def small_config() -> Any:
    """Qwen3-VL with few and narrow layers."""
    small = copy.deepcopy(config())
    for part, sizes in (
        (small.text_config, {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}),
        (small.text_config, {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 151_936}),
        (small.vision_config, {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}),
        (small.vision_config, {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}),
    ):
        for name, value in sizes.items():
            setattr(part, name, value)
    small.text_config.rope_parameters |= {"mrope_section": [6, 5, 5]}
    return small


def both_losses() -> tuple[float, float]:
    """(of all logits, of those of the text alone), of one picture of 256 x 256 pixels in noise."""
    from transformers import Qwen3VLForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = Qwen3VLForConditionalGeneration(small_config()).eval(), conversation(grid_of(256, 256))
        batch["pixel_values"] = torch.randn_like(batch["pixel_values"])
    kept = TEXT + 1
    with torch.no_grad():
        whole = model(**batch).loss.item()
        alone = model(**batch | {"logits_to_keep": kept, "labels": batch["labels"][:, -kept:]}).loss.item()
    return whole, alone
