"""docs/errors.md and its pictures are what benchmarks/judged.json says."""

import re

import pytest

from benchmarks.truth import Judged
from tools import errors
from tools.accuracy import read_judged
from virtual_gpu.language import language, set_language


@pytest.fixture(autouse=True)
def korean():
    before = language()
    set_language("ko")
    yield
    set_language(before)


def test_the_page_and_its_pictures_are_what_was_judged():
    judged = read_judged()
    assert errors.PAGE.read_text(encoding="utf-8") == errors.page(judged, errors.facts()), "python tools/errors.py"
    drawn = errors.pictures(judged["rows"])
    assert {path.name: path.read_text(encoding="utf-8") for path in errors.PICTURES.iterdir()} == drawn


def test_every_source_and_every_row_is_accounted_for():
    judged = read_judged()
    text, rows = errors.PAGE.read_text(encoding="utf-8"), judged["rows"]
    for source in {row.source for row in rows}:
        assert f"\n## {source}\n" in text and f"](#{errors.anchor(source)})" in text
    for source, group in errors.by_source(rows):
        part = errors.section(source, group, errors.facts())
        parts = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
        listed = sum(int(count) for count in re.findall(r"^- ([\d,]+)행: ", part, re.MULTILINE))
        assert sum(int(cells[2]) for cells in parts) + listed == len(group)


def row(number, *, predicted=1000, **changes):
    texts = {"source": "somebody/some", "kind": "measurement", "metric": "m", "gpu": "NVIDIA H100 PCIe"}
    numbers = {"measured": 1000, "predicted": predicted, "resolution": 2, "grade": "exact", "outcome": "run"}
    return Judged(**texts | numbers | {"id": f"some/{number}", "recipe": "liger"} | changes)


def test_the_worst_comes_first_and_reasons_are_told():
    rows = [
        row(1, predicted=1001),
        row(2, predicted=700, source="b/worst"),
        row(3, predicted=1200, source="b/worst", gpu="not stated"),
        row(4, outcome="refused", predicted=None, note="no such operation", source="a/none"),
        row(5, outcome="no recipe", predicted=None, recipe="", source="a/none"),
        row(6, outcome="died", predicted=None, counts=False, grade="no", note="Tried"),
    ]
    fact = {"path": "notes/x.md", "commit": "1234567890", "licence": "MIT", "gpu": "NVIDIA H100 PCIe", "settings": {}}
    known = {one.id: fact | {"missing": f"missing of {one.id}"} for one in rows}
    page = errors.page({"date": "2026-01-02", "versions": {"torch": "2.13.0+cpu"}, "rows": rows}, known)
    assert [source for source, _ in errors.by_source(rows)] == ["b/worst", "somebody/some", "a/none"]
    page = page.replace("\N{NO-BREAK SPACE}", " ")
    assert "- −30.000 %: `some/2` (측정 1000 B, 예측 700 B)\n- +20.000 %: `some/3` (" in page
    assert "- 1행: no such operation" in page and "- 1행: missing of some/5" in page
    assert "[notes/x.md](https://github.com/b/worst/blob/1234567890/notes/x.md)" in page
    assert "메모리가 부족했다(some/6: Tried)" in page and "부족하다고 한 것이 1개 더 있다" in page
    assert set(errors.pictures(rows)) == {"b_worst.svg", "somebody_some.svg"}
