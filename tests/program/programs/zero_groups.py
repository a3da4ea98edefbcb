"""DeepSpeed's engine with parameters in two groups, or at stage 3 in many sub-groups: zero_groups.py STAGE."""

import sys

import deepspeed
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": int(sys.argv[1]), "sub_group_size": 30_000},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
for _ in range(20):
    engine.backward(engine(torch.randn(8, 256, device=engine.device, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
