"""Pictures of what ranks hold: ZeRO's stages, one rank at its peak, and memory against the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..language import tr
from ..units import GB, GiB, human_bytes
from . import svg
from .labels import kind_label

if TYPE_CHECKING:
    from ..shards.ledger import ShardLedger
    from ..shards.rank_peak import RankStep

COLORS = {
    "parameters": svg.BLUE,
    "gathered": svg.SKY,
    "gradients": svg.ORANGE,
    "optimizer": svg.GREEN,
    "buckets": svg.GREY,
    "activations": svg.PURPLE,
    "communication": svg.GREY,
}
# ZeRO (arXiv 1910.02054), figure 1 and table 1: 7.5B parameters, 64 GPUs, GB by stage.
PUBLISHED = (120, 31.4, 16.6, 1.88)
STAGE_NAMES = ("DDP", "P_os · ZeroRedundancyOptimizer", "P_os+g · FSDP2", "P_os+g+p · FSDP2")


def draw_stages(ledgers: Sequence[ShardLedger]) -> svg.Drawing:
    """The ZeRO paper's figure 1 from ledgers, one a stage: a bar for each rank that was looked at, in decimal GB."""
    first = ledgers[0]
    widest = max(ledger.largest.total for ledger in ledgers)
    top, bar, gap = 74, 18, 34
    height = top + sum(len(ledger.ranks) * (bar + 4) + gap for ledger in ledgers) + 34
    summary = ", ".join(f"{ledger.layout.stage}: {ledger.largest.total / GB:.2f} GB" for ledger in ledgers)
    title = tr(
        ko=f"{first.model}, GPU {first.layout.ranks}개: 단계마다 GPU 하나가 갖는 것",
        en=f"{first.model} on {first.layout.ranks} GPUs: what one GPU holds, stage by stage",
    )
    drawing = svg.Drawing(760, height, f"{title} ({summary})")
    drawing.text(20, 30, title, size=16, bold=True)
    note = tr(ko="논문의 값(점선)", en="the paper's (dashed)")
    drawing.text(740, 56, note, size=12, anchor="end", fill=svg.MUTED)
    scale = 440 / max(widest, max(PUBLISHED) * GB)
    y = top
    for ledger in ledgers:
        stage = ledger.layout.stage
        drawing.text(20, y, tr(ko=f"{stage}단계", en=f"stage {stage}"), size=13, bold=True)
        drawing.text(76, y, STAGE_NAMES[stage], size=12, fill=svg.MUTED)
        drawing.text(740, y + 24, f"{PUBLISHED[stage]:g} GB", size=13, anchor="end", fill=svg.MUTED)
        y += 8
        published = 100 + PUBLISHED[stage] * GB * scale
        for rank, memory in ledger.ranks.items():
            drawing.text(92, y + 13, f"rank {rank}", size=11, anchor="end", fill=svg.MUTED)
            parts = ("parameters", "gathered", "gradients", "buckets", "optimizer")
            x = drawing.bar(100, y, bar, [(getattr(memory, p) * scale, COLORS[p], kind_label(p)) for p in parts], 11)
            drawing.text(max(x, published) + 8, y + 13, f"{memory.total / GB:.2f} GB", size=12)
            y += bar + 4
        drawing.line(
            published, y - len(ledger.ranks) * (bar + 4) - 3, published, y - 1, svg.INK, stroke_dasharray="4 3"
        )
        y += gap - 8
    parts = [
        part
        for part in ("parameters", "gathered", "gradients", "buckets", "optimizer")
        if part != "buckets" or any(memory.buckets for ledger in ledgers for memory in ledger.ranks.values())
    ]
    _legend(drawing, parts, {}, y, columns=5 if "buckets" in parts else 4, step=144 if "buckets" in parts else 180)
    return drawing


def draw_step(step: RankStep) -> svg.Drawing:
    """One rank at the peak of a step: a bar by part under the GPU's capacity, and what it sends."""
    drawing = svg.Drawing(760, 0, f"{step.title}: {step.verdict}")
    drawing.text(20, 30, step.title, size=svg.fit_size(step.title, 720, 16), bold=True)
    fill = svg.INK if step.fits else svg.RED
    drawing.text(20, 54, step.verdict, size=svg.fit_size(step.verdict, 720, 13), fill=fill, bold=not step.fits)
    scale = 720 / max(step.total, step.capacity_bytes * 1.06)
    drawing.bar(20, 92, 32, [(n * scale, COLORS[part], kind_label(part)) for part, n in step.at_peak.items()])
    limit = 20 + step.capacity_bytes * scale
    drawing.line(limit, 84, limit, 132, svg.RED, stroke_width=2)
    label = f"{step.gpu_name} {human_bytes(step.capacity_bytes)}"
    room = limit - 20 > svg.text_width(label, 12)
    drawing.text(limit + (-4 if room else 4), 82, label, size=12, anchor="end" if room else "start", fill=svg.RED)
    y = _legend(drawing, tuple(step.at_peak), step.at_peak, 158, columns=2, step=360)
    for line in step.notes:
        drawing.text(20, y + 12, line, size=svg.fit_size(line, 720, 12), fill=svg.MUTED)
        y += 20
    drawing.height = int(y) + 10  # however many lines the notes take
    return drawing


