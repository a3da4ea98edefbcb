"""Chapter 12's panel: what each phase of GRPO holds at least, against a card."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from virtual_gpu.cards import card
from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

from ...panel import Answer, Panel
from ..c11_outside.cache import MODELS
from .floor import ENGINES, REFERENCES, Grpo
from .phases import words
from .pictures import draw_blocks

LENGTHS = tuple(2**power for power in range(6, 14))  # 64 to 8,192 tokens
NAMES = ("Qwen/Qwen3-0.6B", *MODELS)


class GrpoPanel(Panel):
    """Chapter 12: model, method, reference, engine, completions and lengths → bytes of each phase against the card."""

    prefix = "grpo"

    def __init__(self) -> None:
        super().__init__()
        full, lora = (tr(ko="전체 미세 조정", en="full fine-tuning"), False), ("LoRA", True)
        kinds = (
            tr(ko="없음(β=0)", en="none (β=0)"), tr(ko="따로 한 벌", en="a copy"),
            tr(ko="어댑터 끄기", en="adapter off"),
        )  # fmt: skip
        places = (
            tr(ko="모델이 직접", en="the model itself"), tr(ko="엔진이 늘 있음", en="an engine that stays"),
            tr(ko="엔진을 재움", en="an engine that sleeps"),
        )  # fmt: skip
        said = {
            "method": tr(ko="방법", en="method"), "reference": tr(ko="기준 모델", en="reference"),
            "engine": tr(ko="롤아웃", en="rollout"), "fraction": tr(ko="엔진의 몫", en="engine's share"),
            "generations": tr(ko="답의 수", en="completions"), "prompt": tr(ko="질문의 길이", en="prompt"),
            "completion": tr(ko="답의 길이", en="completion"),
        }  # fmt: skip
        some = {"options": LENGTHS}
        self.controls = {
            "model": self.control(widgets.Dropdown, "model", tr(ko="모델", en="model"), options=NAMES, value=NAMES[0]),
            "gpu": self.gpu("RTX 4090"),
            "lora": self.control(widgets.Dropdown, "method", said["method"], options=[full, lora]),
            "reference": self._choice("reference", said["reference"], zip(kinds, REFERENCES, strict=True)),
            "engine": self._choice("engine", said["engine"], zip(places, ENGINES, strict=True)),
            "fraction": self.control(
                widgets.FloatSlider, "fraction", said["fraction"], value=0.3, min=0.05, max=0.95, step=0.05
            ),
            "generations": self.control(
                widgets.IntSlider, "generations", said["generations"], value=8, min=2, max=64, step=2
            ),
            "batch": self.batch(8),
            "prompt": self.control(widgets.SelectionSlider, "prompt", said["prompt"], value=256, **some),
            "completion": self.control(widgets.SelectionSlider, "completion", said["completion"], value=512, **some),
        }
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:6], boxes[6:])
        self.move(self._changed)

    def _choice(self, name: str, said: str, options: zip) -> widgets.Dropdown:
        return self.control(widgets.Dropdown, name, said, options=[*options])

    def _changed(self) -> None:
        self.controls["fraction"].disabled = self.controls["engine"].value == "shared"
        super()._changed()

    def answer(self, **chosen: Any) -> Answer:
        gpu = card(chosen.pop("gpu"))
        phases = Grpo(**chosen).floor(gpu.memory_bytes)
        name, most = max(((name, sum(blocks.values())) for name, blocks in phases.items()), key=lambda pair: pair[1])
        room = gpu.capacity_bytes
        fits = tr(ko="하한이 들어간다", en="the floor fits") if most <= room else tr(ko="넘친다", en="does not fit")
        told = tr(
            ko=f"가장 큰 때는 {words(name)}: 적어도 {human_bytes(most)}. "
            f"{gpu.name}에서 쓸 수 있는 {human_bytes(room)}: {fits}",
            en=f"Most in {words(name)}: at least {human_bytes(most)} of {human_bytes(room)} on a {gpu.name}: {fits}",
        )
        return Answer((told,), draw_blocks(phases, room))


def grpo_panel() -> GrpoPanel:
    """Chapter 12: what each phase of a step of GRPO holds at least, by formula, against a card."""
    return GrpoPanel()
