"""Chapter 2's panel: a tensor under a quantization."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
import torch

from virtual_gpu.language import tr

from ...panel import Answer, Panel
from ...small_model import train_small_model
from .checks import FIXED
from .examples import DISTRIBUTIONS, example_tensor
from .pictures import draw_quantized
from .quantization import METHODS, method_label, quantize

COUNT = 4096
FIRST_OUTLIER = "20"


class QuantizationPanel(Panel):
    """Chapter 2: choose numbers and a quantization; see the histogram with the codes on it, and what it costs."""

    prefix = "quantization"

    def __init__(self, weights: torch.Tensor | None = None) -> None:
        super().__init__()
        self._weights = weights
        self._typed: dict[str, str] = {}  # what the reader had in a field that shows what a format prescribes
        distributions = [
            (tr(ko="정규 분포", en="normal"), "normal"),
            (tr(ko="꼬리가 두꺼운 분포", en="heavy-tailed"), "heavy_tailed"),
            (tr(ko="이상치 네 개", en="four outliers"), "outliers"),
            (tr(ko="이상치 하나(끌어 보기)", en="one outlier (drag it)"), "one_outlier"),
            (tr(ko="한쪽뿐인 분포(ReLU)", en="one-sided (ReLU)"), "one_sided"),
            (tr(ko="실제 층의 가중치", en="a real layer's weights"), "layer"),
        ]
        groupings = [
            (tr(ko="텐서 전체", en="whole tensor"), "tensor"),
            (tr(ko="채널(행)마다", en="each channel (row)"), "channel"),
            (tr(ko="블록", en="blocks"), "block"),
        ]
        methods = [(method_label(method), method) for method in METHODS]
        kind, method = tr(ko="분포", en="numbers"), tr(ko="방법", en="method")
        bits, block = tr(ko="비트", en="bits"), tr(ko="블록 크기", en="block size")
        scale, outlier = tr(ko="스케일 하나를", en="a scale for"), tr(ko="이상치", en="outlier")
        self.controls = {
            "distribution": self.control(widgets.Dropdown, "distribution", kind, options=distributions),
            "outlier": self.control(widgets.Text, "outlier", outlier, value=FIRST_OUTLIER, continuous_update=True),
            "method": self.control(widgets.Dropdown, "method", method, options=methods, value="absmax"),
            "bits": self.control(widgets.Text, "bits", bits, value="8", placeholder="2 … 8"),
            "grouping": self.control(widgets.Dropdown, "grouping", scale, options=groupings),
            "block": self.control(widgets.Text, "block", block, value="64"),
        }
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:3], boxes[3:])
        self.move(self._changed)

    def _changed(self) -> None:
        bits, block = FIXED.get(self.controls["method"].value, (None, None))
        self.controls["outlier"].disabled = self.controls["distribution"].value != "one_outlier"
        self._prescribe("bits", bits)
        self.controls["grouping"].disabled = block is not None
        self.controls["block"].disabled = block is not None or self.controls["grouping"].value != "block"
        super()._changed()

    def _prescribe(self, name: str, value: int | None) -> None:
        """A field shows what the format prescribes, if it does, and what the reader had there again afterwards."""
        field = self.controls[name]
        field.disabled = value is not None
        if value is not None and field.value != str(value):
            self._typed.setdefault(name, field.value)
            field.value = str(value)
        elif value is None and name in self._typed:
            field.value = self._typed.pop(name)

    def answer(self, *, distribution: str, outlier: str, **chosen: str) -> Answer:
        numbers, moved = self._numbers(distribution), None
        if distribution == "one_outlier":
            moved = _real(outlier, tr(ko="이상치", en="outlier"))
            numbers[0, 0] = moved
        quantized = quantize(numbers, **_setting(**chosen))
        # In a script nobody drags anything.
        to = "quantization-outlier" if self._loop is not None else None
        return Answer((f"{quantized.title}: {quantized.verdict}",), draw_quantized(quantized, moved, to))

    def nearby(self, moved: Any = None) -> Iterator[dict[str, Any]]:
        """Without the real layer until it was asked for once: its model is trained first, for seconds."""
        for chosen in super().nearby(moved):
            if chosen["distribution"] != "layer" or self._weights is not None:
                yield chosen

    def _numbers(self, distribution: str) -> torch.Tensor:
        if distribution == "one_outlier":
            return example_tensor("normal", COUNT).reshape(64, -1)
        if distribution in DISTRIBUTIONS:
            return example_tensor(distribution, COUNT).reshape(64, -1)
        if self._weights is None:
            self._weights = train_small_model().blocks[0].up.weight
        return self._weights


def _setting(method: str, bits: str, grouping: str, block: str) -> dict[str, Any]:
    """What the fields say that are not disabled."""
    setting: dict[str, Any] = {"method": method}
    fixed_bits, fixed_block = FIXED.get(method, (None, None))
    if fixed_bits is None:
        setting["bits"] = _integer(bits, tr(ko="비트", en="bits"))
    if fixed_block is None and grouping == "channel":
        setting["per_channel"] = True
    if fixed_block is None and grouping == "block":
        setting["block_size"] = _integer(block, tr(ko="블록 크기", en="block size"))
    return setting


def _integer(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            tr(ko=f"{what}: {text!r:.80}은(는) 정수가 아니다.", en=f"{what}: {text!r:.80} is not an integer.")
        ) from None


def _real(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if abs(number) <= torch.finfo(torch.float32).max:  # nan is not
        return number
    raise ValueError(
        tr(
            ko=f"{what}: {text!r:.80}은(는) fp32에 담기는 수가 아니다.",
            en=f"{what}: {text!r:.80} is not a number that fp32 holds.",
        )
    )


def quantization_panel(weights: torch.Tensor | None = None) -> QuantizationPanel:
    """Chapter 2: distribution, method, bits, grouping → histogram with the codes on it. `weights`: a layer's."""
    return QuantizationPanel(weights)
