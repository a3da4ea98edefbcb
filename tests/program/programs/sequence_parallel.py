"""Blocks whose tensors and tokens are split over the cards, each compiled or not."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

compiled = False
world = int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (world,))


class Block(torch.nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + torch.zeros(x.shape[-1], device=x.device)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


plan = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
blocks = [parallelize_module(Block().cuda(), mesh, plan) for _ in range(3)]
model = torch.nn.Sequential(*(torch.compile(block, fullgraph=True) if compiled else block for block in blocks))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(16, 2048 // world, 512, device="cuda", requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
