"""Stage 1 of ZeRO, with PyTorch's own optimizer."""

import os

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[rank], gradient_as_bucket_view=True)
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
for _ in range(3):
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
