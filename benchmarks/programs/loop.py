"""The step of `virtual_gpu.step.run.train` as a program of its own: MODEL, batch 4 × 256, AdamW."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, device_map="cuda", use_cache=False)
model.train()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    ids = torch.zeros(4, 256, dtype=torch.int64)
    model(input_ids=ids.cuda(), labels=ids.cuda()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
