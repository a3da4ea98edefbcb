"""The drawings: valid XML, the same to the byte each time, inside their sheet, in both languages."""

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virtual_gpu.drawing import svg
from virtual_gpu.drawing.labels import html_table
from virtual_gpu.drawing.report import draw_report
from virtual_gpu.language import set_language
from virtual_gpu.report import MemoryReport, MemoryTable, PhaseTable
from virtual_gpu.trace.timeline import CATEGORIES, PhaseCurve, Timeline
from virtual_gpu.units import GiB, human_bytes

NASTY = "<b>\"Tom\" & 'Jerry' · 한글</b>"
SETTING = {"batch_size": 4, "gradient_accumulation_steps": 1, "precision": "auto", "gpu": "T4"}


@pytest.fixture(params=["ko", "en"])
def language(request):
    set_language(request.param)
    yield request.param
    set_language("ko")


def timeline(peak=12 * GiB, moments=300):
    """Three phases of many moments, the peak in backward."""
    rises = np.linspace(0, 1, moments)[:, None] * np.array([0.2, 0.2, 0.4, 0.15, 0.05])
    return Timeline(
        [
            PhaseCurve(name, (rises * peak * part).astype(np.int64))
            for name, part in (("forward", 0.5), ("backward", 1.0), ("step", 0.8))
        ]
    )


def report(title="gpt2 · 배치 4 · 가상 T4", **changes):
    line = changes.pop("timeline", timeline())
    values = {
        "gpu_name": "T4",
        "is_virtual": True,
        "capacity_bytes": 15 * GiB,
        "parameters_bytes": 2 * GiB,
        "gradients_bytes": 2 * GiB,
        "optimizer_bytes": 4 * GiB,
        "allocated_bytes": 9 * GiB,
        "peak_bytes": line.peak_bytes,
        "needed_bytes": line.peak_bytes,
        "peak_phase": line.peak_phase,
        "setting": SETTING,
    }
    return MemoryReport(title=title, timeline=line, **(values | changes))


FITS = report()
OUT_OF_MEMORY = report(fits=False, error="CUDA out of memory.", needed_bytes=40 * GiB)
REPORTS = {
    "fits": FITS,
    "out of memory": OUT_OF_MEMORY,
    "out of memory, need unknown": report(fits=False, error="CUDA out of memory.", needed_bytes=None),
    "far too large": report(fits=False, error="CUDA out of memory.", needed_bytes=5000 * GiB),
    "out of memory while loading": report(
        fits=False, timeline=Timeline(), allocated_bytes=0, gradients_bytes=0, optimizer_bytes=0
    ),
    "tiny": report(timeline=timeline(peak=2**20)),
    "escaped": report(title=NASTY, gpu_name=NASTY),
    "long title": report(title=" · ".join(["polyglot-ko-12.8b", "길이 1024", "체크포인팅", "mixed_bf16"] * 3)),
}


def boxes(drawing):
    """(left, top, right, bottom) of every text and rectangle, the text's width by the drawing's own rule."""
    for element in ET.fromstring(drawing.svg()).iter():
        kind = element.tag.split("}")[1]
        if kind == "text":
            size, x, y = (float(element.get(name)) for name in ("font-size", "x", "y"))
            width = svg.text_width(element.text or "", int(size))
            left = x - {"start": 0, "middle": width / 2, "end": width}[element.get("text-anchor")]
            yield element.text, left, y - size, left + width, y
        elif kind == "rect":
            x, y, width, height = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
            yield "rect", x, y, x + width, y + height


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_draws_itself(name, language):
    drawn = REPORTS[name]._repr_svg_()
    assert drawn == REPORTS[name]._repr_svg_()
    root = ET.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("aria-label") == f"{REPORTS[name].title}: {REPORTS[name].verdict}"
    assert REPORTS[name].title in [element.text for element in root.iter()]


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_stays_on_its_sheet(name, language):
    drawing = draw_report(REPORTS[name])
    for what, left, top, right, bottom in boxes(drawing):
        assert left >= -1 and top >= -1 and right <= drawing.width + 1 and bottom <= drawing.height + 1, what


