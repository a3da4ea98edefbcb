"""Chapter 5's panels: a chain under a schedule, and a real model with and without checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ipywidgets as widgets

from virtual_gpu.language import tr
from virtual_gpu.report import MemoryTable
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.setting import Setting

from ...experiment import predict_memory
from ...panel import TRACES, Answer, Kept, Panel
from .chain import LEAST_BUDGET, Recording, record_chain


class CheckpointingPanel(Panel):
    """Chapter 5: choose a chain and a strategy, then step through the moments of the run."""

    prefix = "checkpointing"

    def __init__(self) -> None:
        super().__init__()
        strategies = [
            (tr(ko="모두 저장", en="keep everything"), "everything"),
            (tr(ko="되도록 적게 저장", en="keep as little as possible"), "minimum"),
            (tr(ko="같은 길이의 구간", en="even segments"), "segments"),
            (tr(ko="예산 안에서 재계산 최소", en="best within a budget"), "budget"),
        ]
        nodes, strategy = tr(ko="노드", en="nodes"), tr(ko="전략", en="strategy")
        self.nodes = self.control(widgets.IntSlider, "nodes", nodes, value=12, min=2, max=64)
        self.strategy = self.control(
            widgets.Dropdown, "strategy", strategy, self._chosen, options=strategies, value="segments"
        )
        self.count = self.control(widgets.IntText, "count", tr(ko="구간 수", en="segments"), value=3)
        self.moment = self.control(
            widgets.IntSlider,
            "moment",
            tr(ko="순간", en="moment"),
            self._show,
            value=1,
            min=1,
            max=2,
            continuous_update=True,
        )
        self._recording: Recording | None = None
        self.lay_out([self.nodes, self.strategy], [self.count, self.moment, self.player(self.moment)])
        self.move(self._changed)

    def clear(self) -> None:
        super().clear()
        self._recording, self.moment.disabled = None, True

    def _chosen(self) -> None:
        """Another strategy: as many segments as there were may be too small a budget."""
        if self.strategy.value == "budget":
            self.count.value = max(self.count.value, LEAST_BUDGET)
        self._changed()

    def _changed(self) -> None:
        strategy, count = self.strategy.value, self.count.value
        self.count.disabled = strategy in ("everything", "minimum")
        budget = strategy == "budget"
        self.count.description = tr(ko="예산(값의 개수)", en="budget") if budget else tr(ko="구간 수", en="segments")
        choice = {"strategy": strategy} if self.count.disabled else {strategy: count}
        recording = record_chain(self.nodes.value, **choice)
        self._recording, self.moment.disabled = recording, False
        self.moment.max = len(recording.moments)
        self.moment.value = recording.stored.index(recording.peak) + 1
        self._show()

    def _show(self) -> None:
        if self._recording is None:
            return
        moment = min(self.moment.value, len(self._recording.moments)) - 1
        self.show(f"{self._recording.title}: {self._recording.verdict}", picture=self._recording.draw(moment))


class CheckpointingMemoryPanel(Panel):
    """Chapter 5: choose a model, a GPU, a batch and a length; see both ways side by side, and the extra FLOPs."""

    prefix = "levers"

    def __init__(self) -> None:
        super().__init__()
        self.controls = {
            "model_id": self.model(),
            "gpu": self.gpu(),
            "batch_size": self.batch(16),
            "sequence_length": self.length(),
        }
        self._traces = Kept(TRACES)
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:2], boxes[2:])
        self.move(self._changed)

    def pieces(self, *, gpu: str, **values: Any) -> Iterator[Callable[[], Any]]:
        for setting in _both(**values):
            yield partial(predict_memory, setting, gpu=gpu, kept=self._traces)
            yield partial(training_flops, replace(setting, batch_size=1))
        yield from super().pieces(gpu=gpu, **values)

    def answer(self, *, gpu: str, **values: Any) -> Answer:
        settings = _both(**values)
        table = MemoryTable(predict_memory(setting, gpu=gpu, kept=self._traces) for setting in settings)
        # The share of the extra work does not depend on the batch: FLOPs are linear in the samples.
        plain, more = (training_flops(replace(setting, batch_size=1)).total for setting in settings)
        fits = [tr(ko="들어간다", en="fits") if r.fits else tr(ko="메모리 부족", en="out of memory") for r in table]
        extra = f"{more / plain - 1:+.1%}"
        line = tr(
            ko=f"체크포인팅 없이: {fits[0]} · 체크포인팅: {fits[1]} · 추가 연산 {extra}",
            en=f"without: {fits[0]} · with checkpointing: {fits[1]} · extra work {extra}",
        )
        return Answer((line,), table.chart())


def _both(**values: Any) -> list[Setting]:
    return [Setting(**values, gradient_checkpointing=on) for on in (False, True)]


def checkpointing_panel() -> CheckpointingPanel:
    """Chapter 5: a chain's depth, strategy, segments, moment → who is alive, memory curve, recomputations."""
    return CheckpointingPanel()


def checkpointing_memory_panel() -> CheckpointingMemoryPanel:
    """Chapter 5: model, GPU, batch, length → memory without and with checkpointing, and the extra FLOPs."""
    return CheckpointingMemoryPanel()
