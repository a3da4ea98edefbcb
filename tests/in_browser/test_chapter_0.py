"""Chapter 0 in JupyterLab and Chromium: the table is there, and the map's links lead on."""

import pytest

from helpers import course_map


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_0s_map_leads_on(open_notebook):
    notebook = open_notebook("00_start_here")
    notebook.run_cells("course_map(")
    assert notebook.errors() == [] and notebook.broken_pictures() == []
    text = notebook.page.locator(".jp-Notebook").inner_text()
    assert "모델 허브" in text and "꺼 둠" in text
    links = notebook.page.locator(".jp-Notebook .jp-RenderedHTML a")
    names = [chapter.notebook for chapter in course_map() if chapter.notebook]
    assert links.count() == len(names)
    links.first.click()
    heading = notebook.page.locator("h1", has_text="1장. 숫자는 몇 바이트일까")
    heading.first.wait_for()
    assert notebook.console_errors == []
