"""The caching allocator's memory at one moment: blocks and holes, segment after segment, in rows like a text."""

from __future__ import annotations

import numpy as np

from ..language import tr
from ..trace.film import Film, Frame
from ..trace.timeline import CATEGORIES
from ..trace.trace import Trace
from ..units import MiB, human_bytes
from . import svg
from .labels import category_label, phase_label
from .report import COLORS

ROW_BYTES = 512 * MiB
WIDTH, ROW, GAP = 352, 8, 3  # of one memory, and of a row, in pixels
TOP = 116  # where the memories begin
SCALE_BYTES = 512 * MiB  # the longest bar among the sizes
HOLES = "#F9D2BC"
_FILLS = [*(COLORS[name] for name in CATEGORIES), HOLES]


def draw_films(films: dict[str, Film], moment: int) -> svg.Drawing:
    """The memories of films of one trace, by their titles, side by side at one moment."""
    frames = {title: film.at(moment) for title, film in films.items()}
    most = max(max(film.capacity_bytes or 0, frames[title].reserved) for title, film in films.items())
    height = -(-most // ROW_BYTES) * (ROW + GAP)
    said = "; ".join(f"{title}: {_said(film, frames[title], moment)}" for title, film in films.items())
    drawing = svg.Drawing(20 + len(films) * (WIDTH + 20), TOP + height + 58, said)
    for number, (title, film) in enumerate(films.items()):
        left = 20 + number * (WIDTH + 20)
        drawing.text(left, 28, title, size=14, bold=True)
        text, fill = _said(film, frames[title], moment), svg.RED if _is_over(film, moment) else svg.INK
        drawing.text(left, 48, text, size=svg.fit_size(text, WIDTH, 12), fill=fill)
        _draw_sizes(drawing, film, moment, left)
        _draw_memory(drawing, film, frames[title], left)
    for number, (name, fill) in enumerate(_legend()):
        x, y = 20 + number % 3 * 250, TOP + height + 22 + number // 3 * 20
        drawing.rect(x, y - 10, 11, 11, fill)
        drawing.text(x + 17, y, name, size=12)
    return drawing


def happening(trace: Trace, moment: int) -> str:
    """What the last entry before the moment was: its phase, and what was asked for or given back."""
    span = int(trace.span[moment - 1])
    phase = f"{span // 2 + 1}. {phase_label(trace.names[span // 2])}" if span % 2 else "-"
    size = human_bytes(int(trace.nbytes[moment - 1]))
    if trace.allocates[moment - 1]:
        return tr(ko=f"{phase}, {size} 요청", en=f"{phase}, {size} asked for")
    return tr(ko=f"{phase}, {size} 반환", en=f"{phase}, {size} given back")


def _is_over(film: Film, moment: int) -> bool:
    return film.failed is not None and moment >= film.end


def _said(film: Film, frame: Frame, moment: int) -> str:
    reserved, holes, count = human_bytes(frame.reserved), human_bytes(frame.holes.sum()), f"{len(frame.segments):,}"
    text = tr(
        ko=f"예약 {reserved}(세그먼트 {count}개), 빈자리의 합 {holes}",
        en=f"{reserved} reserved ({count} segments), {holes} of it in holes",
    )
    return f"OOM. {text}" if _is_over(film, moment) else text


def _draw_sizes(drawing: svg.Drawing, film: Film, moment: int, left: float) -> None:
    """What was asked for, and the room that there was for it, drawn to one scale."""
    entry = min(moment, film.end) - 1
    frame = film.at(moment if _is_over(film, moment) else entry)
    asked = int(film.trace.nbytes[entry]) if film.trace.allocates[entry] else 0
    rows = [
        (tr(ko="요청", en="asked for"), asked, svg.RED if _is_over(film, moment) else svg.INK),
        (tr(ko="가장 큰 빈자리", en="largest hole"), frame.largest_hole, HOLES),
    ]
    if film.capacity_bytes is not None:
        rows.append((tr(ko="드라이버에 남은 것", en="driver has left"), film.capacity_bytes - frame.reserved, svg.GRID))
    for number, (name, nbytes, fill) in enumerate(rows):
        y, width = 68 + 17 * number, nbytes / SCALE_BYTES * (WIDTH - 192)
        drawing.text(left + 110, y, name, size=12, anchor="end", fill=svg.MUTED)
        drawing.text(left + 184, y, human_bytes(nbytes) if nbytes else "-", size=12, anchor="end")
        drawing.rect(left + 192, y - 9, min(width, WIDTH - 192), 9, fill)
        if width > WIDTH - 192:  # it is longer
            drawing.text(left + WIDTH - 4, y - 1, "…", size=12, anchor="end")


def _draw_memory(drawing: svg.Drawing, film: Film, frame: Frame, left: int) -> None:
    if film.capacity_bytes is not None:
        rows = enumerate(range(0, film.capacity_bytes, ROW_BYTES))
        boxes = [(row, min(film.capacity_bytes - start, ROW_BYTES) * WIDTH // ROW_BYTES) for row, start in rows]
        outline = "".join(_box(left, TOP + row * (ROW + GAP), width) for row, width in boxes)
        drawing.path(outline, "none", stroke=svg.GRID)
    # A pixel has the colour of the piece that lies at its centre.
    pixels = frame.reserved * WIDTH // ROW_BYTES
    places = np.arange(pixels)
    centres = (places + 0.5) * ROW_BYTES / WIDTH
    colours = frame.category[np.searchsorted(frame.nbytes.cumsum(), centres, side="right")]
    row = places // WIDTH
    begins = np.append(True, (np.diff(colours) != 0) | (np.diff(row) != 0))[:pixels]
    starts = np.flatnonzero(begins)
    runs = zip(*(column.tolist() for column in (
        colours[starts], left + starts % WIDTH, TOP + row[starts] * (ROW + GAP), np.diff(np.append(starts, pixels))
    )), strict=True)  # fmt: skip
    paths: dict[int, list[str]] = {}
    for colour, x, y, width in runs:
        paths.setdefault(colour, []).append(_box(x, y, width))
    for colour, parts in sorted(paths.items()):
        drawing.path("".join(parts), _FILLS[colour])
    # Where a segment ends, if it is not too small to see.
    edges = np.unique(frame.segments.cumsum()[frame.segments > 3 * ROW_BYTES // WIDTH] * WIDTH // ROW_BYTES)
    lines = (f"M{left + x % WIDTH} {TOP + x // WIDTH * (ROW + GAP)}v{ROW}" for x in edges[edges < pixels].tolist())
    drawing.path("".join(lines), "none", stroke=svg.PAPER)


def _box(x: int, y: int, width: int) -> str:
    return f"M{x} {y}h{width}v{ROW}h-{width}z"


def _legend() -> list[tuple[str, str]]:
    named = [(category_label(name), COLORS[name]) for name in CATEGORIES]
    return [*named, (tr(ko="빈자리(예약했지만 비어 있다)", en="holes (reserved, and free)"), HOLES)]
