"""Chapter 4's panel: one batch, split into micro-batches."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from ..accumulation import draw_splits
from ..gpu_catalog import CATALOG
from ..language import tr
from ..models import DEFAULT_MODEL, architectures
from ..splits import splits
from ..training import OPTIMIZERS
from . import STYLE, WIDE, error_line, status_line

SAMPLES = 1024  # of which an epoch is counted


class AccumulationPanel(widgets.VBox):
    """Choose a batch and how many samples of it are computed at once; see every split's memory, and the chosen one."""

    def __init__(self) -> None:
        def control(kind: Any, name: str, description: str, **arguments: Any) -> Any:
            widget = kind(description=description, layout=WIDE, style=STYLE, **arguments)
            widget.add_class(f"accumulation-{name}")
            return widget

        self.controls = {
            "model_id": control(
                widgets.Dropdown, "model", tr(ko="모델", en="model"), options=list(architectures()), value=DEFAULT_MODEL
            ),
            "gpu": control(widgets.Dropdown, "gpu", "GPU", options=list(CATALOG), value="T4"),
            "optimizer": control(
                widgets.Dropdown,
                "optimizer",
                tr(ko="옵티마이저", en="optimizer"),
                options=list(OPTIMIZERS),
                value="adamw",
            ),
            "sequence_length": control(
                widgets.SelectionSlider,
                "length",
                tr(ko="길이(토큰)", en="length (tokens)"),
                options=[64, 128, 256, 512, 1024, 2048, 4096, 8192],
                value=256,
                continuous_update=False,
            ),
            "batch": control(
                widgets.SelectionSlider,
                "batch",
                tr(ko="배치(합계)", en="batch (in all)"),
                options=[1, 2, 4, 8, 16, 32, 64],
                value=16,
                continuous_update=False,
            ),
        }
        self.micro = control(
            widgets.SelectionSlider,
            "micro",
            tr(ko="마이크로 배치", en="micro-batch"),
            options=[1, 2, 4, 8, 16],
            value=4,
            continuous_update=False,
        )
        for widget in self.controls.values():
            widget.observe(self._changed, names="value")
        self.micro.observe(self._show, names="value")
        self.status, self.picture = widgets.HTML(), widgets.HTML()
        self.status.add_class("accumulation-status")
        self.picture.add_class("accumulation-picture")
        boxes = [*self.controls.values(), self.micro]
        rows = widgets.HBox([widgets.VBox(boxes[:3]), widgets.VBox(boxes[3:])], layout={"flex_flow": "row wrap"})
        super().__init__([rows, self.status, self.picture])
        self.add_class("accumulation-panel")
        self._changed(None)

    def __repr__(self) -> str:
        return "AccumulationPanel()"

    def _changed(self, _: Any) -> None:
        values = {name: widget.value for name, widget in self.controls.items()}
        batch = values.pop("batch")
        try:
            self._splits = splits(batch, **values)
        except (ValueError, ImportError) as error:
            self._splits = []
            self.status.value, self.picture.value = error_line(error), ""
            return
        sizes = sorted(split.micro_batch for split in self._splits)
        if list(self.micro.options) != sizes:
            kept = max(size for size in sizes if size <= self.micro.value)
            with self.micro.hold_trait_notifications():
                self.micro.options = sizes
                self.micro.value = kept
        self.picture.value = draw_splits(self._splits).svg()
        self._show(None)

    def _show(self, _: Any) -> None:
        split = next((split for split in self._splits if split.micro_batch == self.micro.value), None)
        if split is None:
            return
        forwards, updates = -(-SAMPLES // split.micro_batch), -(-SAMPLES // (split.micro_batch * split.steps))
        flops = split.flops / (split.micro_batch * split.steps) / 1e12
        self.status.value = status_line(
            tr(
                ko=f"{split.micro_batch} × {split.steps}: {split.report.verdict} · 샘플 {SAMPLES:,}개에 순전파와 "
                f"역전파 {forwards:,}번, 옵티마이저 스텝 {updates:,}번 · 샘플 하나에 {flops:.2f} TFLOP",
                en=f"{split.micro_batch} × {split.steps}: {split.report.verdict} · {SAMPLES:,} samples: {forwards:,} "
                f"forward and backward passes, {updates:,} optimizer steps · {flops:.2f} TFLOP a sample",
            )
        )
