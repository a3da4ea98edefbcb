"""Chapter 4: how often DDP sends gradients while they accumulate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from virtual_gpu.shards.fake_rank import fake_world


def all_reduced_bytes(
    model: nn.Module,
    micro_step: Callable[[DistributedDataParallel, Any, bool], None],
    micro_batches: Sequence[Any],
    ranks: int = 4,
) -> list[int]:
    """The bytes of every all-reduce that DDP starts on one of `ranks` ranks, of which only this one exists.

    micro_step(ddp, micro_batch, last) computes one micro-batch. A copy of the model is wrapped; nothing is sent.
    """
    sent: list[int] = []

    def note(_, bucket):  # DDP refuses annotations that are strings, as they are in this module
        sent.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with fake_world(ranks):
        ddp = DistributedDataParallel(copy.deepcopy(model))
        ddp.register_comm_hook(None, note)
        for i, micro_batch in enumerate(micro_batches):
            micro_step(ddp, micro_batch, i == len(micro_batches) - 1)
    return sent
