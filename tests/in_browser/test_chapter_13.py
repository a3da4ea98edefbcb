"""Chapter 13 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_13s_panel_counts(open_notebook):
    notebook = open_notebook("13_images")
    notebook.run_cells("images_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    def shown(*words):
        return notebook.wait_until_text(".images-status", lambda text: all(word in text for word in words))

    shown("1,024토큰", "T4: 11.5")
    notebook.choose(".images-picture", "4032 × 3024 사진")
    shown("실행", "누르면")
    notebook.click(".images-run button, button.images-run")
    shown("11,844토큰", "OOM")
    notebook.screenshot("13_panel", ".images-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
