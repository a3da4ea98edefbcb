"""A mesh opened without a process group, and random weights of DTensors that begin on meta."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cuda", (4,))
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096, bias=False), torch.nn.Linear(4096, 1024, bias=False))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
model.to_empty(device="cuda")
for part in model:
    part.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 1024, device="cuda")).sum().backward()
optimizer.step()
