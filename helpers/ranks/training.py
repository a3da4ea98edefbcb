"""What ranks train: a small model of 64 capitals and a tiny GPT-NeoX, the same in every process, and what one holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.units import positive_int

from ..small_model import SmallLanguageModel, sentences


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


def small_model(layers: int = 4) -> SmallLanguageModel:
    """The model of 64 capitals in fp64: the same numbers on every rank, and on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SmallLanguageModel(depth=layers).double()


def sentence_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a sentence (the sum over its answer's characters), averaged over the sentences."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / len(labels)


def one_process(steps: int = 5, layers: int = 4) -> TrainingRun:
    """The same training in this process, with all 64 sentences in one batch."""
    tokens, labels = sentences()
    model = small_model(layers)
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
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, which may be on its way still
        storage = getattr(local, "elem", local).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


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
