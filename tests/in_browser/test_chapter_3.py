"""Chapter 3 in JupyterLab and Chromium: drive the panel, read what it shows."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_chapter_3s_panel_follows(open_notebook):
    notebook = open_notebook("03_memory_decomposition")
    notebook.run_cells("memory_panel(")
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []

    # A prediction follows the slider, and names what it predicts.
    first = notebook.html(".memory-picture")
    assert "<svg" in first and "배치 4" in first
    notebook.press_slider(".memory-batch", "PageUp")
    notebook.wait_until(lambda: notebook.html(".memory-picture") != first, "the picture follows the slider")
    notebook.press_slider(".memory-batch", "End")
    notebook.wait_until_text(".memory-status", lambda text: "메모리 부족" in text)
    notebook.wait_until(lambda: "배치 64" in notebook.html(".memory-picture"), "the picture shows batch 64")

    # The drop-downs: a larger GPU holds it.
    notebook.choose(".memory-gpu", "H200")
    notebook.wait_until_text(".memory-status", lambda text: "들어간다" in text)

    # A length beyond the model's positions: one clear sentence, no picture; and back.
    notebook.press_slider(".memory-length", "End")
    notebook.wait_until_text(".memory-status", lambda text: "최대 길이는 2048" in text)
    notebook.press_slider(".memory-length", "Home")
    notebook.wait_until_text(".memory-status", lambda text: "예측" in text)

    # The button runs the experiment on the chosen GPU, once, however often it is clicked.
    notebook.press_slider(".memory-batch", "Home")
    notebook.wait_until(lambda: "배치 1 " in notebook.html(".memory-picture"), "the picture shows batch 1")
    notebook.click(".memory-run")
    notebook.click(".memory-run")
    notebook.wait_until_text(".memory-status", lambda text: "실행 (H200)" in text and "들어간다" in text)
    assert "배치 1 " in notebook.html(".memory-picture")
    notebook.screenshot("03_panel", ".memory-panel")
    assert notebook.errors() == [] and notebook.console_errors == []
