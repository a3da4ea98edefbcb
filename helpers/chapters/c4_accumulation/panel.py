"""Chapter 4's panel: one batch, split into micro-batches."""

from __future__ import annotations

import ipywidgets as widgets

from virtual_gpu.language import tr

from ...experiment import splits
from ...panel import Panel
from .accumulation import draw_splits

SAMPLES = 1024  # of which an epoch is counted


class AccumulationPanel(Panel):
    """Choose a batch and how many samples of it are computed at once; see every split's memory, and the chosen one."""

    prefix = "accumulation"

    def __init__(self) -> None:
        super().__init__()
        sizes = [1, 2, 4, 8, 16, 32, 64]
        batch, micro = tr(ko="배치(합계)", en="batch (in all)"), tr(ko="마이크로 배치", en="micro-batch")
        self.controls = {
            "model_id": self.model(),
            "gpu": self.gpu(),
            "optimizer": self.optimizer(),
            "sequence_length": self.length(),
            "batch": self.control(widgets.SelectionSlider, "batch", batch, options=sizes, value=16),
        }
        self.micro = self.control(
            widgets.SelectionSlider, "micro", micro, self._show, options=[1, 2, 4, 8, 16], value=4
        )
        boxes = [*self.controls.values(), self.micro]
        self.lay_out(boxes[:3], boxes[3:])
        self.move(self._changed)

    def clear(self) -> None:
        super().clear()
        self._splits = []

    def _changed(self) -> None:
        values = self.values()
        self._splits = splits(values.pop("batch"), **values)
        sizes = sorted(split.micro_batch for split in self._splits)
        if list(self.micro.options) != sizes:
            kept = max(size for size in sizes if size <= self.micro.value)
            with self.micro.hold_trait_notifications():
                self.micro.options = sizes
                self.micro.value = kept
        self._show()

    def _show(self) -> None:
        split = next((split for split in self._splits if split.micro_batch == self.micro.value), None)
        if split is None:
            return
        forwards, updates = -(-SAMPLES // split.micro_batch), -(-SAMPLES // (split.micro_batch * split.steps))
        flops = split.flops / (split.micro_batch * split.steps) / 1e12
        line = tr(
            ko=f"{split.micro_batch} × {split.steps}: {split.report.verdict} · 샘플 {SAMPLES:,}개에 순전파와 "
            f"역전파 {forwards:,}번, 옵티마이저 스텝 {updates:,}번 · 샘플 하나에 {flops:.2f} TFLOP",
            en=f"{split.micro_batch} × {split.steps}: {split.report.verdict} · {SAMPLES:,} samples: {forwards:,} "
            f"forward and backward passes, {updates:,} optimizer steps · {flops:.2f} TFLOP a sample",
        )
        self.show(line, picture=draw_splits(self._splits))


def accumulation_panel() -> AccumulationPanel:
    """Chapter 4: model, GPU, optimizer, length, batch, micro-batch → memory of every split, passes and steps."""
    return AccumulationPanel()
