"""Chapter 5's panels: a chain under a schedule, and a real model with and without checkpointing."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from ..checkpointing import Recording, record_chain
from ..experiment import Setting, predict_memory
from ..flops import training_flops
from ..gpu_catalog import CATALOG
from ..language import tr
from ..models import DEFAULT_MODEL, architectures
from ..report import MemoryTable
from . import STYLE, WIDE, error_line, status_line


class CheckpointingPanel(widgets.VBox):
    """Chapter 5: choose a chain and a strategy, then step through the moments of the run."""

    def __init__(self) -> None:
        def control(kind: Any, name: str, description: str, **arguments: Any) -> Any:
            widget = kind(description=description, layout=WIDE, style=STYLE, **arguments)
            widget.add_class(f"checkpointing-{name}")
            return widget

        strategies = {
            tr(ko="모두 저장", en="keep everything"): "everything",
            tr(ko="되도록 적게 저장", en="keep as little as possible"): "minimum",
            tr(ko="같은 길이의 구간", en="even segments"): "segments",
            tr(ko="예산 안에서 재계산 최소", en="best within a budget"): "budget",
        }
        self.nodes = control(
            widgets.IntSlider, "nodes", tr(ko="노드", en="nodes"), value=12, min=2, max=64, continuous_update=False
        )
        self.strategy = control(
            widgets.Dropdown, "strategy", tr(ko="전략", en="strategy"), options=[*strategies.items()], value="segments"
        )
        self.count = control(
            widgets.IntText, "count", tr(ko="구간 수 / 예산", en="segments/budget"), value=3, continuous_update=False
        )
        self.moment = control(widgets.IntSlider, "moment", tr(ko="순간", en="moment"), value=1, min=1, max=2)
        self.status = widgets.HTML()
        self.status.add_class("checkpointing-status")
        self.picture = widgets.HTML()
        self.picture.add_class("checkpointing-picture")
        self._recording: Recording | None = None
        for widget in (self.nodes, self.strategy, self.count):
            widget.observe(self._changed, names="value")
        self.moment.observe(self._moved, names="value")
        left, right = widgets.VBox([self.nodes, self.strategy]), widgets.VBox([self.count, self.moment])
        super().__init__([widgets.HBox([left, right], layout={"flex_flow": "row wrap"}), self.status, self.picture])
        self.add_class("checkpointing-panel")
        self._changed(None)

    def __repr__(self) -> str:
        return "CheckpointingPanel()"

    def _changed(self, _: Any) -> None:
        strategy, count = self.strategy.value, self.count.value
        self.count.disabled = strategy in ("everything", "minimum")
        choice = {"strategy": strategy} if self.count.disabled else {strategy: count}
        try:
            recording = record_chain(self.nodes.value, **choice)
        except ValueError as error:
            self._recording, self.moment.disabled = None, True
            self.status.value, self.picture.value = error_line(error), ""
            return
        self._recording, self.moment.disabled = recording, False
        self.moment.max = len(recording.moments)
        self.moment.value = recording.stored.index(recording.peak) + 1
        self._moved(None)

    def _moved(self, _: Any) -> None:
        if self._recording is None:
            return
        self.status.value = status_line(f"{self._recording.title}: {self._recording.verdict}")
        moment = min(self.moment.value, len(self._recording.moments)) - 1
        self.picture.value = self._recording.draw(moment).svg()


class CheckpointingMemoryPanel(widgets.VBox):
    """Chapter 5: choose a model, a GPU, a batch and a length; see both ways side by side, and the extra FLOPs."""

    def __init__(self) -> None:
        def control(kind: Any, name: str, description: str, **arguments: Any) -> Any:
            widget = kind(description=description, layout=WIDE, style=STYLE, **arguments)
            widget.add_class(f"levers-{name}")
            widget.observe(self._changed, names="value")
            return widget

        lengths = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
        self.controls = {
            "model_id": control(
                widgets.Dropdown, "model", tr(ko="모델", en="model"), options=list(architectures()), value=DEFAULT_MODEL
            ),
            "gpu": control(widgets.Dropdown, "gpu", "GPU", options=list(CATALOG), value="T4"),
            "batch_size": control(
                widgets.IntSlider,
                "batch",
                tr(ko="배치 크기", en="batch size"),
                value=16,
                min=1,
                max=64,
                continuous_update=False,
            ),
            "sequence_length": control(
                widgets.SelectionSlider,
                "length",
                tr(ko="길이(토큰)", en="length (tokens)"),
                options=lengths,
                value=256,
                continuous_update=False,
            ),
        }
        self.status = widgets.HTML()
        self.status.add_class("levers-status")
        self.picture = widgets.HTML()
        self.picture.add_class("levers-picture")
        boxes = [*self.controls.values()]
        rows = widgets.HBox([widgets.VBox(boxes[:2]), widgets.VBox(boxes[2:])], layout={"flex_flow": "row wrap"})
        super().__init__([rows, self.status, self.picture])
        self.add_class("levers-panel")
        self._changed(None)

    def __repr__(self) -> str:
        return "CheckpointingMemoryPanel()"

    def _changed(self, _: Any) -> None:
        values = {name: widget.value for name, widget in self.controls.items()}
        gpu = values.pop("gpu")
        try:
            settings = [Setting(**values, gradient_checkpointing=on) for on in (False, True)]
            table = MemoryTable(predict_memory(setting, gpu=gpu) for setting in settings)
            plain, more = (training_flops(setting).total for setting in settings)
        except ValueError as error:
            self.status.value, self.picture.value = error_line(error), ""
            return
        fits = [tr(ko="들어간다", en="fits") if r.fits else tr(ko="메모리 부족", en="out of memory") for r in table]
        extra = f"{more / plain - 1:+.1%}"
        self.status.value = status_line(
            tr(
                ko=f"체크포인팅 없이: {fits[0]} · 체크포인팅: {fits[1]} · 추가 연산 {extra}",
                en=f"without: {fits[0]} · with checkpointing: {fits[1]} · extra work {extra}",
            )
        )
        self.picture.value = table.chart().svg()
