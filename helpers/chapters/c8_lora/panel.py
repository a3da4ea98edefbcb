"""Chapter 8's panel: full fine-tuning, LoRA and QLoRA in memory."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from virtual_gpu.language import tr
from virtual_gpu.models.adapters import LORA_TARGETS
from virtual_gpu.step.setting import Setting

from ...comparing import ReportPanel
from ...experiment import predict_memory
from ...panel import TRACES, Answer, Kept, whole
from .lora import trainable_parameters


class LoraPanel(ReportPanel):
    """Chapter 8: choose a model and how it is trained; see what is trained and where the memory goes."""

    prefix = "lora"

    def __init__(self) -> None:
        super().__init__()
        methods = [(tr(ko="전체 미세 조정", en="full fine-tuning"), "full"), ("LoRA", "lora"), ("QLoRA", "qlora")]
        kinds = tr(ko="어텐션(기본값)", en="attention (default)"), tr(ko="모든 선형층", en="all linear layers")
        targets = [*zip(kinds, LORA_TARGETS, strict=True)]
        method, target = tr(ko="방법", en="method"), tr(ko="대상 층", en="target layers")
        self.controls = {
            "model_id": self.model(),
            "gpu": self.gpu(),
            "peft": self.control(widgets.Dropdown, "method", method, options=methods, value="lora"),
            "lora_rank": self.control(widgets.Text, "rank", "rank", value="8", placeholder="8"),
            "lora_targets": self.control(widgets.Dropdown, "targets", target, options=targets),
            "batch_size": self.batch(16),
            "sequence_length": self.length(),
            "gradient_checkpointing": self.checkpointing(),
        }
        self._traces = Kept(TRACES)
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:4], [*boxes[4:], self.tools])
        self.move(self._changed)

    def _changed(self) -> None:
        adapters = self.controls["peft"].value != "full"
        for name in ("lora_rank", "lora_targets"):
            self.controls[name].disabled = not adapters
        super()._changed()

    def answer(self, *, gpu: str, peft: str, lora_rank: str, **values: Any) -> Answer:
        if peft != "full":  # a drop-down shows nothing for a value of None
            values |= {"peft": peft, "lora_rank": whole(lora_rank)}
        setting = Setting(**values)
        report = predict_memory(setting, gpu=gpu, kept=self._traces)
        trained, total = trainable_parameters(setting.model_id, setting.peft, setting.lora_rank, setting.lora_targets)
        count = f"{trained:,} / {total:,} ({trained / total:.3%})"
        trains = tr(ko=f"학습하는 파라미터: {count}", en=f"Trainable parameters: {count}")
        return Answer((trains, report.verdict), report)


def lora_panel() -> LoraPanel:
    """Chapter 8: model, GPU, method, rank, target layers, batch, length → what is trained, and the memory by kind."""
    return LoraPanel()
