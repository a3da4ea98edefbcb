"""Chapter 11 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_11s_panel_follows(open_notebook):
    notebook = open_notebook("11_outside_training")
    notebook.run_cells("cache_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    def shown(*words):
        return notebook.wait_until_text(".cache-status", lambda text: all(word in text for word in words))

    shown("128.00 KiB", "캐시 2.00 GiB", "들어간다")
    notebook.press_slider(".cache-length", "End")
    shown("캐시 16.00 GiB", "넘친다")
    notebook.choose(".cache-kind", "4 bit")
    shown("캐시 4.00 GiB", "들어간다")
    notebook.choose(".cache-model", "google/gemma-3-1b-pt")
    shown("캐시", "들어간다")
    notebook.choose(".cache-gpu", "T4")
    shown("T4에서 쓸 수 있는")
    notebook.screenshot("11_panel", ".cache-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
