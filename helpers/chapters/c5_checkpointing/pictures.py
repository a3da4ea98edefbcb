"""Chapter 5's pictures: a chain at a moment, its whole run, several moments under each other."""

from __future__ import annotations

from typing import Any

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

LEFT, WIDTH = 84, 640
FORWARD, BACKWARD, AGAIN = svg.BLUE, svg.ORANGE, svg.RED
MOST_CIRCLES, MOST_ROWS = 24, 256  # beyond these a chain is drawn without its nodes, and without its map


def describe(recording: Any, moment: int) -> str:
    """What is computed at a moment, and how much is alive, in one line."""
    kind, node = recording.moments[moment]
    again = kind == "forward" and (kind, node) in recording.moments[:moment]
    what = {
        ("forward", False): tr(ko=f"y{node} 계산", en=f"compute y{node}"),
        ("forward", True): tr(ko=f"y{node} 다시 계산", en=f"compute y{node} again"),
    }.get((kind, again), tr(ko=f"그레이디언트 g{node} 계산", en=f"compute the gradient g{node}"))
    stored = recording.stored[moment]
    return tr(
        ko=f"순간 {moment + 1}/{len(recording.moments)} · {what} · 저장된 값 {stored}개",
        en=f"moment {moment + 1}/{len(recording.moments)} · {what} · {stored} stored",
    )


def draw_moment(recording: Any, moment: int) -> svg.Drawing:
    """The nodes at a moment; below, over all moments: who is alive, and how many."""
    nodes = recording.nodes
    circles = 128 if nodes <= MOST_CIRCLES else 0
    row = max(min(16, 360 / nodes), 1) if nodes <= MOST_ROWS else 0
    top_of_map = 84 + circles
    top_of_curve = top_of_map + row * nodes + (40 if row else 0)
    drawing = svg.Drawing(
        760, int(top_of_curve + 176), f"{recording.title}: {recording.verdict}. {describe(recording, moment)}"
    )
    drawing.text(20, 30, f"{recording.title}: {recording.verdict}", size=16, bold=True)
    drawing.text(20, 54, describe(recording, moment))
    if circles:
        _nodes(drawing, recording, moment, 104)
    x = WIDTH / len(recording.moments)
    if row:
        _map(drawing, recording, top_of_map, row, x)
    _curve(drawing, recording, moment, top_of_curve, 110, x)
    cursor = LEFT + (moment + 0.5) * x
    drawing.line(cursor, top_of_map - 6, cursor, top_of_curve + 110, svg.INK, stroke_width=1.5, stroke_dasharray="4 3")
    _legend(drawing, top_of_curve + 150)
    return drawing


def draw_moments(rows: list[tuple[str, Any, int]]) -> svg.Drawing:
    """(label, recording, moment): the chain at each of these moments, one below the other."""
    tall = 150
    alt = "; ".join(f"{label}: {describe(recording, moment)}" for label, recording, moment in rows)
    drawing = svg.Drawing(760, tall * len(rows) + 40, alt)
    for i, (label, recording, moment) in enumerate(rows):
        top = i * tall
        drawing.text(20, top + 28, label, size=15, bold=True)
        drawing.text(20, top + 49, describe(recording, moment))
        _nodes(drawing, recording, moment, top + 84)
    _legend(drawing, tall * len(rows) + 16)
    return drawing


def _nodes(drawing: svg.Drawing, recording: Any, moment: int, top: float) -> None:
    """Two rows of nodes, forward above and gradients below: filled where alive, ringed where computed now."""
    alive = recording.alive_at(moment)
    now = recording.moments[moment]
    step = min(110.0, WIDTH / recording.nodes)
    radius = min(16.0, step * 0.36)
    done = recording.moments[: moment + 1]
    for kind, letter, y, color in (("forward", "y", top, FORWARD), ("backward", "g", top + 48, BACKWARD)):
        name = tr(ko="순전파", en="forward") if kind == "forward" else tr(ko="역전파", en="backward")
        drawing.text(20, y + 4, name, size=12, fill=svg.MUTED)
        for node in range(1, recording.nodes + 1):
            x = LEFT + (node - 0.5) * step
            if node > 1:
                a, b = (x - step + radius, x - radius) if kind == "forward" else (x - radius, x - step + radius)
                head = 4 if kind == "forward" else -4
                drawing.line(a, y, b, y, svg.GREY)
                drawing.polygon([(b, y), (b - head, y - 3), (b - head, y + 3)], svg.GREY)
            here = node in alive[kind]
            fill, ink = (color, svg.ink_on(color)) if here else (svg.PAPER, svg.MUTED)
            ring = {"stroke": svg.INK, "stroke_width": 3} if now == (kind, node) else {"stroke": svg.GREY}
            drawing.circle(x, y, radius, fill, **ring)
            size = svg.fit_size(f"{letter}{node}", radius * 1.5, 13)
            drawing.text(x, y + size * 0.35, f"{letter}{node}", size=size, anchor="middle", fill=ink, bold=here)
            times = done.count((kind, node))
            if kind == "forward" and times > 1:
                drawing.text(x + radius * 0.8, y - radius * 0.8, f"×{times}", size=11, fill=AGAIN, bold=True)


