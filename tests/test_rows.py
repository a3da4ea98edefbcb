"""Rows of text under heads: what a notebook and a terminal show."""

from helpers.rows import LeftRows, Rows


def test_cells_are_text_whatever_they_hold():
    rows = Rows(("이름", "수"), [("a", 3), ("<b>", None)])
    assert repr(rows) == "이름 | 수\na | 3\n<b> | None"
    assert "<td>&lt;b&gt;</td>" in rows._repr_html_() and "<b>" not in rows._repr_html_()


def test_sentences_stand_on_the_left():
    page = LeftRows(("head",), [("a <sentence>",)])._repr_html_()
    assert "text-align: left" in page and "a &lt;sentence&gt;" in page
