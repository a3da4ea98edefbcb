"""What others measured beside what was predicted, as a picture: `python benchmarks/picture.py` writes image/truth*.svg.

Each line is a source, under what was measured; each point a row: predicted over measured, less 1, on a scale that is
even up to 0.01 % and logarithmic beyond. A dashed line says what a margin of 5 % covers; of a line
the point that is farthest off is named where it lies beyond.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT
from benchmarks.summaries import summary
from benchmarks.truth import Judged
from helpers.chapters.c9_planner.measured import kind, kinds
from virtual_gpu.drawing.svg import BLUE, GRID, INK, MUTED, ORANGE, RED, Drawing
from virtual_gpu.language import set_language, tr

EVEN = 1e-4  # up to this error the scale is even
TICKS = (-1, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1)
TOP = 64
NAMED = 0.01
MARGIN = 0.05  # the chapter's, of which a line says what it covers
HOMEWORK = "assignment2-systems"  # Stanford's CS336: what its students measured is one line


class Shape(NamedTuple):
    """A picture's pixels: its width, what is left of the points and right of them, a line's height, where in a line its
    name and its points stand, how many letters of the name, where the second entry of the key begins, and the sizes of
    names and of all that is smaller.
    """

    width: int
    left: int
    right: int
    line: int
    name: float
    points: float
    letters: int
    key: int
    size: int = 14
    small: int = 12


SOURCES = Shape(960, 330, 30, 30, 14, 15, 48, 210, 12, 9)  # two lines of text for each line of points
WIDE = Shape(824, 280, 24, 27, 19, 15, 40, 190)
NARROW = Shape(400, 20, 20, 44, 14, 32, 40, 150, 13, 11)  # for a phone: names above their points
PICTURES = {"truth.svg": ("en", WIDE), "truth_ko.svg": ("ko", WIDE), "truth_ko_narrow.svg": ("ko", NARROW)}


def place(error: float) -> float:
    """Where an error lies between −1 and 1: half a decade for what is below 0.01 %, then a decade for each tenfold."""
    whole = 0.5 + math.log10(1 / EVEN)
    size = min(abs(error), 1.0)
    far = 0.5 * size / EVEN if size <= EVEN else 0.5 + math.log10(size / EVEN)
    return math.copysign(far / whole, error)


def draw(rows: list[Judged], shape: Shape = WIDE) -> Drawing:
    """The picture of judged rows: what was measured, and under it a line for each source."""
    found: dict[str, dict[str, list[Judged]]] = {name: {} for name in kinds()}
    homes: dict[str, set[str]] = {name: set() for name in found}
    for row in sorted(filter(has_error, rows), key=lambda row: row.source):
        which, source = kind(row.source, row.metric), row.source
        if source.endswith(HOMEWORK):
            homes[which].add(source)
            source = HOMEWORK
        found[which].setdefault(source, []).append(row)
    lines: list[tuple[str, str, list[Judged]]] = []
    for which, label in kinds().items():
        if found[which]:
            lines.append((label, "", []))
        for source, group in sorted(found[which].items(), key=lambda part: -len(part[1])):
            count = len(homes[which])
            name = tr(ko=f"CS336 과제, 저장소 {count}곳", en=f"CS336 homework, {count} repositories")
            lines.append((f"{name if source == HOMEWORK else source} ({len(group)})", "", group))
    title = tr(ko="예측은 측정과 얼마나 다른가", en="How far off are the predictions?")
    return draw_lines(title, lines, shape, each=tr(ko="출처", en="source"), margin=MARGIN)


def has_error(row: Judged) -> bool:
    """Whether a row counts and has bytes to compare."""
    return row.counts and row.error is not None


def draw_lines(
    title: str, lines: list[tuple[str, str, list[Judged]]], shape: Shape = SOURCES, each: str = "", margin: float = 0.0
) -> Drawing:
    """A line of points for each (what, where, rows), rows as `has_error` wants them; a heading where there are none.

    each: what a line is. margin: where there is one, a dashed line says what it covers, and only what lies farther off
    is named.
    """
    each = each or tr(ko="프로그램", en="program")
    height = TOP + shape.line * len(lines) + 28 + 2 * shape.small
    count = sum(len(group) for _, _, group in lines)
    alt = tr(
        ko=f"다른 사람들이 잰 {count}개의 값과 예측: {each}마다 한 줄, 값마다 한 점, 가로는 예측이 측정과 다른 비율",
        en=f"{count} values that others measured, and their predictions: a line for each {each}, a point for each "
        "value, across it how far the prediction is off",
    )
    found = Drawing(shape.width, height, alt)
    found.text(16, 28, title, size=17, bold=True)
    low, high = shape.left, shape.width - shape.right
    centre, half = (low + high) / 2, (high - low) / 2
    bottom = TOP + shape.line * len(lines)
    for tick in TICKS:
        x = centre + half * place(tick)
        found.line(x, TOP - 8, x, bottom, stroke=INK if tick == 0 else GRID)
        label = "0" if tick == 0 else f"{tick * 100:+g} %".replace("-", "−")
        if shape.width >= 600 or abs(tick) in (0, 0.001, 0.1):  # narrow: every other one
            found.text(x, bottom + 18, label, size=max(shape.small, 11), anchor="middle", fill=MUTED)
    if margin:
        x = centre + half * place(1 / (1 + margin) - 1)
        found.line(x, TOP - 8, x, bottom, stroke=RED, stroke_width=1.5, stroke_dasharray="5 4")
        words = tr(ko=f"← 여유 {margin:.0%}로도 모자란다", en=f"← short even with a margin of {margin:.0%}")
        found.text(x, TOP - 14, words, size=shape.small, anchor="middle", fill=RED)
    for index, (what, where, group) in enumerate(lines):
        top = TOP + shape.line * index
        y = top + shape.points
        bold = not group
        found.text(16, top + shape.name, _shortened(what, shape.letters), size=shape.size, bold=bold, halo=not where)
        if where:
            found.text(16, top + shape.name + 11, where, size=shape.small, fill=MUTED)
        if not group:
            continue
        for row in sorted(group, key=lambda row: row.grade == "exact"):
            x = centre + half * place(row.error)
            found.circle(x, y, 3.5, BLUE if row.grade == "exact" else ORANGE, fill_opacity=0.6)
        worst = summary(group)
        if abs(worst.worst) > max(NAMED, margin):
            name = worst.worst_id.split("/", 1)[-1]  # the line says whose it is
            while len(name) > (40 if margin else 56) and "/" in name:
                name = name.rsplit("/", 1)[0]
            name = f"{worst.worst:+.1%} {name}".replace("-", "−", 1)
            x = centre + half * place(worst.worst)
            left = worst.worst > 0
            found.text(x, y - 6, name, size=min(shape.small, 10), anchor="end" if left else "start", fill=MUTED)
    y = height - 10
    for x, colour, text in (
        (shape.left, BLUE, tr(ko="입력이 모두 밝혀진 측정", en="every input is stated")),
        (
            shape.left + shape.key,
            ORANGE,
            tr(ko="하나를 모르거나 반올림해 공개한 측정", en="one input is missing, or coarsely printed"),
        ),
    ):
        found.circle(x, y - 4, 4, colour)
        found.text(x + 10, y, text, size=max(shape.small, 11), fill=MUTED)
    return found


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def main() -> None:
    """Draw what `make truth` wrote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("judged", nargs="?", default=ROOT / "benchmarks" / "judged.json", type=Path)
    parser.add_argument("--to", default=ROOT / "image", type=Path, help="a folder")
    args = parser.parse_args()
    rows = [Judged(**row) for row in json.loads(args.judged.read_text(encoding="utf-8"))["rows"]]
    for name, (language, shape) in PICTURES.items():
        set_language(language)
        path = args.to / name
        path.write_text(draw(rows, shape).svg() + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
