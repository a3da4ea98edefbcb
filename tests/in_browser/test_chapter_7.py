"""Chapter 7 in JupyterLab and Chromium: ranks run from a notebook, what they did is drawn, a guess stands beside it."""

import pytest


@pytest.mark.browser
@pytest.mark.slow
def test_ranks_run_and_are_drawn(open_notebook):
    notebook = open_notebook("07_split_model")
    for cell in ('guess("7.1"', "draw_pipeline(piped)", "idle.against("):
        notebook.run_cells(cell)
    assert notebook.errors() == []
    assert notebook.broken_pictures() == []
    notebook.screenshot("07_pipeline", ".jp-Notebook")
    assert notebook.console_errors == []
