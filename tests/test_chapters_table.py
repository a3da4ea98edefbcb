"""The README pages' table of chapters is what the notebooks say."""

import pytest

import helpers
from helpers.course import CHAPTERS
from tools.chapters import PAGES, with_table


@pytest.fixture(autouse=True)
def korean_after():
    yield
    helpers.set_language("ko")


@pytest.mark.parametrize("language, page", PAGES.items())
def test_the_table_is_todays(language, page):
    text = page.read_text(encoding="utf-8")
    assert with_table(text, language) == text, "run tools/chapters.py"
    assert all(f"/{name}.ipynb" in text for (_, name), *_ in CHAPTERS)


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="this one has 0"):
        with_table("# no table here", "en")
