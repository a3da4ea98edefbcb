"""Whole training steps of CS336's language model (see cs336.py): what is held, and at most held, phase by phase.

EnzoDing's memory profile (forward, loss, backward and step, fp32 and bf16 autocast) and its steps with checkpointed
segments; Wedsonlin's snapshots from their beginning to their end; damek's and Wedsonlin's models of several ranks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from virtual_gpu.counting.gpu import VirtualGPU

from .cs336 import AdamW, Model, cross_entropy, forward_in_segments
from .recipe import Recipe, Refused, Row, from_source, gpu_of

WARM_UP = 2  # steps; from the second on the optimizer's state and its last temporaries are there


class Training:
    """The model, its optimizer and a batch on a virtual card; `step` is one training step."""

    def __init__(self, gpu: VirtualGPU, s: SimpleNamespace):
        self.gpu, self.half, self.segment = gpu, s.half, s.segment
        with torch.device("meta"):
            self.model = Model(s.ctx, s.width, s.layers, s.heads, s.hidden, s.vocabulary)
        gpu.place(self.model)
        self.optimizer = AdamW(self.model.parameters())
        self.ids, self.targets = (gpu.place(torch.zeros(s.batch, s.ctx, dtype=torch.int64)) for _ in range(2))
        self.after_init = gpu.memory_allocated()

    def forward(self) -> torch.Tensor:
        """Logits, with or without checkpoints."""
        if self.segment is None:
            return self.model(self.ids)
        return forward_in_segments(self.model, self.ids, self.segment or None)

    def autocast(self):
        """bf16, where the row says so."""
        return self.gpu.autocast(torch.bfloat16 if self.half else None)

    def step(self) -> None:
        """A step whose names end with it."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            logits = self.forward()
            loss = cross_entropy(logits, self.targets)
        loss.backward()
        self.optimizer.step()

    def phases(self) -> dict[str, int]:
        """The most held in each phase of one more step; what one phase names the next ones hold."""
        found = {}
        self.optimizer.zero_grad(set_to_none=True)
        self.gpu.reset_peak_memory_stats()
        with self.autocast():
            logits = self.forward()
        found["forward"] = self._peak()
        with self.autocast():
            loss = cross_entropy(logits, self.targets)
        found["loss"] = self._peak()
        loss.backward()
        found["backward"] = self._peak()
        self.optimizer.step()
        found["optimizer"] = self._peak()
        return found | {"step": max(found.values())}

    def _peak(self) -> int:
        peak = self.gpu.max_memory_allocated()
        self.gpu.reset_peak_memory_stats()
        return peak


@functools.lru_cache(8)
def enzoding(gpu_name: str, sizes: str) -> Mapping[str, int]:
    """Phase → most bytes, of one card and setting."""
    gpu = gpu_of({"gpu": gpu_name})
    training = Training(gpu, SimpleNamespace(**json.loads(sizes)))
    with gpu:
        for _ in range(WARM_UP):
            training.step()
        gpu.empty_cache()
        return training.phases()


def _sizes(settings: Mapping) -> dict:
    """A row's settings in our names."""
    precision = settings.get("precision", settings.get("mixed_precision", "fp32"))
    segment = settings.get("segment")
    return {
        "ctx": settings["ctx"],
        "width": settings["d_model"],
        "layers": settings["layers"],
        "heads": settings["heads"],
        "hidden": settings["d_ff"],
        "vocabulary": settings["vocab"],
        "batch": settings["batch"],
        "half": "bf16" in precision,
        "segment": None if segment is None else 0 if segment == "none" else int(segment),
    }


def predict_enzoding(row: Row) -> int:
    """ "max_memory_allocated backward" and its kin."""
    phase = row["metric"].removeprefix("max_memory_allocated ")
    settings = row["settings"]
    if settings.get("mode", "train") != "train":
        raise Refused(f"mode {settings['mode']!r} is not written here")
    found = enzoding(row["gpu"], json.dumps(_sizes(settings)))
    if phase not in found:
        raise Refused(f"the script does not print {row['metric']!r}")
    return found[phase]


RECIPES = (
    Recipe(
        name="CS336 training",
        what="EnzoDing's training steps of a 3.4B model, by phase and by checkpointed segments",
        handles=lambda row: from_source("EnzoDing-rgb/cs336-assignment2-systems")(row) and "layers" in row["settings"],
        predict=predict_enzoding,
    ),
)
