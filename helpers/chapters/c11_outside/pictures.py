"""Weights and KV cache as one bar against a card."""

from __future__ import annotations

from virtual_gpu.cards import card
from virtual_gpu.drawing.svg import BLUE, GRID, INK, MUTED, ORANGE, RED, Drawing
from virtual_gpu.language import tr
from virtual_gpu.models.configs import load_config
from virtual_gpu.units import human_bytes

from .cache import kv_bytes, parameters


def draw_sizes(weights: int, cache: int, room: int) -> Drawing:
    """Bytes of weights and cache beside the bytes that a card has."""
    usable = tr(ko="쓸 수 있는 메모리", en="room on the card")
    names = tr(ko="가중치", en="weights"), tr(ko="KV 캐시", en="KV cache"), usable
    said = ", ".join(f"{name} {human_bytes(n)}" for name, n in zip(names, (weights, cache, room), strict=True))
    drawing, left = Drawing(660, 96, said), 40
    scale = 560 / max(weights + cache, room)
    drawing.rect(left, 34, room * scale, 34, GRID)
    drawing.rect(left, 34, weights * scale, 34, BLUE)
    drawing.rect(left + weights * scale, 34, cache * scale, 34, ORANGE)
    edge = left + room * scale
    drawing.line(edge, 26, edge, 76, RED)
    drawing.text(max(edge, left + 160), 90, f"{usable} {human_bytes(room)}", 12, "end", MUTED)
    for x, name, color, size in ((0, names[0], BLUE, weights), (200, names[1], ORANGE, cache)):
        drawing.rect(left + x, 8, 12, 12, color)
        drawing.text(left + x + 18, 19, f"{name} {human_bytes(size)}", 12, fill=INK)
    return drawing


def draw_cache(model_id: str, gpu: str, context: int, batch: int = 1) -> Drawing:
    """A model's 16-bit weights and the cache of `batch` sequences of `context` tokens on a card."""
    cache = kv_bytes(load_config(model_id), context, batch)
    return draw_sizes(2 * parameters(model_id), cache, card(gpu).capacity_bytes)
