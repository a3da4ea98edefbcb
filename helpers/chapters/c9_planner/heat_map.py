"""Model × GPU as a heat map: of what was computed (docs/answers.json), the largest way to train that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from virtual_gpu.cards import CATALOG
from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.models.configs import architectures
from virtual_gpu.plan.recipes import METHODS, method_label
from virtual_gpu.units import GiB

from ...hand import answer_to_hands, pressable

TARGET = Path(__file__).resolve().parents[3] / "docs" / "answers.json"  # written by tools/answers.py
SHOWN, BATCH = 512, 16  # tokens and samples
LETTERS = {"full": "F", "lora": "L", "qlora": "Q", None: "–"}
COLOURS = {"full": svg.BLUE, "lora": svg.GREEN, "qlora": svg.ORANGE, None: svg.GRID}
Row = dict[str, Any]


def stored() -> list[Row]:
    """Every answer that was computed: model, card, length, method; plan, needed_bytes and card_bytes where one fits."""
    return json.loads(TARGET.read_text(encoding="utf-8"))


def short(model: str) -> str:
    """The model's name without its maker's."""
    return model.rpartition("/")[2]


def described(rows: list[Row]) -> str:
    """The heat map in words."""
    shown = [row for row in rows if row["length"] == SHOWN]
    counts = {method: sum(row["method"] == method for row in shown) for method in (*METHODS, None)}
    return ", ".join(
        tr(ko=f"{_label(method)} {count}칸", en=f"{_label(method)}: {count}") for method, count in counts.items()
    )


def heat_map(rows: list[Row], to: tuple[str, str] | None = None) -> svg.Drawing:
    """Model × card at SHOWN tokens: the largest method that fits, by colour and by letter.

    A cell is a link to its row of docs/answers.md; or, with the CSS classes `to` of a panel's fields for model and
    card, it writes there what it stands for.
    """
    found = {(row["model"], row["card"]): row for row in rows if row["length"] == SHOWN}
    models = [model for model in architectures() if any(model == known for known, _ in found)]
    cards = sorted({card for _, card in found}, key=lambda name: CATALOG[name].capacity_bytes)
    left, top, wide, high = 150, 128, 58, 30
    title = tr(
        ko=f"무엇이 들어가나: 길이 {SHOWN}, 배치 {BATCH}, GPU 한 장",
        en=f"What fits: length {SHOWN}, batch {BATCH}, one GPU",
    )
    drawing = svg.Drawing(760, top + high * len(models) + 24, f"{title}. {described(rows)}")
    drawing.text(20, 30, title, size=16, bold=True)
    _legend(drawing)
    for column, card in enumerate(cards):
        words = card.split(" ", 1) if " " in card else card.split("-", 1)
        for line, word in enumerate(words[-1].split(" ") if len(words) == 1 else [words[0], *words[1].split(" ")]):
            drawing.text(left + wide * (column + 0.5), 84 + 13 * line, word, size=11, anchor="middle")
    for line, model in enumerate(models):
        y = top + high * line
        drawing.text(left - 8, y + 19, short(model), size=svg.fit_size(short(model), left - 28, 12), anchor="end")
        drawing.open("g", role="group", aria_label=model)
        known = [(column, found[model, card]) for column, card in enumerate(cards) if (model, card) in found]
        for column, row in known:
            tag, attributes = _answering(row, to, first=column == known[0][0])
            drawing.open(tag, **attributes, aria_label=_told(row))
            drawing.raw(f"<title>{_told(row)}</title>")
            _cell(drawing, left + wide * column, y, wide, high, row["method"])
            drawing.close(tag)
        drawing.close("g")
    if to is None:
        drawing.role = "group"
    else:
        answer_to_hands(drawing)
    return drawing


def _answering(row: Row, to: tuple[str, str] | None, first: bool) -> tuple[str, dict[str, object]]:
    model, card = row["model"], row["card"]
    if to is not None:
        return "g", pressable(f"{model} {card}", to, [model, card], first)
    return "a", {"href": "#" + urlencode({"model": short(model), "gpu": card, "length": SHOWN})}


def _told(row: Row) -> str:
    head = f"{short(row['model'])}, {row['card']}: "
    if row["method"] is None:
        return head + _label(None)
    return f"{head}{row['plan']}, {row['needed_bytes'] / GiB:.2f} GiB"


def _label(method: str | None) -> str:
    return method_label(method) if method else tr(ko="들어가는 것 없음", en="nothing fits")


def _legend(drawing: svg.Drawing) -> None:
    x = 20.0
    for method in (*METHODS, None):
        _cell(drawing, x, 44, 22, 20, method)
        drawing.text(x + 28, 58, _label(method), size=12)
        x += 44 + svg.text_width(_label(method), 12)


def _cell(drawing: svg.Drawing, x: float, y: float, wide: float, high: float, method: str | None) -> None:
    colour = COLOURS[method]
    drawing.rect(x + 1, y + 1, wide - 2, high - 2, colour)
    drawing.text(x + wide / 2, y + high / 2 + 5, LETTERS[method], anchor="middle", fill=svg.ink_on(colour), bold=True)
