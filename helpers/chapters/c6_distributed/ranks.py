"""What a rank runs (chapter 6): data parallelism with DDP, and ZeRO's stages. Start them with `run_ranks`."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from virtual_gpu.shards.collectives import Collectives
from virtual_gpu.shards.fake_rank import MasterAdamW, fsdp_groups
from virtual_gpu.shards.layout import Layout
from virtual_gpu.units import positive_int

from ...ranks.launcher import rank_device
from ...ranks.training import (
    TrainingRun,
    flat_gradients,
    held,
    mean_over_ranks,
    next_token_loss,
    sentence_loss,
    share_of,
    small_model,
    tiny_batch,
    tiny_model,
    weigh,
)
from ...small_model import sentences


def add_up() -> tuple[int, int, int]:
    """(rank, world size, the sum of all ranks' own number + 1): every rank gets the same sum."""
    rank, number = dist.get_rank(), torch.tensor(dist.get_rank() + 1, device=rank_device())
    dist.all_reduce(number)
    return rank, dist.get_world_size(), int(number)


def data_parallel(steps: int = 5) -> TrainingRun:
    """Each rank trains its own copy of the small model on its own share of the sentences."""
    rank, n, device = dist.get_rank(), dist.get_world_size(), rank_device()
    tokens, labels = (share_of(part, rank, n).to(device) for part in sentences())
    model = DistributedDataParallel(small_model().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses, seconds = [], []
    for _ in range(positive_int(steps, "steps")):
        begin = time.perf_counter()
        optimizer.zero_grad()
        with Collectives() as collectives:
            loss = sentence_loss(model(tokens), labels)
            loss.backward()  # DDP averages the gradients over the ranks here
            optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(mean_over_ranks(loss))
    gradients, bytes_held = flat_gradients(model), held(model, optimizer)
    return TrainingRun(len(tokens), losses, gradients, bytes_held, collectives.elements, min(seconds))


# -- ZeRO ----------------------------------------------------------------------------------------------------------


@dataclass
class ZeroRun:
    """One rank at a ZeRO stage. held: bytes in mixed precision, "gathered" of them between forward and backward.

    losses and gradients in fp64; sent: elements by collective in one step; parameters: Ψ; flops: of one
    step's matrix products on this rank.
    """

    losses: list[float]
    gradients: torch.Tensor
    held: dict[str, int]
    sent: Counter
    parameters: int
    flops: int

    @property
    def total(self) -> int:
        """Bytes a rank holds of the model."""
        return sum(self.held.values())

    @property
    def travelled(self) -> int:
        """Elements a step sends; an all-reduce is a reduce-scatter and an all-gather, so it counts twice."""
        return sum(self.sent.values()) + self.sent["allreduce"]


def zero(stage: int, steps: int = 3) -> ZeroRun:
    """Train the tiny GPT-NeoX at a ZeRO stage: in fp64 for its losses, then a step in mixed precision for its bytes."""
    exact = _Sharded(stage, torch.float64, torch.optim.AdamW)
    losses = [exact.step() for _ in range(steps)]
    mixed = _Sharded(stage, torch.bfloat16, MasterAdamW)
    for _ in range(3):  # DDP arranges its buckets anew in the second step, and tells the others
        mixed.step()
    bytes_held = held(mixed.model, mixed.optimizer) | {"gathered": mixed.gathered}
    return ZeroRun(losses, flat_gradients(exact.model), bytes_held, mixed.sent, mixed.parameters, mixed.flops)


class _Sharded:
    """The tiny model under PyTorch's engine for a stage."""

    def __init__(self, stage: int, dtype: torch.dtype, optimizer: type[torch.optim.Optimizer]):
        rank, n, device = dist.get_rank(), dist.get_world_size(), rank_device()
        self.stage = Layout(n, stage).stage
        self.tokens = share_of(tiny_batch(), rank, n).to(device)
        self.model = tiny_model(dtype, device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.gathered = 0
        if stage < 2:
            self.engine = DistributedDataParallel(self.model, gradient_as_bucket_view=True, broadcast_buffers=False)
        else:
            for group in (*fsdp_groups(self.model), self.model):
                fully_shard(group, reshard_after_forward=stage == 3)
            self.engine = self.model
        if stage == 1:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), optimizer, lr=1e-3, foreach=False)
        else:
            self.optimizer = optimizer(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self) -> float:
        """One training step on this rank's rows; the loss of all rows."""
        self.optimizer.zero_grad()
        with Collectives() as collectives, FlopCounterMode(display=False) as flops:
            loss = next_token_loss(self.engine, self.tokens)
            if self.stage == 2:  # the whole parameters, until the backward is done with them; the shard stays beside
                self.gathered = weigh(self.model.parameters())
            loss.backward()
            self.optimizer.step()
        self.sent, self.flops = collectives.elements, flops.get_total_flops()
        return mean_over_ranks(loss)


# -- FSDP2 as one writes it ----------------------------------------------------------------------------------------


def shard_model(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Shard a model of transformers over a mesh: each block is gathered when it computes, and let go after."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.base_model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@dataclass
class ShardedRun:
    """One rank's step under FSDP2. held: bytes by kind; sent: elements by collective; loss: of all rows.

    unsharded: bytes of whole gradients that wait before the last micro-batch.
    """

    loss: float
    held: dict[str, int]
    sent: Counter
    unsharded: int


def fsdp2(replicas: int = 1, micro_batches: int = 1, sync_each: bool = True) -> ShardedRun:
    """A step of the tiny GPT-NeoX: sharded over all ranks, or inside each of `replicas` groups of them (HSDP).

    sync_each: send the gradients after every micro-batch; else after the last alone.
    """
    rank, n, device = dist.get_rank(), dist.get_world_size(), rank_device()
    shape, names = ((replicas, n // replicas), ("replicate", "shard")) if replicas > 1 else ((n,), ("shard",))
    model = shard_model(tiny_model(torch.float32, device), init_device_mesh(device.type, shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    parts = share_of(tiny_batch(rows=16), rank, n).to(device).chunk(positive_int(micro_batches, "micro_batches"))
    loss, unsharded = torch.zeros((), device=device), 0
    gc.freeze()  # from here on gc.get_objects() names only what is made later
    with Collectives() as collectives:
        for number, part in enumerate(parts, start=1):
            model.set_requires_gradient_sync(sync_each or number == len(parts))
            one = next_token_loss(model, part) / len(parts)
            one.backward()
            loss += one.detach()
            del one
            if number == len(parts) - 1:
                unsharded = _waiting_bytes(model)
        optimizer.step()
    return ShardedRun(mean_over_ranks(loss), held(model, optimizer), collectives.elements, unsharded)


def _waiting_bytes(model: torch.nn.Module) -> int:
    """Bytes of whole gradients beside the shards; no public attribute of FSDP2 shows them.

    A gradient that waits has the shape of the whole parameter, in the type in which gradients are reduced. Other
    tensors may live a moment longer, in the engine's threads or in a collective that is just done: by its shape no
    such moment is taken for a gradient.
    """
    shapes = {tuple(p.shape) for p in model.parameters()}
    sharded = [p.grad for p in model.parameters() if p.grad is not None]
    made = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    whole = [tensor for tensor in made if tensor.dtype == torch.float32 and tuple(tensor.shape) in shapes]
    return weigh(whole + sharded) - weigh(sharded)
