"""A program that catches the out-of-memory error and goes on with half the batch."""

import torch

model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = 2**23
while True:
    try:
        model(torch.empty(batch, 1024, device="cuda")).sum().backward()
        break
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        batch //= 2
print("batch", batch)
optimizer.step()
