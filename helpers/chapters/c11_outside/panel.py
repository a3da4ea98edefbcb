"""Chapter 11's panel: a model's weights and its KV cache against a card."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from virtual_gpu.cards import card
from virtual_gpu.language import tr
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.kv_cache import kv_bytes
from virtual_gpu.units import human_bytes

from ...panel import Answer, Panel
from .cache import BYTES, MODELS, parameters
from .pictures import draw_sizes

CONTEXTS = tuple(2**power for power in range(9, 18))  # 512 to 131,072 tokens


class CachePanel(Panel):
    """Chapter 11: model, card, context, batch, precision of weights and cache → bytes of both against the card."""

    prefix = "cache"

    def __init__(self) -> None:
        super().__init__()
        weights, cache = tr(ko="가중치", en="weights"), tr(ko="캐시", en="cache")
        model = tr(ko="모델", en="model")
        self.controls = {
            "model": self.control(widgets.Dropdown, "model", model, options=MODELS, value=MODELS[0]),
            "gpu": self.gpu("RTX 4090"),
            "weights": self.control(widgets.Dropdown, "weights", weights, options=[*BYTES], value="fp16/bf16"),
            "context": self.length(16384, CONTEXTS),
            "batch": self.batch(1),
            "cache": self.control(widgets.Dropdown, "kind", cache, options=[*BYTES], value="fp16/bf16"),
        }
        boxes = [*self.controls.values()]
        self.lay_out(boxes[:3], boxes[3:])
        self.move(self._changed)

    def answer(self, **chosen: Any) -> Answer:
        config, room = load_config(chosen["model"]), card(chosen["gpu"]).capacity_bytes
        weights = round(parameters(chosen["model"]) * BYTES[chosen["weights"]])
        each, tokens, batch = BYTES[chosen["cache"]], chosen["context"], chosen["batch"]
        cache = kv_bytes(config, tokens, batch, each)
        total, one = weights + cache, human_bytes(kv_bytes(config, 1, 1, each))
        fits = tr(ko="들어간다", en="fits") if total <= room else tr(ko="넘친다", en="does not fit")
        lines = (
            tr(
                ko=f"토큰 하나에 {one}. 캐시 {human_bytes(cache)}, 가중치 {human_bytes(weights)}",
                en=f"{one} a token. Cache {human_bytes(cache)}, weights {human_bytes(weights)}",
            ),
            tr(
                ko=f"합 {human_bytes(total)}, {chosen['gpu']}에서 쓸 수 있는 {human_bytes(room)}: {fits}",
                en=f"Together {human_bytes(total)} of {human_bytes(room)} on a {chosen['gpu']}: {fits}",
            ),
        )
        return Answer(lines, draw_sizes(weights, cache, room))


def cache_panel() -> CachePanel:
    """Chapter 11: a model's weights and its KV cache against a card, by formula."""
    return CachePanel()
