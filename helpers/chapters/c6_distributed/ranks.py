"""What a rank runs (chapter 6): data parallelism with DDP, and ZeRO's stages. Start them with `run_ranks`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.shards.collectives import Collectives
from virtual_gpu.shards.fake_rank import MasterAdamW, fsdp_groups
from virtual_gpu.shards.layout import Layout
from virtual_gpu.units import positive_int

from ...small_model import SmallLanguageModel, sentences
from .launcher import rank_device


@dataclass
class TrainingRun:
    """What a rank saw: the whole batch's loss at each step, the last gradients, the bytes it holds, its share of rows.

    gradients: all of them as one vector. held: bytes by kind, distinct storages. sent: elements of the last step, by
    collective. seconds: the fastest step.
    """

    rows: int
    losses: list[float]
    gradients: torch.Tensor
    held: dict[str, int]
    sent: Counter
    seconds: float


def add_up() -> tuple[int, int, int]:
    """(rank, world size, the sum of all ranks' own number + 1): every rank gets the same sum."""
    rank, number = dist.get_rank(), torch.tensor(dist.get_rank() + 1, device=rank_device())
    dist.all_reduce(number)
    return rank, dist.get_world_size(), int(number)


def small_model() -> SmallLanguageModel:
    """The model of 64 capitals in fp64: the same numbers on every rank, and on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SmallLanguageModel(depth=4).double()


def sentence_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a sentence (the sum over its answer's characters), averaged over the sentences."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / len(labels)


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


def one_process(steps: int = 5) -> TrainingRun:
    """The same training in this process, with all 64 sentences in one batch."""
    tokens, labels = sentences()
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses, seconds = [], []
    for _ in range(positive_int(steps, "steps")):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = sentence_loss(model(tokens), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
    gradients, bytes_held = flat_gradients(model), held(model, optimizer)
    return TrainingRun(len(tokens), losses, gradients, bytes_held, Counter(), min(seconds))


def share_of(rows: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """This rank's rows. ValueError unless all get as many: the mean of unequal shares' means is not the mean of all."""
    if len(rows) % n:
        raise ValueError(
            tr(
                ko=f"{len(rows)}행을 rank {n}개가 똑같이 나눌 수 없다. rank 수를 {len(rows)}의 약수로 한다.",
                en=f"{len(rows)} rows do not divide by {n} ranks: use a number that divides {len(rows)}.",
            )
        )
    return rows.chunk(n)[rank]


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of the ranks' losses, on every rank."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def flat_gradients(model: torch.nn.Module) -> torch.Tensor:
    """All gradients as one vector on the CPU; FSDP2's are collected from every rank."""
    parts = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters())
    return torch.cat([part.detach().flatten() for part in parts]).cpu()


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and optimizer state (without its step counters)."""
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer's own part
    tensors = (t for values in state.values() for name, t in values.items() if name != "step")
    return {
        "parameters": weigh(model.parameters()),
        "gradients": weigh(p.grad for p in model.parameters()),
        "optimizer": weigh(tensors),
    }


def weigh(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages below these tensors on this rank."""
    storages = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


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


def tiny_neox() -> Any:
    """polyglot-ko's architecture (GPT-NeoX) with 2 layers, 64 wide."""
    config = with_depth(load_config("EleutherAI/polyglot-ko-1.3b"), 2)
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 64, 4, 256
    config.vocab_size, config.max_position_embeddings = 1000, 64
    return config


def tiny_model(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.nn.Module:
    """That model with the same random weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(tiny_neox(), dtype, device="cpu")
    return model.to(device).train()


def tiny_batch(rows: int = 8, length: int = 16) -> torch.Tensor:
    """Token ids (rows, length), the same in every process."""
    return torch.randint(1000, (rows, length), generator=torch.Generator().manual_seed(0))


def next_token_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token in the model's own dtype (transformers computes its loss in fp32)."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


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
            from torch.distributed.fsdp import fully_shard

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
