"""DeepSpeed's engine: zero_deepspeed.py STAGE [DEVICE of the optimizer]; 8 Mi bf16 parameters, its own AdamW."""

import sys

import deepspeed
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
zero = {"stage": int(sys.argv[1]), "reduce_bucket_size": 2**20, "stage3_param_persistence_threshold": 0}
if len(sys.argv) > 2:
    zero["offload_optimizer"] = {"device": sys.argv[2], "nvme_path": "/nowhere"}
config = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
    "zero_optimization": zero,
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(4):
    loss = engine(torch.randn(8, 1024, device=engine.device, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
