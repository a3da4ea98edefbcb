"""Unsloth beside TRL: the same QLoRA of Llama-3.1-8B, each library's own program, on virtual cards.

    python benchmarks/beside_unsloth.py

Both load in 4 bits (nf4, nested scales), train adapters of rank 16 on all seven matrices with bitsandbytes' AdamW in 8
bits, recompute what checkpointing recomputes, and have TRL's or Unsloth's own loss. Printed is what is reserved when
the trainer is made and at most in three steps. Weights are random, texts are full; no card has run it beside us.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import emit, run
from benchmarks.environments import python_with
from benchmarks.recipes.unsloth_notebooks import MATRICES, byte_tokens
from virtual_gpu.models.bundled import architectures

MODEL = "meta-llama/Llama-3.1-8B"
PACKAGES = (
    "unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "transformers==5.17.0", "trl==1.15.0", "triton==3.9.0",
    "torchvision==0.28.0",
)  # fmt: skip
SETTINGS = (("RTX 4090", 2, 2048), ("RTX 4090", 1, 16384), ("T4", 2, 2048))
PROGRAMS = ("TRL", "Unsloth", "Unsloth, padded")
STEPS, SECONDS = 3, 900


def main() -> None:
    """Print the table."""
    python = python_with(PACKAGES)
    print(f"{'card':9} {'texts':>5} {'tokens':>6} {'program':16} {'loaded':>7} {'at most':>8}  GiB reserved")
    with tempfile.TemporaryDirectory() as folder:
        config = {**architectures()[MODEL]["config"], "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        byte_tokens(Path(folder))
        quiet = {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": f"{folder}/compiled"}
        for card, texts, tokens in SETTINGS:
            for program in PROGRAMS:
                command = [str(python), __file__, folder, program, card, str(texts), str(tokens)]
                child = run(command, SECONDS, quiet, told=f"{card}, {program}")
                found = {name: f"{value / 2**30:.2f}" for row in child.rows for name, value in row.items()}
                errors = [line.strip() for line in child.stderr.splitlines() if "Error: " in line]
                how = "" if "reserved" in found else (errors or [child.last_words])[-1][:120]
                loaded, most = found.get("loaded", ""), found.get("reserved", "")
                print(f"{card:9} {texts:5} {tokens:6,} {program:16} {loaded:>7} {most:>8}  {how}", flush=True)


def work(folder: str, program: str, card: str, texts: int, tokens: int) -> None:
    """Train, and print the bytes that are reserved at most: with the trainer made, and after the steps."""
    import torch

    from virtual_gpu.program.context import cuda

    with cuda(card):
        made = _of_unsloth(folder, tokens) if program.startswith("Unsloth") else _of_trl(folder)
        model, tokenizer, adapters, more = made
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        if program.endswith("padded"):
            more["padding_free"] = False
        arguments = SFTConfig(
            output_dir=f"{folder}/outputs", max_length=tokens, per_device_train_batch_size=texts, max_steps=STEPS,
            gradient_accumulation_steps=2, optim="adamw_8bit", report_to="none", **{half: True}, **more,
        )  # fmt: skip
        full = Dataset.from_list([{"text": "a" * tokens}] * (2 * texts * STEPS))  # a byte is a token
        trainer = SFTTrainer(model, arguments, processing_class=tokenizer, train_dataset=full, peft_config=adapters)
        emit({"loaded": torch.cuda.max_memory_reserved()})
        trainer.train()
        emit({"reserved": torch.cuda.max_memory_reserved()})


def _of_unsloth(folder: str, tokens: int) -> tuple:
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=tokens, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, target_modules=[*MATRICES], lora_dropout=0, bias="none",
        use_gradient_checkpointing="unsloth", random_state=3407,
    )  # fmt: skip
    return model, tokenizer, None, {}


def _of_trl(folder: str) -> tuple:
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=half
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bit, dtype=half, device_map={"": 0})
    adapters = LoraConfig(r=16, lora_alpha=16, target_modules=[*MATRICES], task_type="CAUSAL_LM")
    return model, AutoTokenizer.from_pretrained(folder), adapters, {"gradient_checkpointing": True}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["HF_HUB_OFFLINE"] = "1"
        work(*sys.argv[1:4], *map(int, sys.argv[4:6]))
    else:
        main()
