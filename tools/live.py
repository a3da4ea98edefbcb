"""The panels of the website: every setting that can be chosen there, computed by the panel itself -> image/live.

    python tools/live.py [PANEL...] [--to FOLDER]

A panel of the website interpolates nothing: it shows what its panel of the course showed at that setting. All of them
take about five minutes of one core: chapters 3, 4, 5, 6, 8 and 9 run training steps on the virtual GPU, and chapter 7
runs its ranks.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ipywidgets as widgets

import helpers
from helpers.chapters.c7_split.panel import pipeline_panel
from helpers.chapters.c7_split.pipeline import SCHEDULES, PipelineRun, pipeline
from helpers.panel import Panel
from helpers.ranks.launcher import run_ranks
from virtual_gpu.language import set_language
from virtual_gpu.terminal import tell

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "image" / "live"
Values = Sequence[Any] | Callable[[Panel], Sequence[Any]]
KINDS = {widgets.Dropdown: "menu", widgets.Checkbox: "check"}  # every other control becomes a slider
COORDINATES = re.compile(r'points="([^"]*)"')
PIECES = re.compile(r"<[^>]*>|[^<]+")


@dataclass(frozen=True)
class Grid:
    """What can be chosen of a panel: control, by its CSS class without the prefix -> values, where needed by the panel.

    The controls in their order here: what can be chosen of one may depend on those before it. shown: the attributes
    of the panel that are its answer. labels: instead of a control's own. opened: makes the panel, where its name alone
    does not.
    """

    panel: str
    values: dict[str, Values]
    shown: tuple[str, ...] = ("picture",)
    labels: dict[str, str] = field(default_factory=dict)
    opened: Callable[[], Panel] | None = None


def _micro_batches(panel: Panel) -> list[int]:
    return [*control_of(panel, "micro").options]


def _moments(panel: Panel) -> range:
    return range(1, control_of(panel, "moment").max + 1)


def _segments(panel: Panel) -> range | list[int]:
    nodes, strategy = control_of(panel, "nodes").value, control_of(panel, "strategy").value
    return range(2, 6) if strategy == "segments" else [4, 5, 6] if nodes < 16 else [4, 6, 8]


def _requests(panel: Panel) -> list[int]:
    """Every so-many-th request of the step, and the one that the panel opens with."""
    last = control_of(panel, "request").max
    return sorted({1, panel.stop, last, *range(1, last, max(last // 40, 1))})


def _from_the_start(panel: Panel) -> range:
    return range(control_of(panel, "moment").max + 1)


def _references(panel: Panel) -> tuple[str, ...]:
    return ("none", "copy", "adapter off") if control_of(panel, "method").value else ("none", "copy")


@cache
def recorded() -> dict[str, list[PipelineRun]]:
    """Chapter 7's schedules as four ranks run them with eight micro-batches."""
    return {schedule: run_ranks(pipeline, 4, schedule, 8) for schedule in SCHEDULES}


