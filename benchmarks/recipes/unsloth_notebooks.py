"""Unsloth's notebooks (unslothai/notebooks, LGPL-3.0) on Colab's T4: what is reserved before the training begins.

A notebook prints `max_memory_reserved` twice: when the trainer is made, and after the training. The first hangs on
nothing that is not stated: the model's own sizes, how Unsloth loads it, what is trained. The second hangs on how long
the texts of a dataset of the hub are, and is not run.

The program is Unsloth's own, in the release that the notebook prints, on weights of zeros and a tokenizer of bytes.
Each row has a process of its own: Unsloth changes what it is imported into, and takes its buffers then. Not stated, or
not as there: the releases of unsloth_zoo and trl (of the same days), PyTorch (2.9 there), xformers (installed there).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.children import emit, run
from benchmarks.recipes.recipe import SIZE, Recipe, Refused, Row, from_source, gpu_of
from virtual_gpu.models.bundled import architectures

MODELS = {
    "unsloth/functiongemma-270m-it": "google/gemma-3-270m",
    "unsloth/gemma-3-270m-it": "google/gemma-3-270m",
    "unsloth/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ZOO = "2025.12.7"
SECONDS = 500


def predict(row: Row) -> int:
    """Bytes reserved at most until the trainer is there."""
    if row["model"] not in MODELS:
        raise Refused(f"{row['model']}: its sizes are not here, or which of its weights are in 4 bits is on the hub")
    if row["settings"].moment != "before training":
        raise Refused("the peak of the training hangs on the lengths of the hub's texts")
    asked = {**row["settings"], "card": gpu_of(row).spec.name}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(MODELS[row["model"]], Path(folder))
        quiet = {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": f"{folder}/compiled"}
        child = run([sys.executable, __file__, folder, json.dumps(asked)], SECONDS, quiet, told=row["id"])
    if not child.rows:
        raise RuntimeError(child.last_words or "it printed nothing")
    return child.rows[-1]["reserved"]


def checkpoint(name: str, folder: Path) -> None:
    """A folder as of the hub: the bundled configuration, zeros for weights (tied ones once), bytes for tokens."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    config = architectures()[name]["config"]
    named = {"architectures": [CLASSES[config["model_type"]]], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config, **named}), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    zeros = {key: torch.zeros(value.shape, dtype=torch.bfloat16) for key, value in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del zeros["lm_head.weight"]
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokens(folder)


def byte_tokens(folder: Path) -> None:
    """A tokenizer in a folder whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    made.save_pretrained(folder)


def before_training(folder: str, asked: dict[str, Any]) -> int:
    """What is reserved at most when the trainer of such a notebook is made."""
    import torch

    from virtual_gpu.program.context import cuda

    with cuda(asked["card"]):
        from unsloth import FastModel  # noqa: I001  (before transformers and TRL, which it changes)
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        rank = asked.get("rank")
        model, tokenizer = FastModel.from_pretrained(
            folder, max_seq_length=asked["length"], load_in_4bit=False, full_finetuning=rank is None,
            qat_scheme=asked.get("qat"),
        )  # fmt: skip
        if rank is not None:
            model = FastModel.get_peft_model(
                model, r=rank, lora_alpha=rank, target_modules=[*MATRICES], lora_dropout=0, bias="none",
                use_gradient_checkpointing="unsloth", random_state=3407,
            )  # fmt: skip
        arguments = SFTConfig(
            output_dir=f"{folder}/outputs", dataset_text_field="text", optim=asked["optimizer"], report_to="none",
            per_device_train_batch_size=asked["batch"], gradient_accumulation_steps=asked["accumulation"], max_steps=1,
        )  # fmt: skip
        texts = Dataset.from_list([{"text": "text " * 20}] * 64)
        SFTTrainer(model=model, processing_class=tokenizer, train_dataset=texts, args=arguments)
        return torch.cuda.max_memory_reserved()


def packages(row: Row) -> tuple[str, ...]:
    """Of the notebook's day."""
    stated = row["settings"]
    named = [f"{name}=={stated[name]}" for name in ("unsloth", "transformers", "trl") if name in stated]
    quantized = ("torchao==0.15.0",) if stated.get("qat") else ()
    return (*named, f"unsloth_zoo=={ZOO}", "datasets==4.3.0", "triton==3.5.1", "torchvision==0.28.0", *quantized)


RECIPES = (
    Recipe(
        name="Unsloth's notebooks",
        what="Unsloth's notebooks until the training begins: LoRA in 16 bits, everything with QAT",
        what_ko="Unsloth 노트북, 학습을 시작하기 전까지",
        handles=from_source("unslothai/notebooks"),
        predict=predict,
        packages=packages,
        settings={
            "moment": ("before training", "training"),
            **dict.fromkeys(("rank", "length", "batch", "accumulation"), SIZE),
            "optimizer": ("adamw_8bit", "adamw_torch"),
            "qat": ("int4", "phone-deployment"),
            "unsloth": ("2025.12.6", "2025.12.8", "2025.12.9"),
            "transformers": ("4.56.2", "4.57.3"),
            "trl": ("0.22.2",),
            "torch": ("2.9.0",),
        },
    ),
)

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    emit({"reserved": before_training(sys.argv[1], json.loads(sys.argv[2]))})
