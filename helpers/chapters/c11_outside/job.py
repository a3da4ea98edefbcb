"""A whole job on one card, from loading to going on the next day: what GPU and RAM hold at most in each phase."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import virtual_gpu
from virtual_gpu.language import tr

NAMES = ("load", "train", "evaluate", "generate", "save", "resume")
_LENGTH = 512


def words(name: str) -> str:
    """A phase's name for the reader."""
    return {
        "load": tr(ko="불러오기", en="load"),
        "train": tr(ko="학습", en="train"),
        "evaluate": tr(ko="평가", en="evaluate"),
        "generate": tr(ko="생성", en="generate"),
        "save": tr(ko="저장", en="save"),
        "resume": tr(ko="재개", en="resume"),
    }[name]


@dataclass(frozen=True)
class Phase:
    """The most bytes that the tensors of a phase took, on the GPU and in RAM."""

    name: str
    gpu: int
    ram: int


def job(careful: bool = False) -> list[Phase]:
    """Load a small GPT-2, train, evaluate, generate, save and resume: as is often written, or with the cures.

    It resumes in a process of its own, on a card that nothing was on.
    """
    found: list[Phase] = []
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        with virtual_gpu.cuda("T4", writes=True) as card:
            _first_day(partial(_phase, found, card), Path(folder), careful)
        with virtual_gpu.cuda("T4") as card, _phase(found, card, "resume"):
            _next_day(Path(folder), careful)
    return found


@contextmanager
def _phase(found: list[Phase], card: Any, name: str) -> Iterator[None]:
    torch.cuda.reset_peak_memory_stats()
    card.host.meter.reset_peak()
    yield
    found.append(Phase(name, torch.cuda.max_memory_allocated(), card.host.meter.peak_bytes))


def _first_day(phase: Callable[[str], Any], folder: Path, careful: bool) -> None:
    with phase("load"):
        model = _made(careful)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with phase("train"):
        _train(model, optimizer)
    with phase("evaluate"):
        _evaluate(model, folder, careful)
    with phase("generate"):
        tokens = torch.ones(8, 896, dtype=torch.int64).cuda()
        asked = {"prefill_chunk_size": 128} if careful else {}
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False, **asked)
    with phase("save"):
        if not careful:
            best = copy.deepcopy(model.state_dict())
            model.load_state_dict(best)  # the best weights are what is saved
        model.save_pretrained(folder, max_shard_size="50MB" if careful else "50GB")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")


def _next_day(folder: Path, careful: bool) -> None:
    model = _made(careful)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    where = {"map_location": "cpu", "mmap": True} if careful else {}
    checkpoint = torch.load(folder / "checkpoint.pt", **where)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    _train(model, optimizer)


def _made(careful: bool) -> Any:
    """A GPT-2 of 52 million parameters: in RAM first, or on the card at once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6, n_embd=512, n_head=8, vocab_size=32_000, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False
    )
    with torch.device("cuda" if careful else "cpu"):
        model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning
    return model.cuda()


def _train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        tokens = torch.ones(2, _LENGTH, dtype=torch.int64).cuda()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _evaluate(model: Any, folder: Path, careful: bool) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(os.fspath(folder), per_device_eval_batch_size=4, report_to="none", disable_tqdm=True)
    model.config.use_cache = False  # keys and values are no predictions
    Trainer(
        model, arguments, compute_metrics=lambda found: {},
        eval_dataset=[{"input_ids": [1] * _LENGTH, "labels": [1] * _LENGTH}] * 16,
        preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if careful else None,
    ).evaluate()  # fmt: skip
    model.config.use_cache = True
