"""One stage of a pipeline, with the schedule that its argument names."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import pipelining

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl")
device = torch.device("cuda", rank)
part = torch.nn.Linear(1024, 1024, bias=False).to(device)
stage = pipelining.PipelineStage(part, rank, ranks, device)
schedule = getattr(pipelining, sys.argv[1])(
    stage, n_microbatches=8, loss_fn=lambda out, target: (out - target).pow(2).sum()
)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
inputs, target = torch.randn(8192, 1024, device=device), torch.randn(8192, 1024, device=device)
for _ in range(2):
    losses = []
    if rank == 0:
        schedule.step(inputs)
    elif rank == ranks - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
