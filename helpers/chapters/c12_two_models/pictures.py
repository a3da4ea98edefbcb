"""Parts of peaks and blocks of phases as bars, a step's moments and GRPO's phases as timelines, against a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from virtual_gpu.drawing.svg import (
    BLUE,
    GREEN,
    GREY,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Drawing,
    text_width,
)  # fmt: skip
from virtual_gpu.language import tr
from virtual_gpu.program.words import category
from virtual_gpu.units import GiB, MiB, human_bytes

from .floor import BLOCKS, block_words
from .moments import KINDS, Moments, Parts, kind_words
from .phases import NAMES, STEP, Steps, words

# Weights, gradients, optimizer state and activations have the colours that they have in every chapter.
_OF_BLOCK = dict(zip(BLOCKS, (BLUE, SKY, GREEN, ORANGE, RED, YELLOW, PURPLE, GREY), strict=True))
_SEEN = 64 * MiB  # what a bar shows of a part
_OF_PART = {
    "parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "saved for backward": PURPLE, "temporaries": SKY,
}  # fmt: skip
_OF_KIND = dict(zip(KINDS, (GREY, PURPLE, SKY, GREEN, BLUE, YELLOW, ORANGE), strict=True))


def draw_parts(found: Mapping[str, Parts]) -> Drawing:
    """A bar a program, of what is there at its highest peak: the same parts in the same order, with their GiB."""
    return stacked(found, _OF_PART, category)


def stacked(
    found: Mapping[str, Parts], colours: Mapping[str, str], name_of: Callable[[str], str], columns: int = 5
) -> Drawing:
    """A bar a program: its parts in the order of `colours`, then what has no colour, against the card.

    name_of: a part's name for the reader. columns: of the names under which the colours are told.
    """
    left, wide, row, top = 128, 400, 36, 54.0
    order = [*colours, *(name for one in found.values() for name in one.held if name not in colours)]
    held = {name: [(part, one.held.get(part, 0)) for part in dict.fromkeys(order)] for name, one in found.items()}
    used = [part for part in colours if any(dict(parts)[part] >= _SEEN for parts in held.values())]
    most = max([one.room for one in found.values()] + [one.total for one in found.values()])
    said = "; ".join(
        f"{name}: " + ", ".join(f"{name_of(part)} {human_bytes(nbytes)}" for part, nbytes in parts if nbytes >= _SEEN)
        for name, parts in held.items()
    )
    drawing = Drawing(620, 76 + row * len(found), said)
    step = 610 // columns
    for i, part in enumerate(used):
        x, y = 10 + step * (i % columns), 10 + 18 * (i // columns)
        drawing.rect(x, y, 11, 11, colours[part])
        drawing.text(x + 16, y + 10, name_of(part), 12)
    for i, (name, parts) in enumerate(held.items()):
        y = top + i * row
        drawing.text(left - 8, y + 17, name, 12, "end")
        bars = [(n / most * wide, colours.get(part, MUTED), f"{n / GiB:.2f}") for part, n in parts if n >= _SEEN]
        drawing.bar(left, y, 26, bars)
        drawing.text(612, y + 17, human_bytes(found[name].total), 12, "end", bold=True)
    for room in {one.room for one in found.values()}:
        edge = left + room / most * wide
        drawing.line(edge, top - 6, edge, top + row * len(found) - 4, RED, stroke_width=2)
        name = tr(ko="쓸 수 있는 메모리", en="room on the card")
        drawing.text(edge, top + row * len(found) + 12, f"{name} {human_bytes(room)}", 12, "end", RED)
    return drawing


def draw_moments(found: Mapping[str, Moments]) -> Drawing:
    """Steps from top to bottom, each a row a moment: what is there together, in the order in which it was made."""
    left, wide, row, head = 124, 278, 19, 32
    most = max([one.room for one in found.values()] + [m.total for one in found.values() for m in one.rows])
    said = "; ".join(
        f"{name}: " + ", ".join(f"{one.name} {human_bytes(one.total)}" for one in step.rows)
        for name, step in found.items()
    )
    lines = sum(len(one.rows) for one in found.values())
    drawing = Drawing(480, 66 + row * lines + head * len(found) + 10, said)
    for i, kind in enumerate(KINDS):
        x, y = 10 + 158 * (i % 3), 10 + 18 * (i // 3)
        drawing.rect(x, y, 11, 11, _OF_KIND[kind])
        drawing.text(x + 16, y + 10, kind_words(kind), 12)
    y, rooms, card = 66.0, set(), tr(ko="쓸 수 있는 메모리", en="room on the card")
    for name, step in found.items():
        top, ends = y, "" if step.outcome.died is None else f" · {step.outcome.result}"
        drawing.text(10, y + 22, f"{name}{ends}", 13, bold=True)
        y += head
        for one in step.rows:
            highest = one.total == step.outcome.gpu
            drawing.text(left - 6, y + 13, one.name, 12, "end", bold=highest)
            parts = [(nbytes / most * wide, _OF_KIND[kind], "") for kind, nbytes in one.held]
            drawing.bar(left, y, row - 3, parts)
            drawing.text(472, y + 13, human_bytes(one.total), 12, "end", INK if highest else MUTED, bold=highest)
            y += row
        limit = left + step.room / most * wide
        drawing.line(limit, top + head - 4, limit, y, RED, stroke_width=2)
        if step.room not in rooms:  # once for steps on the same card
            rooms.add(step.room)
            drawing.text(limit, top + 22, f"{card} {human_bytes(step.room)}", 12, "end", RED)
    return drawing


def draw_steps(steps: Steps) -> Drawing:
    """One column a phase: what was held at its beginning, at most (with the number) and at its end; the card's line."""
    count = max(len(steps.phases), 1)
    wide, tall, left, top = 92, 190, 24, 46
    most = max([steps.room, *(one.peak for one in steps.phases)])
    said = ", ".join(f"{words(one.name)} {human_bytes(one.peak)}" for one in steps.phases)
    drawing = Drawing(left * 2 + wide * count, top + tall + 62, f"{said}. {steps.result}")

    def height(size: int) -> float:
        return top + tall - size / most * tall

    step, bottom, line = 1, top + tall, height(steps.room)
    for i, one in enumerate(steps.phases):
        x = left + i * wide
        shape = [(x, bottom), (x, height(one.start)), (x + wide / 2, height(one.peak)), (x + wide, height(one.end))]
        drawing.polygon([*shape, (x + wide, bottom)], GREY)
        label = height(one.peak) - 6
        if label - 12 < line < label + 4:  # above the line that it would lie on
            label = line - 6
        drawing.text(x + wide / 2, label, human_bytes(one.peak), 11, "middle", INK)
        drawing.text(x + wide / 2, bottom + 18, words(one.name), 12, "middle", INK)
        if one.name == NAMES[0]:
            drawing.line(x, top - 8, x, bottom + 40, MUTED)
            drawing.text(x + 4, bottom + 36, tr(ko=f"스텝 {step}", en=f"step {step}"), 12, fill=MUTED)
        step += one.name == STEP
    if steps.phases and steps.outcome.died:
        drawing.text(left + wide * count - 4, bottom + 36, "OOM", 12, "end", RED)
    drawing.line(left, line, left + wide * count, line, RED, stroke_width=2)
    name = tr(ko="쓸 수 있는 메모리", en="room on the card")
    drawing.text(left, 14, f"{name} {human_bytes(steps.room)} · {steps.result}", 12, fill=MUTED)
    return drawing