TABLES = {
    "one": [FITS],
    "fits and not": [FITS, OUT_OF_MEMORY],
    "many settings": [
        report(setting={f"a rather long setting {i}": f"value {i + row}" for i in range(10)}) for row in (0, 1)
    ],
    "escaped": [report(setting={NASTY: "<&>"}), report(setting={NASTY: "<<>>"})],
    "several GPUs": [FITS, report(gpu_name="H200", capacity_bytes=139 * GiB, setting=SETTING | {"gpu": "H200"})],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_chart_stays_on_its_sheet(name, language):
    drawing = MemoryTable(TABLES[name]).chart()
    assert drawing.svg() == MemoryTable(TABLES[name]).chart().svg()
    for what, left, top, right, bottom in boxes(drawing):
        assert left >= -1 and top >= -1 and right <= drawing.width + 1 and bottom <= drawing.height + 1, what
    bars = [right - left for what, left, top, right, bottom in boxes(drawing) if what == "rect" and bottom - top == 20]
    assert sum(bars) > 30 * len(TABLES[name])  # not squeezed to nothing


def test_the_capacity_line_stands_where_the_capacity_is():
    """A report that fits ends left of the line, one that does not is outlined beyond it."""
    for one, beyond in ((FITS, False), (OUT_OF_MEMORY, True)):
        root = ET.fromstring(draw_report(one).svg())
        [line] = [
            e for e in root.iter() if e.tag.endswith("line") and e.get("x1") == e.get("x2") and e.get("y1") == "78"
        ]
        ends = [
            float(e.get("x")) + float(e.get("width"))
            for e in root.iter()
            if e.tag.endswith("rect") and e.get("height") == "30"
        ]
        assert (max(ends) > float(line.get("x1"))) is beyond


def test_segments_are_told_apart_without_colours():
    """A line of paper where one ends and the next begins, and the name inside where it fits."""
    drawn = ET.fromstring(draw_report(FITS).svg())
    rects = [e for e in drawn.iter() if e.tag.endswith("rect") and e.get("height") == "30"]
    begins = {round(float(e.get("x")), 1) for e in rects[1:]}
    lines = {round(float(e.get("x1")), 1) for e in drawn.iter() if e.get("stroke") == svg.PAPER and e.get("x1")}
    assert len(rects) == 5 and begins == lines
    inside = [e for e in drawn.iter() if e.tag.endswith("text") and 86 < float(e.get("y")) < 116]
    assert "파라미터" in [e.text for e in inside]
    for text in inside:
        x, half = float(text.get("x")), svg.text_width(text.text, 12) / 2
        [rect] = [e for e in rects if float(e.get("x")) < x < float(e.get("x")) + float(e.get("width"))]
        assert half * 2 < float(rect.get("width"))
        assert svg.contrast(text.get("fill"), rect.get("fill")) >= 4.5


@pytest.mark.parametrize("marked", [0, 1])
def test_only_the_marked_bar_has_letters_on_it(marked):
    table = MemoryTable([report(), report(title="gpt2 · 배치 8 · 가상 T4")])
    root = ET.fromstring(table.chart(marked=marked).svg())
    names = [float(e.get("y")) for e in root.iter() if e.tag.endswith("text") and e.get("font-size") == "11"]
    covers = [float(e.get("y")) for e in root.iter() if e.get("fill-opacity") == "0.45"]
    top = 64 + 34 * marked
    assert names and all(top < y < top + 20 for y in names)
    assert covers == [64 + 34 * (1 - marked)]


@pytest.mark.parametrize("peak", [14.2, 14.6, 14.9, 15.0, 15.1, 15.4])
def test_the_peaks_label_does_not_lie_on_the_limit(peak):
    drawn = ET.fromstring(draw_report(report(timeline=timeline(peak * GiB))).svg())
    [limit] = [e for e in drawn.iter() if e.get("x1") == "62" and e.get("stroke") == svg.RED]
    [label] = [e for e in drawn.iter() if e.tag.endswith("text") and (e.text or "").startswith("최대 ")]
    bottom, line = float(label.get("y")), float(limit.get("y1"))
    assert not bottom - 11 < line < bottom + 3


@pytest.mark.parametrize("name", REPORTS)
def test_a_timeline_answers(name, language):
    """Every slice tells its moment's bytes, and the picture as it stands those of the peak."""
    one = REPORTS[name]
    drawing = draw_report(one, answers=True)
    for what, left, top, right, bottom in boxes(drawing):
        assert left >= -1 and top >= -1 and right <= drawing.width + 1 and bottom <= drawing.height + 1, what
    root = ET.fromstring(drawing.svg())
    slices = [e for e in root.iter() if e.get("class") == "vg-moment"]
    if not one.timeline.phases:
        assert not slices and root.get("role") == "img"
        return
    assert root.get("role") == "group" and len(slices) == 48
    assert sum(e.get("tabindex") == "0" for e in slices) == len(one.timeline.phases)
    [rest] = [e for e in root.iter() if e.get("class") == "vg-rest"]
    words = [e.text for e in rest]
    assert human_bytes(one.timeline.peak_bytes) in words[0]
    assert all(human_bytes(n) in " ".join(words) for n in one.at_peak.values())
    focused = next(e for e in slices if e.get("aria-label", "").startswith(words[0]))
    assert [e.text for e in focused if e.tag.endswith("}g") for e in e] == words


def test_another_report_lies_below_with_the_difference(language):
    other = report(title="gpt2 · 배치 2 · 가상 T4", timeline=timeline(9 * GiB))
    plain, drawn = draw_report(FITS).svg(), draw_report(FITS, against=other).svg()
    assert "+3.00 GiB" in drawn and "+3.00 GiB" not in plain
    thin = [e for e in ET.fromstring(drawn).iter() if e.tag.endswith("rect") and e.get("height") == "7"]
    thick = [e for e in ET.fromstring(drawn).iter() if e.tag.endswith("rect") and e.get("height") == "30"]
    ends = [max(float(e.get("x")) + float(e.get("width")) for e in rects) - 20 for rects in (thin, thick)]
    assert ends[0] / ends[1] == pytest.approx(9 / 12, rel=1e-3)
    still = draw_report(FITS, axis_bytes=30 * GiB).svg()
    widths = [float(e.get("width")) for e in ET.fromstring(still).iter() if e.get("height") == "30"]
    assert sum(widths) == pytest.approx(720 * 12 / 30, rel=1e-3)


def test_letters_stand_out():
    """A contrast of 4.5, as WCAG 2.2 (1.4.3) asks, on the sheet and on every colour."""
    assert svg.contrast("#000000", "#ffffff") == pytest.approx(21)
    colours = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PURPLE, svg.RED, svg.SKY, svg.GREY, svg.GRID)
    assert all(svg.contrast(svg.ink_on(colour), colour) >= 4.5 for colour in colours)
    assert all(svg.contrast(ink, svg.PAPER) >= 4.5 for ink in (svg.INK, svg.MUTED, svg.RED_INK))
    drawing = svg.Drawing(10, 10, alt="red")
    drawing.text(0, 0, "red", fill=svg.RED)
    assert svg.RED not in drawing.svg()


