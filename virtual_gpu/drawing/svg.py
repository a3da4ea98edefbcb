"""Drawing primitives: a picture as SVG text, the same to the byte on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

FONT = "'Noto Sans KR','Apple SD Gothic Neo','Malgun Gothic','NanumGothic',sans-serif"
INK, MUTED, GRID, PAPER = "#1f2933", "#5f6b76", "#d9dee3", "#ffffff"
# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PURPLE, RED, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#9AA5B1",
)  # fmt: skip

RANKS = (BLUE, ORANGE, GREEN, PURPLE)  # one rank after another
# Letters need a contrast of 4.5 (WCAG 2.2, 1.4.3), which RED has not on the sheet and INK not on every colour.
RED_INK, DARK_INK = "#B84E00", "#10161C"


class Drawing:
    """An SVG picture of width × height pixels on a white sheet (readable in a dark theme too); `alt` describes it."""

    def __init__(self, width: int, height: int, alt: str):
        self.width, self.height, self.alt = width, height, alt
        self.role = "img"
        self.attributes: dict[str, str] = {}  # of the picture itself, beside those that it has by `svg`
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **attributes: object) -> None:
        self._add("rect", x=x, y=y, width=max(width, 0), height=height, fill=fill, **attributes)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, **attributes: object) -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **attributes)

    def polygon(self, points: Iterable[tuple[float, float]], fill: str, **attributes: object) -> None:
        self._add("polygon", points=" ".join(f"{_number(x)},{_number(y)}" for x, y in points), fill=fill, **attributes)

    def polyline(self, points: Iterable[tuple[float, float]], stroke: str, **attributes: object) -> None:
        joined = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polyline", points=joined, fill="none", stroke=stroke, **attributes)

    def path(self, data: str, fill: str, **attributes: object) -> None:
        self._add("path", d=data, fill=fill, **attributes)

    def circle(self, x: float, y: float, radius: float, fill: str, **attributes: object) -> None:
        self._add("circle", cx=x, cy=y, r=radius, fill=fill, **attributes)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 13,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
        family: str | None = None,
        halo: bool = False,
    ) -> None:
        """A line of text; `halo`: with an edge of paper, where it may lie on a line."""
        weight = ' font-weight="600"' if bold else ""
        fill = RED_INK if fill == RED else fill
        if halo:
            weight += f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
        if family is not None:  # a program's text, whose blanks count
            weight += f' font-family={quoteattr(family)} xml:space="preserve"'
        self._parts.append(
            f'<text x="{_number(x)}" y="{_number(y)}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>'
            f"{escape(text)}</text>"
        )

    def bar(self, x: float, y: float, height: float, parts: Sequence[tuple[float, str, str]], size: int = 12) -> float:
        """Segments of (width, fill, label) from x on, told apart by lines of paper, a label where it fits; their end.

        So they can be told apart without their colours too.
        """
        begins = []
        for width, fill, label in parts:
            if width > 0:
                self.rect(x, y, width, height, fill)
                begins.append(x)
            if label and text_width(label, size) + 8 <= width:
                middle = x + width / 2, y + height / 2 + size * 0.36
                self.text(*middle, label, size=size, anchor="middle", fill=ink_on(fill))
            x += width
        for begin in begins[1:]:
            self.line(begin, y, begin, y + height, PAPER, stroke_width=1.5)
        return x

    def open(self, tag: str, **attributes: object) -> None:
        """What follows lies in an element, until `close`; `class_` is its class."""
        self._add(tag, ">", **attributes)

    def close(self, tag: str) -> None:
        self._parts.append(f"</{tag}>")

    def raw(self, text: str) -> None:
        """SVG as it is."""
        self._parts.append(text)

    def _add(self, tag: str, end: str = "/>", **attributes: object) -> None:
        pairs = (
            f"{name.rstrip('_').replace('_', '-')}={quoteattr(_number(value))}"
            for name, value in attributes.items()
            if value is not None
        )
        self._parts.append(f"<{tag} {' '.join(pairs)}{end}")

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"<{self.alt}>"

    def svg(self) -> str:
        """The picture as SVG text."""
        body = "\n".join(self._parts)
        # A picture with parts of its own says what they are; a title would lie over them as a tooltip.
        title = f"<title>{escape(self.alt)}</title>\n" if self.role == "img" else ""
        more = "".join(f" {name}={quoteattr(value)}" for name, value in self.attributes.items())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" style="max-width:100%;height:auto" role="{self.role}" '
            f'aria-label={quoteattr(self.alt)} font-family="{FONT}"{more}>\n{title}'
            f'<rect width="{self.width}" height="{self.height}" rx="6" fill="{PAPER}"/>\n{body}\n</svg>'
        )


def ink_on(fill: str) -> str:
    """The ink, light or dark, in which letters stand out most against a colour (#rrggbb)."""
    return max((PAPER, DARK_INK), key=lambda ink: contrast(ink, fill))


def contrast(one: str, other: str) -> float:
    """The contrast of two colours (#rrggbb), 1 to 21, as WCAG 2.2 defines it."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def text_width(text: str, size: int = 13) -> float:
    """A rough width in pixels: a Korean letter is about one em wide, a Latin one a little over half."""
    return sum(size * (1.0 if ord(char) > 0x1100 else 0.56) for char in text)


def fit_size(text: str, width: float, size: int) -> int:
    """The font size, at most `size`, at which the text is about `width` pixels wide."""
    return min(size, int(size * width / max(text_width(text, size), 1)))


def nice_step(largest: float, ticks: int = 5) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts 0…largest into about `ticks` parts."""
    raw = max(largest, 1e-9) / ticks
    power = 10.0 ** (len(f"{int(raw)}") - 1) if raw >= 1 else 10.0 ** -len(f"{int(1 / raw)}")
    return next((m * power for m in (1, 2, 5, 10) if m * power >= raw), 10 * power)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