def draw_gpus(steps: Sequence[RankStep]) -> svg.Drawing:
    """Memory of one GPU against the number of GPUs, stacked; what does not shrink lies at the bottom."""
    first, last = steps[0], steps[-1]
    left, top, width, height = 62, 92, 678, 250
    highest = min(max(step.total for step in steps) * 1.05, first.capacity_bytes * 2.1)
    order = ("activations", "gathered", "communication", "gradients", "parameters", "optimizer")
    summary = tr(
        ko=f"GPU {first.layout.ranks}개 {human_bytes(first.total)}, {last.layout.ranks}개 {human_bytes(last.total)}",
        en=f"{first.layout.ranks} GPUs {human_bytes(first.total)}, {last.layout.ranks} GPUs {human_bytes(last.total)}",
    )
    title = tr(ko=f"GPU 수와 GPU당 메모리: {first.what}", en=f"Memory of a GPU by their number: {first.what}")
    drawing = svg.Drawing(760, 452, f"{title} ({summary})")
    drawing.text(20, 30, title, size=svg.fit_size(title, 720, 16), bold=True)

    def y_of(nbytes: float) -> float:
        return top + height * (1 - min(nbytes, highest) / highest)

    tick, step_of = 0.0, svg.nice_step(highest / GiB) * GiB
    while tick < highest:
        drawing.line(left, y_of(tick), left + width, y_of(tick), svg.GRID)
        drawing.text(left - 6, y_of(tick) + 4, f"{tick / GiB:g}", size=11, anchor="end", fill=svg.MUTED)
        tick += step_of
    drawing.text(left - 6, top - 8, "GiB", size=11, anchor="end", fill=svg.MUTED)
    column, labels = width / len(steps), []
    for i, step in enumerate(steps):
        x, below = left + column * (i + 0.14), 0.0
        for part in order:
            upper = below + step.at_peak[part]
            size = column * 0.72, y_of(below) - y_of(upper)
            drawing.rect(x, y_of(upper), *size, COLORS[part], stroke=svg.PAPER, stroke_width=0.7)
            below = upper
        labels.append((x + column * 0.36, y_of(below) - 6, f"{step.total / GiB:.0f}"))
        drawing.text(
            x + column * 0.36, top + height + 18, f"{step.layout.ranks:,}", size=11, anchor="middle", fill=svg.MUTED
        )
    drawing.line(left, y_of(first.capacity_bytes), left + width, y_of(first.capacity_bytes), svg.RED, stroke_width=2)
    label = f"{first.gpu_name} {human_bytes(first.capacity_bytes)}"
    drawing.text(left + width, y_of(first.capacity_bytes) - 6, label, size=12, anchor="end", fill=svg.RED)
    floor = y_of(last.floor)
    drawing.line(left, floor, left + width, floor, svg.INK, stroke_dasharray="5 4")
    for x, y, text in labels:
        drawing.rect(x - 12, y - 10, 24, 12, svg.PAPER)
        drawing.text(x, y, text, size=11, anchor="middle", bold=True)
    parts = " + ".join(kind_label(part) for part in order[:3])
    caption = tr(
        ko=f"바닥(점선) {human_bytes(last.floor)} = {parts}", en=f"floor (dashed) {human_bytes(last.floor)}: {parts}"
    )
    drawing.text(20, 54, caption, size=13)
    drawing.text(left + width, top + height + 36, tr(ko="GPU 수", en="GPUs"), size=11, anchor="end", fill=svg.MUTED)
    _legend(drawing, order, {}, top + height + 62, columns=3, step=245)
    return drawing


def _legend(
    drawing: svg.Drawing, parts: Sequence[str], values: dict[str, int], top: float, columns: int, step: int
) -> float:
    for i, part in enumerate(parts):
        x, y = 20 + (i % columns) * step, top + (i // columns) * 22
        drawing.rect(x, y - 10, 11, 11, COLORS[part])
        value = f" {human_bytes(values[part])}" if values else ""
        drawing.text(x + 17, y, kind_label(part) + value, size=12)
    return top + (len(parts) - 1) // columns * 22 + 12
