"""The shapes of late deaths: what is held, the most of each step and what is reserved, over steps that were run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

import virtual_gpu
from virtual_gpu.language import tr
from virtual_gpu.units import GiB, human_bytes

from ...charts import COLORS, Chart
from ...gpu import allocator_set_to
from ...rows import LeftRows
from .blocks import line_of
from .growth import small_gpt

BATCH = 16
SMALL = "5.6GiB, 7.5"  # of a 6 GB card, about what PyTorch may have
EXPANDABLE = "expandable_segments:True"


@dataclass
class Shape:
    """Bytes after each step, at most in it, and reserved after it; limit: the card's.

    wanted: where it died in the last step, what was alive then with what was asked for; message: the error's.
    """

    limit: int
    held: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    wanted: int | None = None
    message: str = ""


def varied_lengths(seed: int = 0, longest: int = 512, multiple: int = 1) -> list[int]:
    """The lengths of sixteen batches, from 32 to `longest`, rounded up to a multiple."""
    drawn = random.Random(seed)
    return [-(-min(drawn.randint(32, 512), longest) // multiple) * multiple for _ in range(BATCH)]


def shape_of(
    gpu: str,
    lengths: Sequence[int],
    keep: bool = False,
    empty: bool = False,
    settings: str | None = None,
    limited: bool = True,
) -> Shape:
    """Steps of a small GPT-2 with batches of these lengths on a card, up to its death.

    keep: their logits stay; empty: empty_cache() after each; settings: PYTORCH_ALLOC_CONF, as it is by default.
    """
    kept: list[Any] = []
    with allocator_set_to(settings), virtual_gpu.cuda(gpu, limited=limited) as card:
        shape = Shape(card.capacity_bytes)
        model = small_gpt().cuda()
        for length in lengths:
            torch.cuda.reset_peak_memory_stats()
            try:
                _step(model, length, kept.append if keep else None)
            except torch.OutOfMemoryError as error:  # which holds what was alive
                shape.wanted, shape.message = torch.cuda.memory_allocated() + card.last_oom["bytes"], str(error)
            if empty:
                torch.cuda.empty_cache()
            shape.held.append(torch.cuda.memory_allocated())
            shape.most.append(torch.cuda.max_memory_allocated())
            shape.reserved.append(torch.cuda.memory_reserved())
            if shape.wanted:
                break
    return shape


def _step(model: torch.nn.Module, length: int, keep: Callable[[Any], None] | None) -> None:
    tokens = torch.zeros(BATCH, length, dtype=torch.long, device="cuda")
    output = model(input_ids=tokens, labels=tokens)
    loss, logits = output.loss, output.logits if keep else None
    del output
    loss.backward()
    model.zero_grad()
    if keep:
        keep(logits)


def rooms(cards: Sequence[str] = ("8GiB, 7.5", SMALL)) -> LeftRows:
    """Sixteen batches of varied lengths, as they are and with three cures: what is reserved, which cards hold it."""
    plain, rounded = varied_lengths(), varied_lengths(multiple=64)
    ways: dict[str, tuple[list[int], dict[str, Any]]] = {
        tr(ko="그대로", en="as it is"): (plain, {}),
        EXPANDABLE: (plain, {"settings": EXPANDABLE}),
        tr(ko="스텝마다 empty_cache()", en="empty_cache() each step"): (plain, {"empty": True}),
        "pad_to_multiple_of=64": (rounded, {}),
    }
    rows = []
    for name, (lengths, how) in ways.items():
        free = shape_of("T4", lengths, limited=False, **how)
        row = [name, human_bytes(max(free.most)), human_bytes(free.reserved[-1])]
        for card in cards:
            shape = shape_of(card, lengths, **how)
            died = tr(ko=f"스텝 {len(shape.held)}에서 죽는다", en=f"dies in step {len(shape.held)}")
            row.append(died if shape.wanted else tr(ko="끝까지 간다", en="ends"))
        rows.append(row)
    heads = (
        "",
        tr(ko="텐서의 최대", en="tensors, most"),
        tr(ko="한도 없을 때 마지막 reserved", en="reserved at the end, no limit"),
    )
    return LeftRows((*heads, *(card.split(",")[0].replace("GiB", " GiB") for card in cards)), rows)


def four_shapes() -> dict[str, Shape]:
    """The longest batch, something kept, a cache that stops growing, fragmentation: each run on a card of its own."""
    short = [96, 152, 88, 208, 136, 104, 176, 120, 160, 500]
    return {
        tr(ko="가장 긴 배치", en="longest batch"): shape_of("3.5GiB, 7.5", short),
        tr(ko="붙들고 있다", en="something is kept"): shape_of("3.9GiB, 7.5", [96] * 20, keep=True),
        tr(ko="캐시", en="cache"): shape_of("6.6GiB, 7.5", varied_lengths()),
        tr(ko="단편화", en="fragmentation"): shape_of("5.8GiB, 7.5", varied_lengths(5)),
    }


def shapes_chart(shapes: Mapping[str, Shape]) -> Chart:
    """Name → shape, side by side; the card's limit is a red line, a cross: what a dying step wanted."""
    names = (
        tr(ko="스텝 뒤 allocated", en="allocated after the step"),
        tr(ko="그 스텝의 최대", en="most in the step"),
        "reserved",
    )
    said = "; ".join(
        f"{name}: {human_bytes(one.held[-1])}, {human_bytes(one.most[-1])}, {human_bytes(one.reserved[-1])}"
        + (f", OOM {human_bytes(one.wanted)}" if one.wanted else "")
        for name, one in shapes.items()
    )
    chart = Chart(
        tr(ko="스텝에 따른 네 모양", en="four shapes over the steps"), said, columns=len(shapes), width=880, height=290
    )
    for ax, (name, one) in zip(chart.axes, shapes.items(), strict=True):
        steps = range(1, len(one.held) + 1)
        held = one.held[:-1] if one.wanted else one.held  # the step that died has no "after"
        for line, label, width in ((one.reserved, names[2], 4), (one.most, names[1], 2), (held, names[0], 2)):
            ax.plot(steps[: len(line)], [value / GiB for value in line], "o-", label=label, lw=width, ms=width + 1.5)
        if one.wanted:
            ax.plot([steps[-1]], [one.wanted / GiB], "x", color="#b3400b", ms=12, mew=3)
        ax.axhline(one.limit / GiB, color="#b3400b", lw=1.5)
        ax.set_ylim(0, 7)
        ax.set_title(name, fontsize=13)
        ax.xaxis.get_major_locator().set_params(integer=True)
    chart.axes[0].set_ylabel("GiB")
    handles, labels = chart.axes[0].get_legend_handles_labels()
    chart.figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return chart


