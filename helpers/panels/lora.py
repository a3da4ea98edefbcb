"""Chapter 7's panel: full fine-tuning, LoRA and QLoRA in memory."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from ..experiment import Setting, predict_memory
from ..gpu_catalog import CATALOG
from ..language import tr
from ..lora import trainable_parameters
from ..models import DEFAULT_MODEL, LORA_TARGETS, architectures
from ..report import MemoryReport
from . import STYLE, WIDE, error_line, status_line


class LoraPanel(widgets.VBox):
    """Chapter 7: choose a model and how it is trained; see what is trained and where the memory goes."""

    def __init__(self) -> None:
        def control(kind: Any, name: str, description: str, **arguments: Any) -> Any:
            widget = kind(description=description, layout=WIDE, style=STYLE, **arguments)
            widget.add_class(f"lora-{name}")
            widget.observe(self._changed, names="value")
            return widget

        methods = {tr(ko="전체 미세 조정", en="full fine-tuning"): "full", "LoRA": "lora", "QLoRA": "qlora"}
        targets = {
            tr(ko="어텐션(기본값)", en="attention (default)"): LORA_TARGETS[0],
            tr(ko="모든 선형층", en="all linear layers"): LORA_TARGETS[1],
        }
        self.controls = {
            "model_id": control(
                widgets.Dropdown, "model", tr(ko="모델", en="model"), options=list(architectures()), value=DEFAULT_MODEL
            ),
            "gpu": control(widgets.Dropdown, "gpu", "GPU", options=list(CATALOG), value="T4"),
            "peft": control(
                widgets.Dropdown, "method", tr(ko="방법", en="method"), options=[*methods.items()], value="lora"
            ),
            "lora_rank": control(widgets.Text, "rank", "rank", value="8", continuous_update=False, placeholder="8"),
            "lora_targets": control(
                widgets.Dropdown, "targets", tr(ko="대상 층", en="target layers"), options=[*targets.items()]
            ),
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
                options=[64, 128, 256, 512, 1024, 2048, 4096, 8192],
                value=256,
                continuous_update=False,
            ),
            "gradient_checkpointing": control(
                widgets.Checkbox,
                "checkpointing",
                tr(ko="그레이디언트 체크포인팅", en="gradient checkpointing"),
                value=False,
            ),
        }
        self.status = widgets.HTML()
        self.status.add_class("lora-status")
        self.picture = widgets.HTML()
        self.picture.add_class("lora-picture")
        self._predictions: dict[tuple, MemoryReport] = {}
        left, right = [*self.controls.values()][:4], [*self.controls.values()][4:]
        rows = widgets.HBox([widgets.VBox(left), widgets.VBox(right)], layout={"flex_flow": "row wrap"})
        super().__init__([rows, self.status, self.picture])
        self.add_class("lora-panel")
        self._changed(None)

    def __repr__(self) -> str:
        return "LoraPanel()"

    def _changed(self, _: Any) -> None:
        adapters = self.controls["peft"].value != "full"
        for name in ("lora_rank", "lora_targets"):
            self.controls[name].disabled = not adapters
        try:
            setting, gpu = self._setting()
            key = (setting, gpu)
            if key not in self._predictions:
                self._predictions[key] = predict_memory(setting, gpu=gpu)
            report = self._predictions[key]
            trained, total = trainable_parameters(
                setting.model_id, setting.peft, setting.lora_rank, setting.lora_targets
            )
        except (ValueError, ImportError) as error:
            self.status.value = error_line(error)
            self.picture.value = ""
            return
        count = f"{trained:,} / {total:,} ({trained / total:.3%})"
        lines = tr(ko=f"학습하는 파라미터: {count}", en=f"Trainable parameters: {count}"), report.verdict
        self.status.value = "".join(map(status_line, lines))
        self.picture.value = report._repr_svg_()

    def _setting(self) -> tuple[Setting, str]:
        values = {name: widget.value for name, widget in self.controls.items()}
        gpu = values.pop("gpu")
        if values["peft"] == "full":  # a drop-down shows nothing for a value of None
            del values["peft"], values["lora_rank"]
        elif values["lora_rank"].strip().removeprefix("-").isdecimal():  # of anything else, Setting says what is wrong
            values["lora_rank"] = int(values["lora_rank"])
        return Setting(**values), gpu
