"""Chapter 4's panel: one batch, split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ipywidgets as widgets

from virtual_gpu.language import tr
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.splits import equal_splits, split_setting

from ...experiment import predict_memory, splits
from ...panel import ANSWERS, TRACES, Answer, Kept, Panel
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
            widgets.SelectionSlider, "micro", micro, self._micro_moved, options=[1, 2, 4, 8, 16], value=4
        )
        self.controls["micro"] = self.micro
        self._wish = self.micro.value  # what the reader chose, also while the batch is too small for it
        self._fitting = False  # its sizes are set by the batch
        self._traces, self._found = Kept(TRACES), Kept(ANSWERS)
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:3], boxes[3:])
        self.move(self._changed)

    def _micro_moved(self) -> None:
        if not self._fitting:
            self._wish = self.micro.value
            super()._changed()

    def _changed(self) -> None:
        sizes = _sizes(self.controls["batch"].value)
        if [*self.micro.options] != sizes:
            self._fitting = True
            try:
                self.micro.options = sizes
                self.micro.value = max(size for size in sizes if size <= self._wish)
            finally:
                self._fitting = False
        super()._changed()

    def pieces(self, **chosen: Any) -> Iterator[Callable[[], Any]]:
        values = {name: value for name, value in chosen.items() if name not in ("batch", "micro")}
        gpu = values.pop("gpu")
        for way in equal_splits(chosen["batch"]):
            yield partial(predict_memory, split_setting(*way, **values), gpu=gpu, kept=self._traces)
        yield partial(training_flops, split_setting(1, 1, **values))
        yield from super().pieces(**chosen)

    def answer(self, *, batch: int, micro: int, **values: Any) -> Answer:
        key = batch, *values.items()
        if key not in self._found:
            self._found[key] = splits(batch, kept=self._traces, **values)
        found = self._found[key]
        split = max((one for one in found if one.micro_batch <= micro), key=lambda one: one.micro_batch)
        forwards, updates = -(-SAMPLES // split.micro_batch), -(-SAMPLES // (split.micro_batch * split.steps))
        flops = split.flops / (split.micro_batch * split.steps) / 1e12
        first = f"{split.micro_batch} × {split.steps}: {split.report.verdict}"
        passes = tr(
            ko=f"샘플 {SAMPLES:,}개에 순전파와 역전파 {forwards:,}번, 옵티마이저 스텝 {updates:,}번 · 샘플 하나에 "
            f"{flops:.2f} TFLOP",
            en=f"{SAMPLES:,} samples: {forwards:,} forward and backward passes, {updates:,} optimizer steps · "
            f"{flops:.2f} TFLOP a sample",
        )
        return Answer((first, passes), draw_splits(found, split))


def _sizes(batch: int) -> list[int]:
    return sorted(micro for micro, _ in equal_splits(batch))


def accumulation_panel() -> AccumulationPanel:
    """Chapter 4: model, GPU, optimizer, length, batch, micro-batch → memory of every split, passes and steps."""
    return AccumulationPanel()
