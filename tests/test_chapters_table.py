"""The README pages' table of chapters is what the notebooks say."""

import json
import shutil

import pytest

import helpers
from helpers.course import CHAPTERS
from tools.chapters import MAP, PAGES, map_is_todays, with_table


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


def test_a_map_from_before_its_chapters_is_noticed(tmp_path):
    for notebook in MAP.parent.glob("*.ipynb"):
        shutil.copy(notebook, tmp_path)
    assert map_is_todays(tmp_path / MAP.name)
    longer = tmp_path / "01_data_types.ipynb"
    notebook = json.loads(longer.read_text(encoding="utf-8"))
    notebook["cells"][1:1] = [{"cell_type": "markdown", "metadata": {}, "source": ["가" * 8_000]}]
    longer.write_text(json.dumps(notebook), encoding="utf-8")
    assert not map_is_todays(tmp_path / MAP.name)