CARDS = ("T4", "RTX 3090", "A100-40GB")
POWERS = ("1e-45", "1e-40", "1e-30", "1e-20", "1e-10", "1e-8", "1e-7", "1e-6", "1e-5", "1e-4", "0.001", "0.01")
NUMBERS = (
    "nan", "-inf", "-0.0", *POWERS, "0.1", "1/3", "0.5", "1", "2", "3.14159", "10", "100", "255", "256", "257", "1000",
    "2048", "2049", "10000", "65504", "65520", "70000", "1e6", "1e10", "1e20", "1e30", "3e38", "1e39", "inf",
)  # fmt: skip
GRIDS = (
    Grid("number_panel", {"text": NUMBERS}),
    Grid(
        "quantization_panel",
        {
            "distribution": ("normal", "heavy_tailed", "outliers", "one_sided", "one_outlier"),
            "outlier": ("4", "8", "20", "32"),
            "method": ("absmax", "zero_point", "quantile", "nf4"),
            "bits": ("2", "4", "8"),
            "grouping": ("tensor", "channel", "block"),
            "block": ("16", "64", "256"),
        },
    ),
    Grid("allocator_panel", {"request": _requests}),
    Grid(
        "memory_panel",
        {
            "gpu": CARDS,
            "batch": (1, 4, 16),
            "length": (256, 1024),
            "precision": ("auto", "mixed_fp16"),
            "optimizer": ("adamw", "sgd"),
            "checkpointing": (False, True),
        },
    ),
    Grid(
        "accumulation_panel",
        {"gpu": ("T4", "RTX 3090"), "optimizer": ("adamw", "sgd"), "batch": (4, 16, 64), "micro": _micro_batches},
    ),
    Grid(
        "checkpointing_panel",
        {
            "nodes": (8, 12, 16),
            "strategy": ("everything", "minimum", "segments", "budget"),
            "count": _segments,
            "moment": _moments,
        },
        labels={"count": "구간 수 / 예산"},
    ),
    Grid("checkpointing_memory_panel", {"gpu": CARDS, "batch": (1, 4, 16, 64), "length": (256, 1024)}),
    Grid(
        "zero_panel",
        {
            "model": ("EleutherAI/polyglot-ko-5.8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"),
            "gpu": ("A100-80GB", "H100"),
            "ranks": (1, 4, 8, 16, 64),
            "stage": (0, 1, 2, 3),
            "checkpointing": (False, True),
        },
    ),
    Grid("ring_panel", {"ranks": (2, 3, 4, 6, 8), "moment": _from_the_start}),
    Grid(
        "pipeline_panel",
        {"schedule": SCHEDULES, "moment": _from_the_start},
        opened=lambda: pipeline_panel(recorded()),
    ),
    Grid(
        "lora_panel",
        {
            "gpu": ("T4", "RTX 3090"),
            "method": ("full", "lora", "qlora"),
            "rank": ("8", "64"),
            "targets": ("attention", "all-linear"),
            "batch": (4, 16),
            "checkpointing": (False, True),
        },
    ),
    Grid("doctor_panel", {"example": (1, 2, 3, 4, 5)}),
    Grid(
        "cache_panel",
        {
            "model": (
                "EleutherAI/polyglot-ko-1.3b",
                "meta-llama/Llama-3.2-3B",
                "Qwen/Qwen3-8B",
                "meta-llama/Llama-3.1-8B",
                "microsoft/phi-4",
                "meta-llama/Llama-3.1-70B",
            ),
            "gpu": ("T4", "RTX 4090", "A100-80GB"),
            "weights": ("fp16/bf16", "8 bit", "4 bit"),
            "length": (512, 4096, 16384, 65536, 131072),
            "batch": (1, 4, 16),
            "kind": ("fp16/bf16", "8 bit"),
        },
    ),
    Grid(
        "grpo_panel",
        {
            "model": ("Qwen/Qwen3-0.6B", "EleutherAI/polyglot-ko-1.3b", "Qwen/Qwen3-8B"),
            "gpu": ("T4", "RTX 4090", "A100-80GB"),
            "method": (False, True),
            "reference": _references,
            "engine": ("shared", "copy", "asleep"),
            "fraction": (0.3, 0.5),
            "generations": (8, 16),
            "completion": (512, 2048),
        },
    ),
)


def control_of(panel: Panel, name: str) -> Any:
    """The control of class `prefix-name`."""
    css = f"{panel.prefix}-{name}"
    found = [part for part in _parts(panel) if css in getattr(part, "_dom_classes", ()) and hasattr(part, "value")]
    if len(found) != 1:
        raise LookupError(f"{type(panel).__name__} has {len(found)} controls of class {css}")
    return found[0]


def _parts(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _parts(child)


def shown(panel: Panel, grid: Grid) -> tuple[str, str]:
    """What stands in the panel now: its status and its answer, as HTML."""
    picture = "".join(getattr(panel, name).value for name in grid.shown)
    return panel.status.value, COORDINATES.sub(_rounded, picture)


def _rounded(points: re.Match) -> str:
    """The outline of an area to a tenth of a pixel: half of a picture's bytes are such numbers."""
    return (
        'points="' + re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), points[1]) + '"'
    )