def history_chart(snapshot: Mapping[str, Any], least: int = 2**26) -> Chart:
    """What is alive over the events of a snapshot: blocks of `least` bytes or more that stay, each line in a colour."""
    events = [one for one in snapshot["device_traces"][0] if one["action"] in ("alloc", "free_completed")]
    spans, open_ = [], {}
    for at, event in enumerate(events):
        if event["action"] == "alloc":
            open_[event["addr"]] = at, event["size"], line_of(event["frames"])
        elif event["addr"] in open_:
            begun, size, line = open_.pop(event["addr"])
            spans.append((begun, at, size, line))
    stay = sorted((one for one in open_.values() if one[1] >= least), key=lambda one: one[0])
    spans += [(begun, len(events), size, line) for begun, size, line in open_.values() if size < least]
    lines = list(dict.fromkeys(line for _, _, line in stay))
    said = tr(ko=f"끝까지 남는 블록 {len(stay)}개", en=f"{len(stay)} blocks stay to the end")
    chart = Chart(tr(ko="시간에 따라 살아 있는 텐서", en="tensors alive over time"), said, height=340)
    changes, low = [0] * (len(events) + 1), 0
    for begun, size, line in stay:  # none goes, so each lies on those before it
        color = COLORS[lines.index(line) % len(COLORS)]
        bottom, top = [low / GiB] * 2, [(low + size) / GiB] * 2
        chart.ax.fill_between([begun, len(events)], bottom, top, color=color, ec="white", lw=0.8)
        changes[begun] += size
        low += size
    stays = [*accumulate(changes)]
    for begun, ended, size, _ in spans:
        changes[begun] += size
        changes[ended] -= size
    every, bottom, top = range(len(events) + 1), [n / GiB for n in stays], [n / GiB for n in accumulate(changes)]
    chart.ax.fill_between(every, bottom, top, color="#d5dae0", lw=0, step="post")
    grey = tr(ko="지나가는 것과 작은 것", en="what passes, and what is small")
    for line in lines:
        chart.ax.plot([], [], lw=8, color=COLORS[lines.index(line) % len(COLORS)], label=line)
    chart.ax.plot([], [], lw=8, color="#d5dae0", label=grey)
    chart.ax.set_xlabel(tr(ko="할당과 해제의 차례", en="allocations and frees, in their order"))
    chart.ax.set_ylabel("GiB")
    chart.ax.legend(loc="upper left")
    return chart
