"""Prints what torch.cuda says at its end."""

import json
import sys

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
side = torch.cuda.Stream()
for _ in range(2):
    model(torch.randn(int(sys.argv[2]), 1000, device="cuda")).sum().backward()
    with torch.cuda.stream(side):
        extra = torch.empty(3_000_000, device="cuda")
    del extra
    optimizer.step()
    optimizer.zero_grad()
stats = torch.cuda.memory_stats()
print(json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]))
