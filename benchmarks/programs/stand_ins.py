"""What stands in for data, tokenizers and metrics: random, small, made where the programs look before the network."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

_METRIC = """import datasets
import evaluate


class StandIn(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({{"predictions": number, "references": number}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {{"{name}": 0.0}}
"""
# torchvision's compiled part needs CUDA's libraries; what it registers fakes for is declared, and never called.
_OPERATORS = """import torch

if torch.version.cuda is None:
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
_TIKTOKEN = """class Encoding:
    max_token_value = 50256

    def encode(self, text, allowed_special=()):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(token % 256 for token in tokens).decode(errors="replace")


def get_encoding(name):
    return Encoding()
"""


def make(folder: Path) -> None:
    """Everything below FOLDER/work, and links to it where a program runs elsewhere."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(3000)]

    def text(n: int) -> str:
        return " ".join(chance.choices(words, k=n))

    lines = [text(200) for _ in range(2000)]
    _write(work / "train.txt", "\n".join(lines))
    _write(work / "data" / "wikitext-2.txt", "\n".join(lines))
    _models(work, lines[:500])
    for split, n in (("train", 200), ("validation", 40), ("test", 40)):
        pairs = [{"sentence1": text(20), "sentence2": text(20), "label": chance.randint(0, 1)} for _ in range(n)]
        _csv(work / f"pairs_{split}.csv", [{**pair, "label": pair["label"] / 2} for pair in pairs])
        _json_lines(work / f"texts_{split}.json", [{"text": text(400), "summary": text(50)} for _ in range(n)])
        _json_lines(work / "nyu-mll" / "glue" / f"mrpc_{split}.jsonl", [{**p, "idx": i} for i, p in enumerate(pairs)])
    _card(work / "nyu-mll" / "glue", "mrpc", {s: f"mrpc_{s}.jsonl" for s in ("train", "validation", "test")})
    chats = [[{"role": "user", "content": text(60)}, {"role": "assistant", "content": text(120)}] for _ in range(400)]
    for split in ("train", "test"):
        _json_lines(work / "sft" / f"{split}.jsonl", [{"messages": chat} for chat in chats])
    _json_lines(
        work / "dpo" / "train.jsonl",
        [{"prompt": text(60), "chosen": text(80), "rejected": text(80)} for _ in range(400)],
    )
    instructions = [{"instruction": text(20), "input": "", "output": text(200)} for _ in range(400)]
    _json_lines(work / "tatsu-lab" / "alpaca" / "train.jsonl", instructions)
    _deepspeed(work)
    questions = [
        {"query": text(40), "response": f"{text(80)} 7", "type": "x", "original_question": "x"} for _ in range(600)
    ]
    _json_lines(work / "meta-math" / "MetaMathQA" / "train.jsonl", questions)
    _json_lines(work / "HuggingFaceFW" / "finewiki" / "train.jsonl", [{"text": text(300)} for _ in range(100)])
    answers = [{"question": text(40), "answer": f"{text(60)} #### 7"} for _ in range(400)]
    for split in ("train", "test"):
        _json_lines(work / "openai" / "gsm8k" / f"{split}.jsonl", answers)
    _card(work / "openai" / "gsm8k", "main", {s: f"{s}.jsonl" for s in ("train", "test")})
    _images(work)
    for name in ("accuracy", "rouge", "glue", "mse"):
        _write(work / name / f"{name}.py", _METRIC.format(name=name))
    (work / "nltk_data" / "tokenizers" / "punkt").mkdir(parents=True, exist_ok=True)
    _write(folder / "vision" / "sitecustomize.py", _OPERATORS)
    repos = folder / "repos"
    _links(
        work,
        repos / "peft" / "method_comparison" / "MetaMathQA",
        ("meta-math", "openai", "meta-llama", "HuggingFaceFW"),
    )
    _mnist(work)
    if not (work / "git").exists():  # a program asks for the commit of peft, which may be no checkout here
        _git(work / "git")
    for split, part in (("train", lines[:500]), ("valid", lines[500:550]), ("test", lines[550:600])):
        _write(work / "wikitext-2" / f"{split}.txt", "\n".join(part))
    for name in ("input", "middlemarch", "the-verdict"):
        _write(work / f"{name}.txt", "\n".join(lines[:200]) + "O God, O God!")
    _json_lines(work / "prompts" / "train.jsonl", [{"prompt": [chat[0]]} for chat in chats])
    _write(folder / "stubs" / "tiktoken.py", _TIKTOKEN)
    for name in ("__init__", "pyplot", "ticker"):  # nothing is drawn before the programs end
        _write(folder / "stubs" / "matplotlib" / f"{name}.py", "MaxNLocator = None\n")
    tokens = np.random.default_rng(0).integers(0, 50_000, 2**18, dtype=np.uint16)
    for split in ("train", "val"):
        path = repos / "nanoGPT" / "data" / "random" / f"{split}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens.tofile(path)


def _deepspeed(work: Path) -> None:
    """Configurations: those of transformers' page on DeepSpeed, and what the offloading script's launcher writes."""
    auto = {name: "auto" for name in ("lr", "betas", "eps", "weight_decay")}
    trainer = {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": auto},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    overlapped = {"overlap_comm": True, "contiguous_gradients": True}
    two = {
        "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
    }  # fmt: skip
    three = {
        "stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    offload = {
        "stage": 3, "overlap_comm": False, "reduce_bucket_size": 4e8, "sub_group_size": 4e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    for name, config in {
        "zero2": trainer | {"zero_optimization": two | overlapped},
        "zero3": trainer | {"zero_optimization": three | overlapped},
        "zero3_offload": {
            "train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
            "zero_optimization": offload, "wall_clock_breakdown": True,
        },
    }.items():  # fmt: skip
        _write(work / f"{name}.json", json.dumps(config))


def _models(work: Path, lines: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        BertConfig,
        GPT2Config,
        LlamaConfig,
        PreTrainedTokenizerFast,
        Qwen3Config,
        T5Config,
        ViTConfig,
    )

    kept = work / "tokenizer.json"  # which a card and a virtual one share: lengths decide the bytes
    if kept.exists():
        bpe = Tokenizer.from_file(str(kept))
    else:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        special = ["<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
        bpe.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=4000, special_tokens=special))
        bpe.save(str(kept))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", unk_token="[UNK]",
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    qwen3 = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True, dtype="bfloat16", architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    llama = LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, tie_word_embeddings=True, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    t5 = T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    for name, config in {
        "gpt2": GPT2Config(architectures=["GPT2LMHeadModel"]), "bert-base-cased": BertConfig(), "t5": t5,
        "bert-one": BertConfig(num_labels=1),
        "qwen3-0.6b": qwen3, "meta-llama/Llama-3.2-3B": llama,
        "vit": ViTConfig(architectures=["ViTForImageClassification"]),
    }.items():  # fmt: skip
        config.save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 224, "width": 224}}
    _write(work / "vit" / "preprocessor_config.json", json.dumps(processor))
    _stable_diffusion(work / "sd15", tokenizer)


def _stable_diffusion(folder: Path, tokenizer: Any) -> None:
    from transformers import CLIPTextConfig

    tokenizer.model_max_length = 77
    tokenizer.save_pretrained(folder / "tokenizer")
    names = {token: place for token, place in tokenizer.get_vocab().items() if token.isascii()}
    _write(folder / "tokenizer" / "vocab.json", json.dumps({**names, "<|startoftext|>": 4000, "<|endoftext|>": 4001}))
    _write(folder / "tokenizer" / "merges.txt", "#version: 0.2\n")
    CLIPTextConfig(
        num_hidden_layers=12, hidden_size=768, intermediate_size=3072, num_attention_heads=12
    ).save_pretrained(folder / "text_encoder")
    parts: dict[str, dict[str, Any]] = {
        "unet": {
            "_class_name": "UNet2DConditionModel", "sample_size": 64, "cross_attention_dim": 768,
            "attention_head_dim": 8,
        },
        "vae": {
            "_class_name": "AutoencoderKL", "sample_size": 512, "latent_channels": 4, "layers_per_block": 2,
            "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
        },
        "scheduler": {"_class_name": "DDPMScheduler", "num_train_timesteps": 1000, "beta_schedule": "scaled_linear"},
    }  # fmt: skip
    for name, config in parts.items():
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        _write(folder / name / file, json.dumps(config))


def _git(folder: Path) -> None:
    """A repository of one empty commit; without git there is none, and the program that asks for it says so."""
    if shutil.which("git") is None:
        return
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    folder.mkdir()
    for command in (["init", "--quiet"], [*who, "commit", "--quiet", "--allow-empty", "--message=none"]):
        subprocess.run(["git", *command], check=True, cwd=folder)


def _mnist(work: Path) -> None:
    """MNIST's own files, of noise; the programs look for them beside the folder that they run in."""
    chance = np.random.default_rng(0)
    (work / "cwd" / "results").mkdir(parents=True, exist_ok=True)
    raw = work / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for split, n in (("train", 2000), ("t10k", 1000)):
        images = chance.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        head = np.array([0x803, n, 28, 28], dtype=">i4").tobytes()
        (raw / f"{split}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = chance.integers(0, 10, n, dtype=np.uint8)
        head = np.array([0x801, n], dtype=">i4").tobytes()
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def _images(work: Path) -> None:
    if importlib.util.find_spec("PIL") is None:
        return  # the programs that read images need it themselves, and say so
    from PIL import Image

    rows = []
    for split in ("train", "validation"):
        for kind in ("cat", "dog"):
            for number in range(40):
                path = work / "images" / split / kind / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    Image.effect_noise((256, 256), 50).convert("RGB").save(path)
                if split == "train" and kind == "cat":
                    rows.append({"file_name": f"{number}.jpg", "text": "a cat"})
    captioned = work / "captioned"
    captioned.mkdir(exist_ok=True)
    _links(work / "images" / "train" / "cat", captioned, tuple(row["file_name"] for row in rows))
    _json_lines(captioned / "metadata.jsonl", rows)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _json_lines(path: Path, rows: list[dict]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _card(folder: Path, config: str, files: dict[str, str]) -> None:
    """The README of a data set that has a configuration of this name."""
    lines = [f"  - split: {split}\n    path: {file}" for split, file in files.items()]
    _write(
        folder / "README.md", "\n".join(["---", "configs:", f"- config_name: {config}", "  data_files:", *lines, "---"])
    )


def _links(work: Path, to: Path, names: tuple[str, ...]) -> None:
    if to.is_dir():
        for name in names:
            if not (to / name).exists():
                (to / name).unlink(missing_ok=True)  # a link that leads nowhere: the folder was moved
                os.symlink(work / name, to / name)
