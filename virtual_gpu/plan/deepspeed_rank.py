"""A rank of transformers' Trainer under DeepSpeed, as a program: `by_deepspeed` runs it on a virtual GPU.

torchrun --nproc_per_node N deepspeed_rank.py ASKED.json. The file: model (a folder with config.json), arguments (of
TrainingArguments, deepspeed among them), rows of an optimizer step and their length, padded, attention, fused (TRL's
head), lora (arguments of `add_adapters`; null for none).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

STEPS = 2  # the second begins with the buffers and states that the first has left


def main(asked: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from virtual_gpu.models.adapters import add_adapters

    # Before the model: at stage 3 DeepSpeed's configuration has it made in parts.
    arguments = TrainingArguments(**asked["arguments"])
    model = AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=torch.bfloat16, attn_implementation=asked["attention"]
    )
    model.config.use_cache = False
    if asked["fused"]:
        from trl.trainer import add_fused_lm_head

        add_fused_lm_head(model)
    if asked["lora"]:
        model = add_adapters(model, **asked["lora"])
    text = {"input_ids": [1] * asked["length"], "labels": [1] * asked["length"]}
    if asked["padded"]:
        text["attention_mask"] = [1] * (asked["length"] - 1) + [0]

    class Fused(Trainer):
        """The loss from TRL's head."""

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, {**inputs, "fused_lm_head": True}, *args, **kwargs)

    kind = Fused if asked["fused"] else Trainer
    kind(model, arguments, train_dataset=[text] * (STEPS * asked["rows"] * arguments.world_size)).train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