def draw_blocks(phases: dict[str, dict[str, int]], room: int) -> Drawing:
    """phase → block → bytes, as stacked bars against the bytes that a card has."""
    totals = {name: sum(blocks.values()) for name, blocks in phases.items()}
    said = ", ".join(f"{words(name)} {human_bytes(total)}" for name, total in totals.items())
    left, wide, row = 96, 440, 40
    card = tr(ko="쓸 수 있는 메모리", en="room on the card")
    drawing = Drawing(660, 78 + row * len(phases), f"{said}, {card} {human_bytes(room)}")
    scale = wide / max(room, *totals.values())
    for i, (name, blocks) in enumerate(phases.items()):
        y, x = 50 + i * row, float(left)
        drawing.text(left - 8, y + 18, words(name), 12, "end", INK)
        drawing.rect(left, y, room * scale, 26, GRID)
        for block, size in blocks.items():
            drawing.rect(x, y, size * scale, 26, _OF_BLOCK[block])
            x += size * scale
        said, edge = human_bytes(totals[name]), left + room * scale
        clear = x + 6 + text_width(said, 12) < edge - 4  # beside its bar, or beyond the card's line
        drawing.text(x + 6 if clear else max(x, edge) + 6, y + 18, said, 12, fill=INK)
    edge = left + room * scale
    drawing.line(edge, 42, edge, 54 + row * len(phases), RED, stroke_width=2)
    drawing.text(edge, 70 + row * len(phases), f"{card} {human_bytes(room)}", 12, "middle", MUTED)
    used = [block for block in BLOCKS if any(blocks.get(block) for blocks in phases.values())]
    for i, block in enumerate(used):
        x = 8 + 108 * (i % 6)
        y = 8 + 18 * (i // 6)
        drawing.rect(x, y, 11, 11, _OF_BLOCK[block])
        drawing.text(x + 16, y + 10, block_words(block), 11, fill=INK)
    return drawing
