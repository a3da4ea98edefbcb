"""A training that is saved and resumed: real files, a small GPT-2, and a card that is made as small."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from virtual_gpu.language import tr
from virtual_gpu.units import choose

KEYS = ("model", "optimizer", "ema")  # what of a checkpoint holds tensors
FATES = ("keep", "drop", "cpu")
SHARE = 0.0228  # of a T4: 344 MiB, a little more than the training below takes


def small_gpt() -> Any:
    """A GPT-2 of 17 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=512, n_head=8, vocab_size=4096, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning
    return model


def train_two_steps(model: Any, optimizer: torch.optim.Optimizer, length: int = 256) -> None:
    """Two steps of one sample."""
    for _ in range(2):
        tokens = torch.zeros(1, length, dtype=torch.int64).cuda()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(
    path: Path, map_location: str | None = None, mmap: bool = False, share: float = SHARE, **fates: str
) -> Callable:
    """A program that goes on from `path`. map_location: None, "cuda" or "cpu"; fates: a key of KEYS → one of FATES.

    What becomes of a part of the checkpoint once it is used: it stays, it is dropped, or it is moved to RAM.
    """
    if map_location is not None:
        map_location = choose(map_location, ("cuda", "cpu"), "map_location")
    fates = {choose(key, KEYS, tr(ko="키", en="key")): choose(fate, FATES, key) for key, fate in fates.items()}

    def program() -> None:
        torch.cuda.set_per_process_memory_fraction(share)
        model = small_gpt().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        checkpoint = torch.load(path, map_location=map_location, mmap=mmap)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        for key, fate in fates.items():
            if fate == "drop":
                del checkpoint[key]
            elif fate == "cpu":
                checkpoint[key] = tree_map_only(torch.Tensor, torch.Tensor.cpu, checkpoint[key])
        train_two_steps(model, optimizer, checkpoint["config"]["length"])

    return program


def saved(path: Path, ema: bool = False) -> Callable:
    """A program that trains and writes its checkpoint to `path`; ema: with another copy of the weights."""

    def program() -> None:
        model = small_gpt().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        train_two_steps(model, optimizer)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if ema:
            states["ema"] = copy.deepcopy(model.state_dict())
        torch.save({**states, "config": {"length": 256}}, path)

    return program


def extra_of(take: Callable[[Any], Any]) -> Callable[[], int]:
    """A program that returns what the GPU holds at most while `take(model)` runs, less what it held before."""

    def program() -> int:
        with torch.device("cuda"):  # made there, so that what RAM holds is what `take` put into it
            model = small_gpt()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take(model)
        return torch.cuda.max_memory_allocated() - before

    return program
