"""The planner's tables and its picture."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..drawing import svg
from ..drawing.labels import html_table
from ..drawing.report import COLORS
from ..language import tr
from ..models.kept import counts
from ..room import TIGHT
from ..step.setting import fused_head_label, reference_label, rest_label
from ..units import human_bytes
from .engine import engine_label
from .plans import Plan, kind_label
from .recipes import Recipe, cpu_offload_label, method_label

if TYPE_CHECKING:
    from .search import Plans

KIND_COLORS = {**COLORS, "gathered": svg.SKY, "engine": svg.YELLOW, "fragmentation": svg.GRID}


def seconds_label(seconds: float | None) -> str:
    """Seconds with three digits."""
    return "-" if not seconds else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def extra_label(plan: Plan) -> str:
    """The extra work in FLOPs and beside the same method where nothing is computed twice."""
    if not plan.extra_flops:
        return "0"
    return f"{plan.extra_flops / 1e12:,.0f} TFLOP (+{plan.extra_flops / plan.least_flops:.0%})"


def row_of(plan: Plan, sharded: bool, fused: bool, offloaded: bool) -> list[str]:
    """The plan's cells, without its rank.

    sharded, fused, offloaded: whether several GPUs, the head and what goes to the CPU have columns.
    """
    recipe = plan.recipe
    method = method_label(recipe.method) + ("" if recipe.rest_in_fp32 else f" · {rest_label()}")
    method += "" if recipe.reference == "same" else f" · {reference_label(recipe.reference)}"
    method += f" · {cpu_offload_label()}" if recipe.cpu_offload else ""
    cells = [method, recipe.precision + (" ⚠" if recipe.caution else ""), recipe.optimizer]
    cells[0] += f" · {engine_label(recipe.vllm)}" if recipe.vllm else ""
    if sharded:
        split = [f"ZeRO-{recipe.stage}" if recipe.stage else "DDP"] * (not recipe.spread)
        cells.append(" · ".join([*split, *recipe.mesh]))
    return [
        *cells,
        f"{plan.micro_batch} × {plan.accumulation}",
        checkpointing_switch(recipe),
        *([_switch(recipe.fused_lm_head)] if fused else []),
        human_bytes(plan.needed_bytes),
        human_bytes(plan.left_bytes),
        extra_label(plan),
        *([human_bytes(plan.sent_bytes)] if sharded else []),
        *([human_bytes(plan.to_cpu_bytes) if plan.to_cpu_bytes else "-"] if offloaded else []),
        seconds_label(plan.seconds),
    ]


def checkpointing_switch(recipe: Recipe) -> str:
    """On or off, how many results blocks keep all the same, and whether their inputs are on the CPU."""
    here, away = counts(recipe.kept)
    how = [tr(ko=f"{here}가지 남김", en=f"keeps {here}")] if here else []
    how += [tr(ko=f"{away}가지 CPU로", en=f"{away} to the CPU")] if away else []
    how += [tr(ko="오프로드", en="offloaded")] if recipe.offload else []
    if not how:
        return _switch(recipe.checkpointing)
    return tr(ko="켬", en="on ") + f"({', '.join(how)})"


def _switch(on: bool) -> str:
    return tr(ko="켬", en="on") if on else tr(ko="끔", en="off")


def heads_of(sharded: bool, fused: bool, offloaded: bool) -> list[str]:
    """The heads of `row_of`."""
    return [
        tr(ko="방법", en="method"),
        tr(ko="정밀도", en="precision"),
        tr(ko="옵티마이저", en="optimizer"),
        *([tr(ko="나누기", en="sharding")] if sharded else []),
        tr(ko="마이크로 배치 × 누적", en="micro-batch × accumulation"),
        tr(ko="체크포인팅", en="checkpointing"),
        *([fused_head_label()] if fused else []),
        tr(ko="필요한 메모리", en="memory it needs"),
        tr(ko="남는 메모리", en="left"),
        tr(ko="추가 연산", en="extra work"),
        *([tr(ko="보내는 양", en="sent")] if sharded else []),
        *([tr(ko="CPU로 보내는 양", en="sent to the CPU")] if offloaded else []),
        tr(ko="스텝 시간의 하한", en="lower bound on a step"),
    ]


def plans_html(plans: Plans) -> str:
    """The verdict over `table_html`."""
    caution = f"<p>⚠ {escape(plans.request.caution)}</p>" if plans.request.caution else ""
    return f"<p><b>{escape(plans.verdict)}</b></p>" + table_html(plans) + caution


def table_html(plans: Plans) -> str:
    """The ranked table; when nothing fits, what would."""
    if not plans.plans:
        items = "".join(f"<li>{escape(str(change))}</li>" for change in plans.changes)
        none = tr(ko="하나만 바꾸어서는 들어가지 않는다.", en="No single change makes room.")
        head = tr(ko="하나만 바꾼다면", en="One change that makes room")
        return f"<p>{escape(head)}:</p><ul>{items}</ul>" if items else f"<p>{escape(none)}</p>"
    found = [plan.recipe for plan in plans.plans]
    to_cpu = any(plan.to_cpu_bytes for plan in plans.plans)
    columns = plans.request.gpus > 1, any(one.fused_lm_head for one in found), to_cpu
    rows = []
    for i, plan in enumerate(plans.plans):
        why = tr(ko="← 고른다", en="← choose") if not i else plan.why_after(plans.plans[i - 1])
        rows.append([str(i + 1), *row_of(plan, *columns), why])
    table = html_table(["#", *heads_of(*columns), tr(ko="바로 위 계획에 밀린 까닭", en="worse than above in")], rows)
    cautions = dict.fromkeys(plan.recipe.caution for plan in plans.plans if plan.recipe.caution)
    return table + "".join(f"<p>⚠ {escape(text)}</p>" for text in cautions)


class Losers:
    """Why each loser loses, as tables: larger micro-batches, recipes that do not fit, what was not run."""

    def __init__(self, plans: Plans):
        self.plans = plans

    def rows(self) -> list[tuple[str, str]]:
        """(what, why) of everything that is not in the ranking."""
        return [
            *((f"{miss.title}", too_much(miss)) for miss in self.plans.refused.values()),
            *((plan.title, too_much(plan)) for plan in self.plans.losers),
            *self.plans.skipped,
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{what}: {why}" for what, why in self.rows())

    def _repr_html_(self) -> str:
        return html_table([tr(ko="탈락한 것", en="loser"), tr(ko="까닭", en="why")], [list(row) for row in self.rows()])


def too_much(plan: Plan) -> str:
    """By how much a plan does not fit, and what takes most."""
    limit = plan.request.limit_bytes
    need, over = human_bytes(plan.needed_bytes), human_bytes(plan.needed_bytes - limit)
    if plan.at_least:
        return tr(
            ko=f"파라미터, 그레이디언트, 옵티마이저 상태만 {need}라 배치를 줄이거나 체크포인팅을 켜도 소용없다",
            en=f"parameters, gradients and optimizer state alone are {need}, whatever the batch",
        )
    kind = max(plan.at_peak, key=plan.at_peak.__getitem__)
    most = f"{kind_label(kind)} {human_bytes(plan.at_peak[kind])}"
    if plan.verdict == TIGHT:
        line = plan.request.room.line(plan.needed_bytes)
        return tr(ko=f"{need}. 빠듯하다: {line}", en=f"{need}: tight, {line}")
    return tr(ko=f"{need}. {over} 넘친다. 가장 큰 것: {most}", en=f"{need}: {over} too much; most is {most}")


def draw_plans(plans: Plans) -> svg.Drawing:
    """Every recipe at its peak, by kind; the red line is the capacity, the dashed one what fits for certain."""
    shown = [*plans.plans, *plans.losers]
    capacity = plans.request.spec.capacity_bytes
    largest = min(max([plan.needed_bytes for plan in shown] + [capacity]) * 1.02, capacity * 2)
    kinds = [kind for kind in KIND_COLORS if any(plan.at_peak.get(kind) for plan in shown)]
    places = _legend_places([kind_label(kind) for kind in kinds])
    left, width, top, row = 20, 720, 96 + places[-1][1] - places[0][1], 46
    alt = "; ".join([plans.verdict, *(f"{plan.title} {human_bytes(plan.needed_bytes)}" for plan in shown)])
    drawing = svg.Drawing(760, top + row * len(shown) + 24, alt)
    title = plans.verdict if plans.plans else plans.request.title
    drawing.text(20, 28, title, svg.fit_size(title, 720, 15), bold=True)
    for kind, (x, y) in zip(kinds, places, strict=True):
        drawing.rect(x, y, 12, 12, KIND_COLORS[kind])
        drawing.text(x + 17, y + 10, kind_label(kind), 12)
    scale = width / largest
    for i, plan in enumerate(shown):
        y = top + row * i
        mark = f"{i + 1}. " if plan.fits else "× "
        drawing.text(left, y, mark + plan.title, 12, bold=not i and plan.fits, fill=svg.INK if plan.fits else svg.MUTED)
        x = left
        for kind in kinds:
            size = min(plan.at_peak.get(kind, 0) * scale, left + width - x)
            drawing.rect(x, y + 6, size, 18, KIND_COLORS[kind], opacity=None if plan.fits else 0.55, stroke=svg.PAPER)
            x += size
        if plan.needed_bytes > largest:
            _break_mark(drawing, left + width - 26, y + 6)
        total = plan.needed + (" →" if plan.needed_bytes > largest else "")
        drawing.text(left + width, y, total, 12, anchor="end", fill=svg.INK if plan.fits else svg.RED)
    # Each plan's own: of GPUs that share their work, and beside an engine, other limits hold.
    limits = [plan.request.limit_bytes for plan in shown]
    for sizes, dashes in ((limits, "4 3"), ([capacity] * len(shown), None)):
        ticks = dict.fromkeys(sizes) if len({*sizes}) == 1 else ()
        for place in (left + size * scale for size in ticks):
            drawing.line(place, top - 16, place, top - 12, svg.RED, stroke_width=1.5)
        for i, size in enumerate(sizes):  # across the bars, not across their names
            y, place = top + row * i, left + size * scale
            drawing.line(place, y + 3, place, y + 27, svg.RED, stroke_width=1.5, stroke_dasharray=dashes)
    sure = human_bytes(limits[0]) if len({*limits}) == 1 else f"{human_bytes(min(limits))}~{human_bytes(max(limits))}"
    drawing.text(
        left + capacity * scale,
        top - 22,
        tr(
            ko=f"{plans.request.gpu}의 한도 {human_bytes(capacity)} (점선: 판정 한도 {sure})",
            en=f"{plans.request.gpu}: {human_bytes(capacity)} (dashed: {sure}, which fits for certain)",
        ),
        12,
        anchor="middle" if 150 < capacity * scale < width - 130 else "end",
        fill=svg.RED,
    )
    return drawing


def _break_mark(drawing: svg.Drawing, x: float, y: float) -> None:
    """Two slanted gaps in a bar that is longer than the sheet."""
    for shift in (0, 9):
        drawing.line(x + shift, y + 20, x + shift + 7, y - 2, svg.PAPER, stroke_width=4)


def _legend_places(labels: list[str]) -> list[tuple[float, int]]:
    """Where the labels of a legend stand on the sheet, line by line."""
    places, x, y = [], 20.0, 44
    for label in labels:
        wide = 30 + svg.text_width(label, 12)
        if x + wide > 750:
            x, y = 20.0, y + 18
        places.append((x, y))
        x += wide
    return places