@pytest.mark.parametrize(
    ("code", "words"),
    [("ko", ["역전파", "파라미터", "옵티마이저 상태"]), ("en", ["backward", "parameters", "optimizer state"])],
)
def test_pictures_speak_the_readers_language(code, words):
    set_language(code)
    try:
        drawn = draw_report(FITS).svg() + MemoryTable([FITS, OUT_OF_MEMORY])._repr_html_()
    finally:
        set_language("ko")
    assert all(word in drawn for word in words)


@pytest.mark.parametrize(
    ("name", "ko", "en"),
    [
        ("fits", "들어간다. 최대 12.00 GiB, 한도 15.00 GiB", "fits. Peak 12.00 GiB of 15.00 GiB"),
        ("out of memory", "메모리 부족. 40.00 GiB가 필요한데 한도는 15.00 GiB", "Needs 40.00 GiB of 15.00 GiB"),
        ("out of memory, need unknown", "메모리 부족. 한도 15.00 GiB", "out of memory. Capacity 15.00 GiB"),
    ],
)
def test_the_verdict(name, ko, en, language):
    assert {"ko": ko, "en": en}[language] in REPORTS[name].verdict
    assert REPORTS[name].verdict in repr(REPORTS[name])


class Cells(HTMLParser):
    """The rows of a table as lists of texts; it knows what is open."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_html_escapes_every_cell():
    assert Cells(html_table([NASTY, "b"], [["1", NASTY]])).rows == [[NASTY, "b"], ["1", NASTY]]


def test_the_table_of_a_sweep(language):
    other = report(fits=False, needed_bytes=None, allocated_bytes=0, setting=SETTING | {"batch_size": 16})
    heads, first, second = Cells(MemoryTable([FITS, other])._repr_html_()).rows
    assert heads[0] == {"ko": "배치 크기", "en": "batch size"}[language]  # only what varies has a column
    assert len(heads) == len(first) == len(second) == 8
    assert (first[0], second[0]) == ("4", "16")
    assert second[2:5] == ["-"] * 3  # the first step was not reached


def test_the_table_of_the_phases(language):
    heads, *rows = Cells(PhaseTable(timeline())._repr_html_()).rows
    assert len(rows) == 3
    assert rows[1][1] == {"ko": "역전파", "en": "backward"}[language]
    assert rows[1][-1] == "12.00 GiB"
    assert Cells(PhaseTable(Timeline())._repr_html_()).rows == [heads]


def test_thinning_keeps_the_peak():
    moments = np.zeros((5000, len(CATEGORIES)), dtype=np.int64)
    moments[:, 0] = GiB
    moments[1234, 3] = 9 * GiB
    drawn = draw_report(report(timeline=Timeline([PhaseCurve("forward", moments)]), needed_bytes=10 * GiB))
    assert len(drawn.svg()) < 20_000
    root = ET.fromstring(drawn.svg())
    purple = next(e for e in root.iter() if e.tag.endswith("polygon") and e.get("fill") == svg.PURPLE)
    heights = [float(point.split(",")[1]) for point in purple.get("points").split()]
    circle = next(e for e in root.iter() if e.tag.endswith("circle"))
    assert min(heights) == float(circle.get("cy"))


def test_the_numbers_of_a_report_as_plain_values():
    numbers = OUT_OF_MEMORY.to_dict()
    assert numbers["activations_bytes"] == numbers["at_peak"]["activations"] + numbers["at_peak"]["other"]
    assert "timeline" not in numbers
    assert json.loads(json.dumps(numbers)) == numbers


def test_attributes_are_escaped():
    drawing = svg.Drawing(10, 10, alt=NASTY)
    drawing.line(0, 0, 1, 1, stroke='"<&>')
    drawing.rect(0, 0, -5, 1, "none", stroke_dasharray=None)
    root = ET.fromstring(drawing.svg())
    assert root.get("aria-label") == NASTY
    assert [e.get("stroke") for e in root.iter() if e.tag.endswith("line")] == ['"<&>']
    assert root[-1].get("width") == "0"  # never negative
    assert "stroke-dasharray" not in root[-1].attrib
    assert repr(drawing) == f"<{NASTY}>"


@settings(deadline=None)
@given(st.floats(1e-6, 1e6))
def test_nice_step(largest):
    step = svg.nice_step(largest)
    assert largest / 5 <= step * (1 + 1e-9)
    assert step <= largest / 5 * 2.5 * (1 + 1e-9)


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(1, 2000), st.integers(1, 30))
def test_fit_size(text, width, size):
    fitted = svg.fit_size(text, width, size)
    assert fitted <= size
    assert svg.text_width(text, fitted) <= width + 1
