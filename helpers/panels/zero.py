"""Chapter 6's panel: what one GPU of many holds and sends."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from ..distributed.layout import CONVENTIONS
from ..distributed.ledger import PAPER_MODELS
from ..distributed.rank_step import RankStep, rank_step
from ..gpu_catalog import CATALOG
from ..language import tr
from ..models import architectures
from . import STYLE, WIDE, error_line, status_line

LARGE = "meta-llama/Llama-3.1-70B"


class ZeroPanel(widgets.VBox):
    """Chapter 6: choose a model and how many GPUs share it how; see one GPU's bytes by part and what it sends."""

    def __init__(self) -> None:
        def control(kind: Any, name: str, description: str, **arguments: Any) -> Any:
            widget = kind(description=description, layout=WIDE, style=STYLE, **arguments)
            widget.add_class(f"zero-{name}")
            widget.observe(self._changed, names="value")
            return widget

        stages = [("0 · DDP", 0), ("1 · ZeroRedundancyOptimizer", 1), ("2 · FSDP2", 2), ("3 · FSDP2", 3)]
        slider = {"continuous_update": False}
        self.controls = {
            "model": control(
                widgets.Dropdown,
                "model",
                tr(ko="모델", en="model"),
                options=[*architectures(), *PAPER_MODELS],
                value=LARGE,
            ),
            "gpu": control(widgets.Dropdown, "gpu", "GPU", options=list(CATALOG), value="H100"),
            "ranks": control(
                widgets.SelectionSlider,
                "ranks",
                tr(ko="GPU 수", en="GPUs"),
                options=[2**power for power in range(15)],
                value=64,
                **slider,
            ),
            "stage": control(widgets.Dropdown, "stage", tr(ko="ZeRO 단계", en="ZeRO stage"), options=stages, value=3),
            "tensor_parallel": control(
                widgets.SelectionSlider,
                "tensor-parallel",
                tr(ko="텐서 병렬", en="tensor parallel"),
                options=[1, 2, 4, 8, 16],
                value=1,
                **slider,
            ),
            "precision": control(
                widgets.Dropdown,
                "precision",
                tr(ko="정밀도", en="precision"),
                options=[(f"{name} · {c.total} B", name) for name, c in CONVENTIONS.items()],
                value="mixed",
            ),
            "batch_size": control(
                widgets.IntSlider, "batch", tr(ko="배치 크기", en="batch size"), value=1, min=1, max=32, **slider
            ),
            "sequence_length": control(
                widgets.SelectionSlider,
                "length",
                tr(ko="길이(토큰)", en="length (tokens)"),
                options=[256, 512, 1024, 2048, 4096, 8192, 16384, 32768],
                value=4096,
                **slider,
            ),
            "gradient_checkpointing": control(
                widgets.Checkbox,
                "checkpointing",
                tr(ko="그레이디언트 체크포인팅", en="gradient checkpointing"),
                value=True,
            ),
        }
        self.status = widgets.HTML()
        self.status.add_class("zero-status")
        self.picture = widgets.HTML()
        self.picture.add_class("zero-picture")
        left, right = [*self.controls.values()][:5], [*self.controls.values()][5:]
        columns = widgets.HBox([widgets.VBox(left), widgets.VBox(right)], layout={"flex_flow": "row wrap"})
        super().__init__([columns, self.status, self.picture])
        self.add_class("zero-panel")
        self._changed(None)

    def __repr__(self) -> str:
        return "ZeroPanel()"

    def values(self) -> dict[str, Any]:
        """The chosen setting, as `rank_step` takes it."""
        return {name: widget.value for name, widget in self.controls.items()}

    def step(self) -> RankStep:
        """The chosen setting on one rank; ValueError where it cannot be split so."""
        return rank_step(**self.values(), exact=False)

    def _changed(self, _: Any) -> None:
        try:
            step = self.step()
        except (ValueError, ImportError) as error:
            self.status.value = error_line(error)
            self.picture.value = ""
            return
        self.status.value = status_line(step.verdict)
        self.picture.value = step._repr_svg_()
