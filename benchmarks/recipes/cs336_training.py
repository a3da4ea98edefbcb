"""Whole training steps of CS336's language model (see cs336.py): what is at most held, phase by phase.

EnzoDing's memory profile (forward, loss, backward and step, fp32 and bf16 autocast) and its steps with checkpointed
segments.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from virtual_gpu.counting.gpu import VirtualGPU

from .cs336 import AdamW, Model, colon_is_a_slice, cross_entropy, forward_in_segments
from .recipe import ANY, SIZE, Recipe, Refused, Row, from_source, gpu_of

SETTINGS = {
    **dict.fromkeys(("ctx", "d_model", "layers", "heads", "d_ff", "vocab", "batch"), SIZE),
    **dict.fromkeys(("precision", "mixed_precision"), ("fp32", "float32", "bf16-autocast", "bf16 autocast")),
    "dtype": ("float32",),
    "optimizer": ("course AdamW (cs336_basics.optimizer)",),
    "attention": ("einsum + hand-written softmax",),
    **dict.fromkeys(("torch", "params", "warmup"), ANY),
}
WARM_UP = 2  # steps of the memory profile, in one loop; the sweep of segments makes one, in a function


class Training:
    """The model, its optimizer and a batch on a virtual card; `step` is one training step."""

    def __init__(self, gpu: VirtualGPU, s: SimpleNamespace):
        self.gpu, self.half, self.segment = gpu, s.half, s.segment
        with torch.device("meta"):
            sliced = colon_is_a_slice(getattr(s, "torch", ""))
            self.model = Model(s.ctx, s.width, s.layers, s.heads, s.hidden, s.vocabulary, sliced)
        gpu.place(self.model)
        self.after_init = gpu.memory_allocated()
        self.optimizer = AdamW(self.model.parameters())
        self.ids, self.targets = (gpu.place(torch.zeros(s.batch, s.ctx, dtype=torch.int64)) for _ in range(2))

    def forward(self) -> torch.Tensor:
        """Logits, with or without checkpoints."""
        if self.segment is None:
            return self.model(self.ids)
        return forward_in_segments(self.model, self.ids, self.segment or None)

    def autocast(self):
        """bf16, where the row says so."""
        return self.gpu.autocast(torch.bfloat16 if self.half else None)

    def forwards(self, count: int) -> None:
        """Forward passes; the logits of one are held until those of the next are there."""
        for _ in range(count):
            with self.autocast():
                logits = self.forward()  # noqa: F841

    def step(self) -> None:
        """A step whose names end with it."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            logits = self.forward()
            loss = cross_entropy(logits, self.targets)
        loss.backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        """Steps in a loop: logits and loss of one are held until those of the next are there."""
        for _ in range(count):
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
def enzoding(gpu_name: str, sizes: str, mode: str) -> Mapping[str, int]:
    """Phase → most bytes, of one card and setting; mode: "train", or "forward" (with its graph, and nothing after)."""
    gpu = gpu_of({"gpu": gpu_name})
    training = Training(gpu, SimpleNamespace(**json.loads(sizes)))
    with gpu:
        if mode == "forward":
            training.forwards(WARM_UP)
            gpu.empty_cache()
            gpu.reset_peak_memory_stats()
            training.forwards(1)
            return {"forward": gpu.max_memory_allocated(), "step": gpu.max_memory_allocated()}
        if training.segment is None:
            training.steps(WARM_UP)
        else:
            training.step()
        gpu.empty_cache()
        return training.phases()


def sizes_of(settings: Mapping) -> dict:
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
        "torch": str(settings.get("torch") or ""),
    }


def predict_enzoding(row: Row) -> int:
    """ "max_memory_allocated backward" and its kin."""
    phase = row["metric"].removeprefix("max_memory_allocated ")
    settings = row["settings"]
    found = enzoding(row["gpu"], json.dumps(sizes_of(settings)), settings.get("mode", "train"))
    if phase not in found:
        raise Refused(f"the script does not print {row['metric']!r}")
    return found[phase]


RECIPES = (
    Recipe(
        name="CS336 training",
        what="training steps of a 3.4B model, by phase and by checkpointed segments",
        what_ko="34억 파라미터 모델의 학습 스텝: 단계별, 체크포인트 구간별",
        handles=lambda row: from_source("EnzoDing-rgb/cs336-assignment2-systems")(row) and "layers" in row["settings"],
        predict=predict_enzoding,
        settings=SETTINGS | {"mode": ("train", "forward"), "segment": ("none", *range(1, 1025))},
    ),
)
