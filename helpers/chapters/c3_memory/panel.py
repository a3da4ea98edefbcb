"""Chapter 3's panel: the memory of a training setting."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import ipywidgets as widgets

from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.language import tr
from virtual_gpu.step.setting import PRECISIONS, Setting

from ...comparing import ReportPanel
from ...experiment import gpu_memory_experiment, predict_memory
from ...gpu import current_gpu
from ...panel import TRACES, Answer, Kept, status_line


class MemoryPanel(ReportPanel):
    """Chapter 3: choose a setting, see its memory predicted at once, or run it.

    It runs on the real GPU where that is in use, else on the virtual GPU that is chosen.
    """

    prefix = "memory"

    def __init__(self) -> None:
        super().__init__()
        precision = tr(ko="정밀도", en="precision")
        self.controls = {
            "model_id": self.model(),
            "gpu": self.gpu(_catalog_name()),
            "batch_size": self.batch(4),
            "sequence_length": self.length(),
            "precision": self.control(widgets.Dropdown, "precision", precision, options=list(PRECISIONS)),
            "optimizer": self.optimizer(),
            "gradient_checkpointing": self.checkpointing(),
        }
        told = tr(
            ko="스텝을 끝까지, 또는 메모리가 모자라는 곳까지 실행한다. GPU가 없으면 가상 GPU에서 한다",
            en="runs the steps to their end, or to where memory runs out; without a GPU on a virtual one",
        )
        run = tr(ko="실행", en="Run")
        self.run = self.button("run", run, self._run, button_style="primary", icon="play", tooltip=told)
        self._traces = Kept(TRACES)
        boxes = [*self.controls.values(), self.run]
        self.lay_out(boxes[:4], [*boxes[4:], self.tools])
        self.move(self._changed)

    def answer(self, *, gpu: str, **setting: Any) -> Answer:
        report = predict_memory(Setting(**setting), gpu=gpu, kept=self._traces)
        return Answer((tr(ko=f"예측: {report.verdict}", en=f"Predicted: {report.verdict}"),), report)

    def _run(self) -> None:
        self.run.disabled = True
        try:
            values = self.values()
            name = values.pop("gpu")
            gpu = current_gpu()
            if gpu.is_virtual and gpu.name != name:
                gpu = VirtualGPU(CATALOG[name])
            self.status.value = status_line(tr(ko=f"{gpu.name}에서 실행하는 중…", en=f"Running on {gpu.name}…"))
            with redirect_stdout(StringIO()):
                report = gpu_memory_experiment(**values, gpu=gpu)
        finally:
            self.run.disabled = False
        virtual = tr(ko="가상 GPU에서 실행", en="run on the virtual GPU")
        kind = virtual if gpu.is_virtual else tr(ko="측정", en="measured")
        self.show(f"{kind} ({gpu.name}): {report.verdict}", picture=report)


def _catalog_name() -> str:
    """The GPU in use, where the catalogue has it: a real "Tesla T4" is the T4."""
    name = current_gpu().name
    return next((key for key, spec in CATALOG.items() if name in (key, spec.device_name)), "T4")


def memory_panel() -> MemoryPanel:
    """Chapter 3: model, GPU, batch, length, precision, optimizer, checkpointing → memory, predicted or run."""
    return MemoryPanel()
