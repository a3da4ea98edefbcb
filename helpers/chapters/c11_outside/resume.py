"""A training that is saved and resumed: real files, a small GPT-2, and a card that is made as small."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from virtual_gpu.units import choose

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


def train_two_steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Two steps of one sample of 256 tokens."""
    for _ in range(2):
        tokens = torch.zeros(1, 256, dtype=torch.int64).cuda()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(path: Path, map_location: str | None = None, delete: bool = False, mmap: bool = False) -> Callable:
    """A program that goes on from `path`. map_location: None, "cuda" or "cpu"; delete: the file's dict, once used."""
    if map_location is not None:
        map_location = choose(map_location, ("cuda", "cpu"), "map_location")

    def program() -> None:
        torch.cuda.set_per_process_memory_fraction(SHARE)
        model = small_gpt().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        checkpoint = torch.load(path, map_location=map_location, mmap=mmap)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if delete:
            del checkpoint
        train_two_steps(model, optimizer)

    return program


def saved(path: Path) -> Callable:
    """A program that trains and writes its checkpoint to `path`."""

    def program() -> None:
        model = small_gpt().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        train_two_steps(model, optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return program


def extra_of(take: Callable[[Any], Any]) -> Callable[[], int]:
    """A program that returns what the GPU holds at most while `take(model)` runs, less what it held before."""

    def program() -> int:
        model = small_gpt().cuda()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take(model)
        return torch.cuda.max_memory_allocated() - before

    return program


WAYS_TO_KEEP = {
    "state_dict()": lambda model: model.state_dict(),
    "deepcopy": lambda model: copy.deepcopy(model.state_dict()),
    "v.cpu()": lambda model: {name: value.cpu() for name, value in model.state_dict().items()},
}
