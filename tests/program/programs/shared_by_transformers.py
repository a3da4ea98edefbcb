"""transformers' own tensor, expert and data parallelism: `distributed_config`, two layers, two steps."""

import json
import sys

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

TOKENS, CHOSEN = 512, 8
received = set()


class Noted(AllToAllEP):
    """transformers' own, which says how many rows come to this rank's experts."""

    def _dispatch_tokens(self, *args):
        rows, *more = super()._dispatch_tokens(*args)
        received.add(rows.shape[0])
        return rows, *more


EPImplementationInterface.register("noted", Noted)
name, config = sys.argv[1], json.loads(sys.argv[2])
shared = DistributedConfig(**config)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, num_hidden_layers=2, distributed_config=shared)
groups = {}
for parameter in model.parameters():  # a list of one kind each: PyTorch's optimizers do not take them together
    groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-5, foreach=True)
ids = torch.ones(1, TOKENS, dtype=torch.int64).cuda()
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# experts that have a part of the batch in common have a part of its tokens each
assert received == ({TOKENS * CHOSEN // shared.tp_size} if shared.ep_size > 1 else set()), received
