"""A job's phases, logits that an evaluation gathers batch by batch, weights and KV cache against a card."""

from __future__ import annotations

from collections.abc import Sequence

from virtual_gpu.cards import card
from virtual_gpu.drawing.svg import BLUE, GREY, GRID, INK, MUTED, ORANGE, PURPLE, RED, SKY, YELLOW, Drawing
from virtual_gpu.language import tr
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.kv_cache import kv_bytes
from virtual_gpu.units import GiB, human_bytes

from .cache import parameters
from .job import Phase, words


def draw_sizes(weights: int, cache: int, room: int) -> Drawing:
    """Bytes of weights and cache beside the bytes that a card has."""
    usable = tr(ko="쓸 수 있는 메모리", en="room on the card")
    names = tr(ko="가중치", en="weights"), tr(ko="KV 캐시", en="KV cache"), usable
    said = ", ".join(f"{name} {human_bytes(n)}" for name, n in zip(names, (weights, cache, room), strict=True))
    drawing, left = Drawing(660, 96, said), 40
    scale = 560 / max(weights + cache, room)
    drawing.rect(left, 34, room * scale, 34, GRID)
    drawing.rect(left, 34, weights * scale, 34, BLUE)
    drawing.rect(left + weights * scale, 34, cache * scale, 34, YELLOW)
    edge = left + room * scale
    drawing.line(edge, 26, edge, 76, RED)
    drawing.text(max(edge, left + 160), 90, f"{usable} {human_bytes(room)}", 12, "end", MUTED)
    for x, name, color, size in ((0, names[0], BLUE, weights), (200, names[1], YELLOW, cache)):
        drawing.rect(left + x, 8, 12, 12, color)
        drawing.text(left + x + 18, 19, f"{name} {human_bytes(size)}", 12, fill=INK)
    return drawing


def draw_cache(model_id: str, gpu: str, context: int, batch: int = 1) -> Drawing:
    """A model's 16-bit weights and the cache of `batch` sequences of `context` tokens on a card."""
    cache = kv_bytes(load_config(model_id), context, batch)
    return draw_sizes(2 * parameters(model_id), cache, card(gpu).capacity_bytes)


def draw_gathering(seen: Sequence[tuple[int, int]], gpu: str) -> Drawing:
    """A row a batch, of (bytes allocated, bytes of its logits) once it is through the model: what joining needs.

    Until then the logits of all batches before are one tensor; the next one, with this batch's, is asked for.
    """
    left, wide, row, room = 66, 560, 24, card(gpu).capacity_bytes
    rows, old = [], 0
    for allocated, batch in seen:
        rows.append((allocated - old - batch, old, batch, old + batch if old else 0))
        old += batch
    most = max(room, *map(sum, rows))
    totals = ", ".join(human_bytes(sum(parts)) for parts in rows)
    limit = tr(ko="쓸 수 있는 메모리", en="room on the card")
    drawing = Drawing(740, 66 + row * len(rows), f"{totals}; {limit} {human_bytes(room)}")
    names = (
        tr(ko="가중치와 그 밖", en="weights and the rest"),
        tr(ko="모아 둔 로짓", en="logits gathered"),
        tr(ko="이 배치의 로짓", en="this batch's logits"),
        tr(ko="새로 달라는 것", en="what is asked for"),
    )
    colors = GREY, PURPLE, SKY, YELLOW
    for i, (name, color) in enumerate(zip(names, colors, strict=True)):
        drawing.rect(10 + 143 * i, 10, 11, 11, color)
        drawing.text(26 + 143 * i, 20, name, 12)
    for i, parts in enumerate(rows):
        y, over = 56 + row * i, sum(parts) > room
        drawing.text(left - 6, y + 14, tr(ko=f"배치 {i + 1}", en=f"batch {i + 1}"), 12, "end", INK, bold=over)
        labels = [f"{n / GiB:.2f}" for n in parts]
        drawn = zip(parts, colors, labels, strict=True)
        drawing.bar(left, y, row - 4, [(n / most * wide, color, label) for n, color, label in drawn], 11)
        drawing.text(730, y + 14, human_bytes(sum(parts)), 12, "end", INK if over else MUTED, bold=over)
    edge = left + room / most * wide
    drawing.line(edge, 50, edge, 60 + row * len(rows), RED, stroke_width=2)
    drawing.text(edge, 44, f"{limit} {human_bytes(room)}", 12, "end", RED)
    return drawing


def draw_job(phases: Sequence[Phase], before: Sequence[Phase] = ()) -> Drawing:
    """Columns of what GPU and RAM held at most in each phase; before: the same phases as they were, pale behind.

    Bytes stand under the names, those of before in parentheses. A dashed line is the GPU's peak in training.
    """
    left, top, tall, wide = 16, 34, 96, 104
    block = tall + (86 if before else 70)
    kinds = (("GPU", lambda one: one.gpu, BLUE), ("RAM", lambda one: one.ram, ORANGE))
    said = "; ".join(
        f"{kind}: " + ", ".join(f"{words(one.name)} {human_bytes(size(one))}" for one in phases)
        for kind, size, _ in kinds
    )
    right = left + 44 + wide * len(phases)
    drawing = Drawing(right + 80, top + 2 * block, said)
    for row, (kind, size, color) in enumerate(kinds):
        bottom = top + tall + row * block
        scale = tall / max(size(one) for one in (*phases, *before))
        drawing.text(left, bottom - tall - 12, tr(ko=f"{kind} 최대", en=f"{kind}, peak"), 13, bold=True)
        for i, one in enumerate(phases):
            x, middle = left + 40 + wide * i, left + 66 + wide * i
            if before:
                old = size(before[i]) * scale
                drawing.rect(x, bottom - old, 52, old, GRID)
                drawing.text(middle, bottom + 47, f"({human_bytes(size(before[i]))})", 12, "middle", MUTED)
            height = size(one) * scale
            drawing.rect(x + 4, bottom - height, 44, height, color)
            drawing.text(middle, bottom + 16, words(one.name), 12, "middle", INK)
            drawing.text(middle, bottom + 32, human_bytes(size(one)), 12, "middle")
        if kind == "GPU":
            line = bottom - next(one.gpu for one in phases if one.name == "train") * scale
            drawing.line(left + 30, line, right, line, RED, stroke_dasharray="5 4")
            drawing.text(right + 4, line + 4, tr(ko="학습의 최대", en="training"), 12, fill=RED)
        drawing.line(left + 30, bottom, right, bottom, MUTED)
    return drawing