def settings(panel: Panel, grid: Grid, opening: Sequence[Any], chosen: tuple = ()) -> Iterator[tuple]:
    """Take the panel through every setting, a control at a time, and yield each when it is there.

    A control that is disabled changes nothing: it counts as what it was when the panel opened.
    """
    if len(chosen) == len(grid.values):
        yield chosen
        return
    name = list(grid.values)[len(chosen)]
    control, values = control_of(panel, name), grid.values[name]
    if control.disabled:
        yield from settings(panel, grid, opening, (*chosen, opening[len(chosen)]))
        return
    for value in list(values(panel) if callable(values) else values):
        control.value = value
        yield from settings(panel, grid, opening, (*chosen, value))


def open_panel(grid: Grid) -> Panel:
    """The panel as the course opens it, in Korean and on the virtual T4."""
    return (grid.opened or getattr(helpers, grid.panel))()


def collect(grid: Grid) -> dict[str, Any]:
    """Everything that the panel shows, as plain values: pictures as lists of `pieces`, each of which is stored once.

    settings: for each, the place of every control's value, of its status and of its picture. start: the place of the
    setting that the panel opens with, or 0 where it shows nothing then. LookupError: its opening is not in the grid.
    """
    panel = open_panel(grid)
    opening = tuple(control_of(panel, name).value for name in grid.values)
    start = 0 if panel.picture.value == "" else None
    controls = [_plain(panel, grid, name) for name in grid.values]
    pieces, statuses, pictures, found = {}, {}, {}, {}
    for chosen in settings(panel, grid, opening):
        status, picture = shown(panel, grid)
        places = tuple(pieces.setdefault(piece, len(pieces)) for piece in PIECES.findall(picture))
        start = len(found) if chosen == opening else start
        found[chosen] = (
            statuses.setdefault(status, len(statuses)),
            pictures.setdefault(places, len(pictures)),
        )
    if start is None:
        raise LookupError(f"{grid.panel} opens with {opening}, which its grid does not have")
    for control, values in zip(controls, zip(*found, strict=True), strict=True):
        control["values"] = in_order(values)
        control["words"] = [control["words"].get(value, str(value)) for value in control["values"]]
    return {
        "controls": controls,
        "start": start,
        "settings": [
            [*(control["values"].index(value) for control, value in zip(controls, chosen, strict=True)), *places]
            for chosen, places in found.items()
        ],
        "statuses": list(statuses),
        "pictures": list(map(list, pictures)),
        "pieces": list(pieces),
    }


def _plain(panel: Panel, grid: Grid, name: str) -> dict[str, Any]:
    """A control as plain values; words: value → what an option is called."""
    widget = control_of(panel, name)
    kind = next((kind for one, kind in KINDS.items() if isinstance(widget, one)), "slider")
    words = {value: str(word) for word, value in getattr(widget, "_options_full", ())}
    return {"name": name, "label": grid.labels.get(name, widget.description), "kind": kind, "words": words}


def in_order(values: Sequence[Any]) -> list[Any]:
    """Each value once: numbers, also those that are typed into a field, by their size, others as they came."""
    once = list(dict.fromkeys(values))
    try:
        return sorted(once, key=float)
    except ValueError:
        return once


def main(argv: list[str] | None = None) -> int:
    names = [grid.panel for grid in GRIDS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("panels", nargs="*", metavar="PANEL", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--to", type=Path, default=FOLDER, help="the folder (default: image/live)")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.panels) - set(names):
        parser.error(f"no such panel: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    set_language("ko")
    arguments.to.mkdir(parents=True, exist_ok=True)
    for grid in GRIDS:
        if not arguments.panels or grid.panel in arguments.panels:
            tell(f"{grid.panel} … Ctrl+C stops")
            begun = time.process_time()
            data = collect(grid)
            text = json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"
            (arguments.to / f"{grid.panel}.json").write_text(text, encoding="utf-8")
            seconds = time.process_time() - begun
            print(
                f"{grid.panel}: {len(data['settings'])} settings, {len(text) / 1e6:.2f} MB, {seconds:.0f} s", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
