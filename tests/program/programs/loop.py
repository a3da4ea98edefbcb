"""A hand-written loop: autocast, GradScaler, clipping, a data loader with workers, printing, saving."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

width = int(sys.argv[1]) if len(sys.argv) > 1 else 256
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=False)
scaler = torch.amp.GradScaler("cuda")
data = TensorDataset(torch.randn(64, width), torch.randint(0, 10, (64,)))
for x, y in DataLoader(data, batch_size=8, num_workers=1, pin_memory=True):
    x, y = x.to(device, non_blocking=True), y.to(device)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"{loss.item():.2f}")
with torch.no_grad():
    for x, _ in DataLoader(data, batch_size=16):
        print("evaluated", model(x.to(device)).shape[0])
torch.save(model.state_dict(), "/nowhere/model.pt")
