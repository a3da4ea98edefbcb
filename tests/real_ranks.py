"""Run by torchrun from test_ledger: one step at each stage on real tensors, and what this rank's storages weigh."""

import json
import os
import sys

import torch
import torch.distributed as dist

from helpers.distributed.fake_rank import _locals, _optimizer, _states, shard
from helpers.distributed.layout import CONVENTIONS, Layout
from helpers.experiment import with_depth
from helpers.models import load_config


def tiny():
    """gpt2 with two layers and a few rows, no number of which divides by three."""
    config = with_depth(load_config("gpt2"), 2)
    config.n_embd, config.n_head, config.vocab_size, config.n_positions = 80, 2, 1001, 64
    return config


def weigh(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for address, nbytes in storages.items() if address)


def main():
    dist.init_process_group("gloo")
    rows = {}
    for stage in range(4):
        layout = Layout(dist.get_world_size(), stage)
        model, mesh = shard(tiny(), layout, CONVENTIONS["mixed"])
        model.to_empty(device="cpu")
        if stage < 2:
            model.tie_weights()
        for parameter in _locals(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.02)
        optimizer = _optimizer(model, layout, CONVENTIONS["mixed"], mesh)
        tokens = torch.randint(1000, (1, 16))
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        gathered = weigh(_locals(model.parameters()))
        outputs.loss.backward()
        optimizer.step()
        row = {"parameters": weigh(_locals(model.parameters()))}
        row["gathered"] = gathered if stage == 2 else 0
        row["gradients"] = weigh(_locals(p.grad for p in model.parameters()))
        row |= {
            kind: weigh(_states(optimizer, name))
            for kind, name in (("master", "master"), ("momentum", "exp_avg"), ("variance", "exp_avg_sq"))
        }
        rows[stage] = row
    with open(f"{sys.argv[1]}.{dist.get_rank()}", "w") as file:
        json.dump(rows, file)
    dist.barrier()
    dist.destroy_process_group()
    # All is written. Now and then a thread of PyTorch's aborts the interpreter at its exit ("terminate called
    # without an active exception"), after destroy_process_group too.
    os._exit(0)


if __name__ == "__main__":
    main()
