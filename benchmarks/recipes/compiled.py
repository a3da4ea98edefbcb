"""siddddd17/ackaudit, results/measured_backward: `torch.compile` under PyTorch's memory budgets, on a GTX 1650.

Small Llamas from a configuration in fp32: a first forward and backward, which compiles, gradients zeroed and kept, then
the peak of another. The budgets are of `torch._functorch.config.activation_memory_budget`; what they choose is the
installed PyTorch's. Written anew after the description of `run_d.py`; nothing is fitted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch._functorch.config  # and `torch._dynamo.config` with it

from virtual_gpu.program.context import cuda

from .recipe import ANY, NUMBER, SIZE, Recipe, Refused, Row, from_source

CARDS = {"NVIDIA GeForce GTX 1650": "4GiB, 7.5"}


@contextlib.contextmanager
def compiler_on() -> Iterator[None]:
    """Let `torch.compile` compile where the environment switches it off (TORCHDYNAMO_DISABLE)."""
    off = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    try:
        with torch._dynamo.config.patch(disable=False):
            yield
    finally:
        if off is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = off


def refuse_eager(notes: list[str]) -> None:
    """Refused where the virtual card's notes say that something was not compiled."""
    eager = [note for note in notes if note.startswith("torch.compile")]
    if eager:
        raise Refused("; ".join(eager))


def predict(row: Row) -> int:
    """Bytes at the peak."""
    settings, card = row["settings"], CARDS.get(row["gpu"])
    if card is None:
        raise Refused(f"the card {row['gpu']!r} is not the one that these were measured on")
    backend = settings["backend"]
    budget = None if backend == "none" else float(settings["budget"])
    return peak(card, int(settings["layers"]), int(settings["batch"]), int(settings["seq"]), backend, budget)


def peak(card: str, layers: int, batch: int, length: int, backend: str, budget: float | None) -> int:
    """Bytes at the peak of a forward and backward after the one that compiles; backend "none": nothing is compiled."""
    budgets = {} if budget is None else {"activation_memory_budget": budget}
    with compiler_on(), torch._functorch.config.patch(**budgets), cuda(card) as gpu:
        model = LastHiddenSum(layers).to("cuda")
        ids = torch.randint(0, 1000, (batch, length)).to("cuda")
        step = model if backend == "none" else torch.compile(model, backend=backend, dynamic=False)
        step(ids).backward()
        model.zero_grad(set_to_none=False)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(ids).backward()
        refuse_eager(gpu.watch.notes)
        return torch.cuda.max_memory_allocated()


class LastHiddenSum(torch.nn.Module):
    """A Llama of this many layers, summed up."""

    def __init__(self, layers: int):
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.model = LlamaModel(
            LlamaConfig(
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=8,
                vocab_size=1000,
                use_cache=False,
            )
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (B, T) → one number."""
        return self.model(input_ids=ids).last_hidden_state.sum()


RECIPES = (
    Recipe(
        name="compiled Llamas",
        what="small Llamas under torch.compile's memory budgets, backends aot_eager and inductor",
        what_ko="torch.compile의 메모리 예산, 작은 Llama",
        handles=from_source("siddddd17/ackaudit"),
        predict=predict,
        settings={
            **dict.fromkeys(("layers", "batch", "seq"), SIZE),
            "dtype": ("float32",),
            "backend": ("none", "aot_eager", "inductor"),
            "budget": NUMBER,
            "torch": ANY,
        },
    ),
)
