"""Charts of data: matplotlib in the course's colours, shown and written as SVG whose words stay words."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

from virtual_gpu.drawing import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.RED, svg.PURPLE, svg.SKY, svg.GREY)
# Laid out with the font that matplotlib brings, on every machine the same; shown with the reader's Korean font.
LAID_OUT_WITH = "DejaVu Sans"


class Chart:
    """`columns` axes side by side on a white sheet of width × height pixels (readable in a dark theme too).

    Draw on `ax` (the first) or `axes` with matplotlib's own methods; `alt` says in words what is seen. The same data
    give the same text to the byte: words are not turned into outlines, so a browser shows Korean with a font it has,
    and matplotlib needs none.
    """

    def __init__(self, title: str, alt: str = "", columns: int = 1, width: int = 760, height: int = 330):
        import matplotlib
        from matplotlib.figure import Figure

        self.title, self.alt, self.width, self.height = title, alt, width, height
        with matplotlib.rc_context(_style()):
            # 72 points an inch: sizes in points are pixels.
            self.figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
            self.axes: list[Axes] = list(self.figure.subplots(1, columns, squeeze=False)[0])
            self.figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=15, color=svg.INK)

    @property
    def ax(self) -> Axes:
        """The first axes."""
        return self.axes[0]

    def svg(self) -> str:
        """The picture as SVG text."""
        import matplotlib

        for legend in [*self.figure.legends, *filter(None, (ax.get_legend() for ax in self.figure.axes))]:
            legend.set_frame_on(False)  # drawn outside `_style`, where matplotlib's own default holds
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with matplotlib.rc_context(_style()), _letters_of_other_fonts():
            self.figure.savefig(file, format="svg", metadata=nothing)
        self.figure.set_layout_engine("none")  # laid out once: a second time would move it by a hair
        return self._for_a_page(file.getvalue())

    def _for_a_page(self, text: str) -> str:
        """The SVG without its XML head, in pixels; its only style sheet would reach the whole page."""
        text = text[text.index("<svg") :].replace(f"'{LAID_OUT_WITH}'", svg.FONT)
        text, sheets = re.subn(r"<style[^>]*>\*\{([^}]*)\}</style>", "", text)
        assert sheets == 1, "matplotlib wrote its style sheet in another way"
        described = ". ".join(filter(None, [self.title, self.alt]))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" '
            f'style="max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt" role="img" '
            f'aria-label="{escape(described)}">\n<title>{escape(described)}</title>'
        )
        return re.sub(r"^<svg[^>]*>", lambda _: head, text, count=1).strip()

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"<{self.title}>"


def steady(values: Iterable[float], digits: int = 4) -> list[float]:
    """The values to so many significant digits: what is drawn may not hang on how a CPU sums and rounds."""
    return [float(f"{value:.{digits - 1}e}") for value in values]


def _style() -> dict[str, object]:
    """matplotlib's settings: few lines, the course's inks, and nothing in the file that differs from run to run."""
    from cycler import cycler

    return {
        "font.family": LAID_OUT_WITH,
        "font.size": 12,
        "axes.titlesize": 13,
        "axes.titlelocation": "left",
        "axes.labelcolor": svg.MUTED,
        "axes.edgecolor": svg.MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.unicode_minus": False,
        "grid.color": svg.GRID,
        "xtick.color": svg.MUTED,
        "ytick.color": svg.MUTED,
        "text.color": svg.INK,
        "figure.facecolor": svg.PAPER,
        "svg.fonttype": "none",
        "svg.hashsalt": "virtual-gpu",
    }


@contextmanager
def _letters_of_other_fonts() -> Iterator[None]:
    """Quiet about letters that the layout's font lacks: the browser draws them with another."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font", category=UserWarning)
        yield
