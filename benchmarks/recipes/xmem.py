"""Stone-ResearchLife/xMem: four training steps of small language models on RTX 3060 and 4060, seen by NVML.

What is printed is the most that NVML saw in use less what it saw first. Whether that includes the CUDA context depends
on when the first sample was taken (the source says neither), so the prediction is a range: what the allocator reserves,
without and with the context of that card. Nothing is fitted. All samples are taken as 128 tokens long, the most.
"""

from __future__ import annotations

from functools import cache

import torch

from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import architectures, load_config, resolve_model_id
from virtual_gpu.program.context import cuda
from virtual_gpu.room import room_on

from .recipe import ANY, SIZE, Prediction, Recipe, Refused, Row, from_source, gpu_of

LENGTH, STEPS = 128, 4
# What the hub's configurations say beside the defaults of their kinds.
CONFIGURATIONS = {
    "distilbert/distilgpt2": {"model_type": "gpt2", "n_layer": 6},
    "cerebras/Cerebras-GPT-111M": {"model_type": "gpt2", "n_layer": 10, "n_inner": 3072, "n_positions": 2048,
                                   "activation_function": "gelu"},
    "EleutherAI/gpt-neo-125M": {"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12,
                                "attention_types": [[["global", "local"], 6]]},
    "facebook/opt-125m": {"model_type": "opt", "vocab_size": 50272},
    "T5-small": {"model_type": "t5", "decoder_start_token_id": 0},
}  # fmt: skip


def predict(row: Row) -> Prediction:
    """Bytes that NVML sees, as a range."""
    settings, spec = row["settings"], gpu_of(row).spec
    name = str(row["model"])
    reserved = _run(name, int(settings["batch"]), str(settings["optimizer"]), spec.name)
    context = room_on(spec).outside[0].bytes
    return Prediction(reserved, low=reserved, high=reserved + context.high, note="from without to with the context")


@cache
def _run(name: str, batch: int, optimizer_name: str, card: str) -> int:
    from transformers import AutoConfig

    if name in CONFIGURATIONS:
        config = AutoConfig.for_model(**CONFIGURATIONS[name])
    elif resolve_model_id(name) in architectures():
        config = load_config(name)
    else:
        raise Refused(f"no configuration of {name} is bundled")
    with cuda(card):
        model = build_model(config, torch.float32).to_empty(device="cuda")
        model.tie_weights()
        optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-4)
        ids = torch.ones(batch, LENGTH, dtype=torch.int64)
        mask = torch.ones_like(ids)
        mask[1:, -3:] = 0
        model.train()
        for _ in range(STEPS):
            optimizer.zero_grad()
            batch_on_card = {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "labels": ids.cuda()}
            outputs = model(**batch_on_card)
            outputs.loss.backward()
            optimizer.step()
        return torch.cuda.max_memory_reserved()


RECIPES = (
    Recipe(
        name="xMem",
        what="xMem's ANOVA and Monte Carlo runs: fp32 from a configuration, 4 steps, transformers 4.51.3",
        what_ko="설정만으로 만든 모델의 네 스텝, fp32, 카드 전체의 메모리",
        handles=from_source("Stone-ResearchLife/xMem"),
        predict=predict,
        peers=lambda row: row.get("peers") or {},
        settings={
            "batch": SIZE,
            "optimizer": ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad"),
            "seq": ("128 (max_length truncation, longest in batch)", LENGTH),
            "iterations": (STEPS,),
            "dtype": ("float32 random init from_config", "float32"),
            "zero_grad": ("start of iteration",),
            **dict.fromkeys(("dataset", "torch", "transformers"), ANY),
        },
        packages=lambda row: (f"transformers=={row['settings'].get('transformers', '4.51.3')}",),
    ),
)
