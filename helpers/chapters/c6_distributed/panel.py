"""Chapter 6's panel: what one GPU of many holds and sends."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from virtual_gpu.language import tr
from virtual_gpu.shards.layout import CONVENTIONS
from virtual_gpu.shards.ledger import PAPER_MODELS
from virtual_gpu.shards.rank_step import rank_step

from ...panel import LENGTHS, Answer, Panel

LARGE = "meta-llama/Llama-3.1-70B"


class ZeroPanel(Panel):
    """Chapter 6: choose a model and how many GPUs share it how; see one GPU's bytes by part and what it sends."""

    prefix = "zero"

    def __init__(self) -> None:
        super().__init__()
        ranks, stage = tr(ko="GPU 수", en="GPUs"), tr(ko="ZeRO 단계", en="ZeRO stage")
        parallel, precision = tr(ko="텐서 병렬", en="tensor parallel"), tr(ko="정밀도", en="precision")
        stages = [("0 · DDP", 0), ("1 · ZeroRedundancyOptimizer", 1), ("2 · FSDP2", 2), ("3 · FSDP2", 3)]
        powers, conventions = [2**n for n in range(15)], [(f"{n} · {c.total} B", n) for n, c in CONVENTIONS.items()]
        slider, menu = widgets.SelectionSlider, widgets.Dropdown
        self.controls = {
            "model": self.model(LARGE, others=PAPER_MODELS),
            "gpu": self.gpu("H100"),
            "ranks": self.control(slider, "ranks", ranks, options=powers, value=64),
            "stage": self.control(menu, "stage", stage, options=stages, value=3),
            "tensor_parallel": self.control(slider, "tensor-parallel", parallel, options=[1, 2, 4, 8, 16]),
            "precision": self.control(menu, "precision", precision, options=conventions, value="mixed"),
            "batch_size": self.batch(1, largest=32),
            "sequence_length": self.length(4096, [4 * length for length in LENGTHS]),
            "gradient_checkpointing": self.checkpointing(True),
        }
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:5], boxes[5:])
        self.move(self._changed)

    def answer(self, **chosen: Any) -> Answer:
        """The chosen setting on one rank; ValueError where it cannot be split so."""
        step = rank_step(**chosen, exact=False)
        return Answer((step.verdict,), step)


def zero_panel() -> ZeroPanel:
    """Chapter 6: model, GPUs, ZeRO stage, tensor parallelism, batch, length → one GPU's bytes and messages."""
    return ZeroPanel()
