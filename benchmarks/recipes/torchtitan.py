"""pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B by FSDP2 on 8 and 128 H100s of 96 GB.

One rank of them, written anew after torchtitan 9dec370 (26 December 2024): its model, checkpoints that keep every
second product and attention's results, each block compiled or not, FSDP2 of the installed PyTorch, foreach AdamW,
clipping. What it prints is the most that the allocator had reserved. Nothing is fitted. torchtitan itself, from a clone
of that commit and with random tokens, has 82.38 GiB on 8 and 66.97 on 128, compiled 76.85 on 8: `virtual-gpu run --gpu
"95.04GiB, 9.0" --gpus 8 --without cudnn_attention …`. PyTorch of that time took FlashAttention before cuDNN's, as that
rule's source says.
"""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from virtual_gpu.program import ranks
from virtual_gpu.program.context import cuda

from .compiled import compiler_on, refuse_eager
from .recipe import ANY, SIZE, Recipe, Refused, Row, from_source

WORDS, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, THETA = 128256, 4096, 14336, 32, 32, 8, 500000.0
# With 96 GB of HBM2e: the 95.04 GiB that torchtitan's logs print for the team's cards.
CARDS = {"NVIDIA H100 96GB": "95.04GiB, 9.0"}
STEPS = 3  # with the second the cache has all that it keeps
_aten = torch.ops.aten
KEPT = frozenset(
    (
        _aten.mm.default, _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default, torch.ops._c10d_functional.reduce_scatter_tensor.default,
        _aten.abs.default, _aten.max.default,
    )
)  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) → the same: computed in fp32."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x (B, T, heads, width) by the angles (T, width / 2) of its places, as complex numbers in fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles.view(1, len(angles), 1, -1)).flatten(3)


def angles_of(length: int) -> torch.Tensor:
    """(length, width of a head / 2), complex64: how far each pair of a head is turned at each place."""
    width = WIDTH // HEADS
    frequencies = 1.0 / THETA ** (torch.arange(0, width, 2).float() / width)
    places = torch.outer(torch.arange(length), frequencies).float()
    return torch.polar(torch.ones_like(places), places)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * head, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) → the same. Keys and values are repeated for every query head."""
        batch, length, _ = x.shape
        q, k, v = (product(x).view(batch, length, -1, WIDTH // HEADS) for product in (self.wq, self.wk, self.wv))
        q, k = (both.type_as(x) for both in (turned(q, angles), turned(k, angles)))
        k, v = (
            kv[:, :, :, None].expand(-1, -1, -1, HEADS // KV_HEADS, -1).reshape(batch, length, HEADS, -1)
            for kv in (k, v)
        )
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) → the same."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) → the same."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, length: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("angles", angles_of(length))
        self.layers = nn.ModuleDict({f"{number}": Block() for number in range(LAYERS)})
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (B, T) → logits (B, T, V)."""
        x = self.tok_embeddings(ids)
        for block in self.layers.values():
            x = block(x, self.angles)
        return self.output(self.norm(x))


def every_second_product() -> Any:
    """Of selective checkpointing: what is in `KEPT` stays, but for every second product."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operation == _aten.mm.default
        products[context.is_recompute] += is_product
        kept = operation in KEPT and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def shared(model: Transformer, compiled: bool) -> Transformer:
    """The model with checkpoints, compiled blocks and FSDP2, on this rank's card. The last block stays gathered."""
    wrapped = partial(checkpoint_wrapper, context_fn=every_second_product, preserve_rng_state=False)
    for name, block in model.layers.items():
        model.layers[name] = torch.compile(wrapped(block), fullgraph=True) if compiled else wrapped(block)
    settings = {
        "mesh": init_device_mesh("cuda", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for name, block in model.layers.items():
        fully_shard(block, **settings, reshard_after_forward=int(name) < LAYERS - 1)
    fully_shard(model, **settings, reshard_after_forward=True)
    model.to_empty(device="cuda")
    with torch.device("cuda"):
        model.angles = angles_of(len(model.angles))
    return model.train()


def predict(row: Row) -> int:
    """Bytes that the allocator has reserved at most."""
    settings, card = row["settings"], CARDS.get(row["gpu"])
    if card is None:
        raise Refused(f"the card {row['gpu']!r} is not the one that these were measured on")
    batch, length, compiled = settings["local_batch"], settings["seq"], settings["compile"]
    with compiler_on(), cuda(card, gpus=settings["world_size"], without=("cudnn_attention",)) as gpu:
        ranks.install(gpu.patches, gpu, gpu.watch)
        dist.init_process_group("nccl")
        gc.collect()
        gc.disable()  # as torchtitan does, but for every fiftieth step
        try:
            with torch.device("meta"):
                model = Transformer(length)
            train(shared(model, compiled), batch, length)
        finally:
            gc.enable()
        refuse_eager(gpu.watch.notes)
        return torch.cuda.max_memory_reserved()


def train(model: Transformer, batch: int, length: int) -> None:
    """A few steps; gradients stay until the next one begins."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    losses = []
    for _ in range(STEPS):
        ids, labels = (torch.zeros(batch, length, dtype=torch.int64).cuda() for _ in range(2))
        optimizer.zero_grad()
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        losses.append(loss)


def is_here(row: Row) -> bool:
    """Whether a row is of the torchtitan that is put together here."""
    return from_source("pytorch/torchtitan")(row) and row["model"].startswith("Llama 3.1 8B")


RECIPES = (
    Recipe(
        name="torchtitan",
        what="Llama 3.1 8B by FSDP2 on 8 and 128 H100s, selective checkpoints, compiled and not",
        what_ko="FSDP2로 H100 8장과 128장, 선택적 체크포인팅, 컴파일",
        handles=is_here,
        predict=predict,
        settings={
            **dict.fromkeys(("world_size", "local_batch", "seq"), SIZE),
            "checkpointing": ("selective op",),
            "compile": (True, False),
            "float8": (False,),
            "torch": ANY,
        },
    ),
)
