"""A model that FSDP2 shared out on the meta device, filled with random numbers on the card; NCCL's timeout is set."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cuda")
with torch.no_grad():
    for parameter in model.parameters():
        torch.nn.init.trunc_normal_(parameter)
        parameter.normal_()
_set_pg_timeout(timedelta(seconds=100), dist.group.WORLD)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
