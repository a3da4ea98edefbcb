"""A process for each card, by `torch.multiprocessing.spawn`; devices are whole numbers."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def main(rank: int, world_size: int, width: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(torch.nn.Linear(width, width, bias=False).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, width, device=rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    mp.spawn(main, args=(processes, 1024), nprocs=processes)
