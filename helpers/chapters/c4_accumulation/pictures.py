"""The drawings of chapter 4: gradients that add up, and losses over the samples seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr

COLORS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.SKY, svg.RED)


def draw_gradients(parts: Sequence[Sequence[float]], whole: Sequence[float]) -> svg.Drawing:
    """parts: for each micro-batch its share of some components of the gradient; whole: those of the one big batch.

    The shares are stacked, positive ones upward and negative ones downward; a dot marks their sum, a line the whole.
    """
    names = [tr(ko=f"마이크로 배치 {i}", en=f"micro-batch {i}") for i in range(1, len(parts) + 1)]  # one colour each
    drawing = svg.Drawing(
        760,
        350,
        tr(
            ko=f"마이크로 배치 {len(parts)}개의 그레이디언트를 더하면 큰 배치의 그레이디언트가 된다",
            en=f"the gradients of {len(parts)} micro-batches add up to that of the big batch",
        ),
    )
    drawing.text(20, 28, drawing.alt, 15, bold=True)
    left, top, width, height = 40, 84, 690, 220
    up = max(sum(max(part[k], 0) for part in parts) for k in range(len(whole)))
    down = max(sum(max(-part[k], 0) for part in parts) for k in range(len(whole)))
    scale, column = height / (up + down), width / len(whole)
    zero = top + up * scale
    for i, name in enumerate(names):
        drawing.rect(left + 150 * i, 46, 12, 12, COLORS[i % len(COLORS)])
        drawing.text(left + 150 * i + 18, 57, name, 12)
    drawing.line(left, zero, left + width, zero, svg.MUTED)
    for k, value in enumerate(whole):
        x, above, below = left + column * (k + 0.5), zero, zero
        for i, part in enumerate(parts):
            size = abs(part[k]) * scale
            if part[k] >= 0:
                above -= size
            drawing.rect(x - 18, above if part[k] >= 0 else below, 36, size, COLORS[i % len(COLORS)])
            if part[k] < 0:
                below += size
        drawing.circle(x, zero - sum(part[k] for part in parts) * scale, 4, svg.INK)
        y = zero - value * scale
        drawing.line(x - 26, y, x + 26, y, svg.INK, stroke_width=2)
        drawing.text(x, top + height + 20, str(k + 1), 11, anchor="middle", fill=svg.MUTED)
    note = tr(
        ko="가로줄: 큰 배치의 그레이디언트. 점: 쌓은 것의 합. 아래는 그레이디언트의 성분 번호",
        en="line: gradient of the big batch; dot: sum of what is stacked; below: which component",
    )
    drawing.text(left, top + height + 40, note, 12, fill=svg.MUTED)
    return drawing


def draw_losses(runs: Mapping[str, tuple[int, Sequence[float]]]) -> svg.Drawing:
    """name → (samples per optimizer step, the loss of every optimizer step): losses over the samples seen."""
    title = tr(ko="학습한 샘플 수와 손실", en="loss over the samples seen")
    alt = "; ".join(f"{name}: {len(losses)}, {losses[-1]:.3f}" for name, (_, losses) in runs.items())
    drawing = svg.Drawing(760, 350, f"{title}. {alt}")
    drawing.text(20, 28, title, 15, bold=True)
    left, top, width, height = 60, 50, 670, 220
    samples = max(count * len(losses) for count, losses in runs.values())
    highest = max(max(losses) for _, losses in runs.values()) * 1.05
    step = svg.nice_step(highest)
    for i in range(int(highest / step) + 1):
        y = top + height * (1 - i * step / highest)
        drawing.line(left, y, left + width, y, svg.GRID)
        drawing.text(left - 6, y + 4, f"{i * step:.0f}", 11, anchor="end", fill=svg.MUTED)
    every = svg.nice_step(samples)
    for i in range(int(samples / every) + 1):
        x = left + width * i * every / samples
        drawing.text(x, top + height + 18, f"{i * every:.0f}", 11, anchor="middle", fill=svg.MUTED)
    caption = tr(ko="샘플 →", en="samples →")
    drawing.text(left + width, top + height + 38, caption, 12, anchor="end", fill=svg.MUTED)
    for i, (name, (count, losses)) in enumerate(runs.items()):
        colour = COLORS[i % len(COLORS)]
        points = [(left + width * k * count / samples, top + height * (1 - v / highest)) for k, v in enumerate(losses)]
        if i == 1:  # it lies on the first: dots on a line
            for x, y in points[::2]:
                drawing.circle(x, y, 3.5, colour)
        else:
            drawing.polyline(points, colour, stroke_width=2)
        drawing.line(left + 200 * i, top + height + 60, left + 200 * i + 18, top + height + 60, colour, stroke_width=3)
        drawing.text(left + 200 * i + 24, top + height + 64, name, 12)
    return drawing