def _map(drawing: svg.Drawing, recording: Any, top: float, row: float, x: float) -> None:
    """A row for each node: when its value (upper half) and its gradient (lower half) are alive."""
    nodes = recording.nodes
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100) if row * step >= 11)
    for node in range(1, nodes + 1):
        if node == 1 or (node % every == 0 and (node - 1) * row >= 11):
            drawing.text(LEFT - 8, top + (node - 0.5) * row + 4, str(node), size=11, anchor="end", fill=svg.MUTED)
    drawing.text(20, top + 10, tr(ko="노드", en="node"), size=11, fill=svg.MUTED)
    drawing.rect(LEFT, top, WIDTH, row * nodes, "#f4f6f8")
    seen: set[int] = set()
    for kind, node, born, end in sorted(recording.lives, key=lambda life: life[2]):
        y, color = top + (node - 1) * row, FORWARD
        if kind == "backward":
            y, color = y + row / 2, BACKWARD
        drawing.rect(LEFT + born * x, y, (end - born) * x, row / 2, color)
        if kind == "forward":
            if node in seen:
                drawing.rect(LEFT + born * x, y, x, row / 2, AGAIN)
            seen.add(node)


def _curve(drawing: svg.Drawing, recording: Any, moment: int, top: float, height: float, x: float) -> None:
    """How many values are alive at each moment, in steps: gradients on top of the forward pass's."""
    counts = recording.counts.tolist()
    stored = [sum(pair) for pair in counts]
    highest = max(stored)
    scale = height / (highest * 1.2)
    base = top + height
    for tick in range(0, highest + 1, max(1, int(svg.nice_step(highest, 4)))):
        drawing.line(LEFT, base - tick * scale, LEFT + WIDTH, base - tick * scale, svg.GRID)
        drawing.text(LEFT - 8, base - tick * scale + 4, str(tick), size=11, anchor="end", fill=svg.MUTED)
    drawing.text(20, top + 10, tr(ko="저장된 값", en="stored"), size=11, fill=svg.MUTED)
    for part, color in ((lambda pair: sum(pair), BACKWARD), (lambda pair: pair[0], FORWARD)):
        points = [(LEFT, base)]
        for i, pair in enumerate(counts):
            level = base - part(pair) * scale
            if abs(points[-1][1] - level) > 1e-9:
                points += [(LEFT + i * x, points[-1][1]), (LEFT + i * x, level)]
        drawing.polygon([*points, (LEFT + WIDTH, points[-1][1]), (LEFT + WIDTH, base)], color)
    at = stored.index(highest)
    label = tr(ko=f"최대 {highest}", en=f"peak {highest}")
    shift, anchor = (-6, "end") if at > 0.85 * len(stored) else (6, "start")
    drawing.text(LEFT + (at + 0.5) * x + shift, base - highest * scale - 5, label, size=12, anchor=anchor, bold=True)
    drawing.text(LEFT + WIDTH, base + 16, tr(ko="계산하는 순서 →", en="order →"), size=11, anchor="end", fill=svg.MUTED)


def _legend(drawing: svg.Drawing, y: float) -> None:
    entries = [
        (FORWARD, tr(ko="살아 있는 순전파 값", en="value alive")),
        (BACKWARD, tr(ko="살아 있는 그레이디언트", en="gradient alive")),
        (AGAIN, tr(ko="다시 계산", en="computed again")),
    ]
    for i, (color, text) in enumerate(entries):
        x = LEFT + i * 200
        drawing.rect(x, y - 10, 11, 11, color)
        drawing.text(x + 17, y, text, size=12)
