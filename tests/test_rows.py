"""Rows of text under heads: what a notebook and a terminal show."""

from helpers.rows import LeftRows, Rows, table


def test_cells_are_text_whatever_they_hold():
    rows = Rows(("이름", "수"), [("a", 3), ("<b>", None)])
    assert repr(rows) == "이름 | 수\na | 3\n<b> | None"
    assert "<td>&lt;b&gt;</td>" in rows._repr_html_() and "<b>" not in rows._repr_html_()


def test_sentences_stand_on_the_left():
    page = LeftRows(("head",), [("a <sentence>",)])._repr_html_()
    assert "text-align: left" in page and "a &lt;sentence&gt;" in page


def test_a_table_of_results():
    columns = {"error": ("상대 오차", ".1%"), "name": ("이름", "")}
    found = table([{"name": "nf4", "error": 0.0923, "more": None}, {"name": "int8", "error": 0.5, "more": 3}], columns)
    assert found.heads == ["이름", "상대 오차", "more"]
    assert list(found) == [["nf4", "9.2%", "–"], ["int8", "50.0%", "3"]]
