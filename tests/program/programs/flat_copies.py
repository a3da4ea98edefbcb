"""As ZeRO does it: bf16 weights gathered from a part and let go again, stepped as one flat copy in fp32."""

import torch
from torch import nn

layer = nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
layer.weight.ds_tensor = layer.weight.detach().flatten()[: 2**19].clone()
copy = nn.Parameter(layer.weight.ds_tensor.float())
optimizer = torch.optim.AdamW([copy], fused=True)
for _ in range(2):
    layer.weight.data = torch.cat([layer.weight.ds_tensor] * 2).view(1024, 1024)
    layer(torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    copy.grad, layer.weight.grad = layer.weight.grad.flatten()[: 2**19].float(), None
    layer.weight.data = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()
