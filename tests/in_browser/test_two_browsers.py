"""Two browsers on one kernel: what is moved in either is shown in both."""

import nbformat
import pytest
from browser import LOOK_TIMEOUT_S, OPEN, START_TIMEOUT_S
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_panel_in_two_browsers(lab, browser, open_notebook, tmp_path):
    """The panel that one of them made is moved in both, and both show what the last move gave."""
    path = tmp_path / "both.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cell = new_code_cell("from helpers import memory_panel\n\nmemory_panel()")
    nbformat.write(new_notebook(cells=[cell], metadata={"kernelspec": kernel}), path)
    notebook = open_notebook(path)
    notebook.run_all()
    first = notebook.page
    first.evaluate("() => window.courseNotebook.context.save()")
    context = browser.new_context(locale="ko-KR", viewport=first.viewport_size)  # another browser's, as to cookies
    try:
        second = context.new_page()
        second.goto(f"{lab[0]}/lab?reset", timeout=START_TIMEOUT_S * 1000)
        second.wait_for_function("() => window.jupyterapp !== undefined", timeout=START_TIMEOUT_S * 1000)
        second.evaluate(OPEN, ["notebooks/ko/both.ipynb", START_TIMEOUT_S * 1000])
        both = first, second
        kernels = {page.evaluate("() => window.courseNotebook.sessionContext.session.kernel.id") for page in both}
        assert len(kernels) == 1
        for page in both:  # what moves while JupyterLab still asks the kernel for a widget's state, it may not hear of
            page.locator(".memory-status", has_text="T4").wait_for(timeout=LOOK_TIMEOUT_S * 1000)
        for mover, gpu in ((first, "A100-40GB"), (second, "L4")):
            mover.locator(".memory-gpu select").select_option(label=gpu)
            for page in both:
                page.locator(".memory-status", has_text=gpu).wait_for(timeout=LOOK_TIMEOUT_S * 1000)
        said = [page.locator(".memory-status").inner_text() for page in both]
        drawn = [page.locator(".memory-picture").inner_html() for page in both]
    finally:
        context.close()
    assert said[0] == said[1] and drawn[0] == drawn[1] and "<svg" in drawn[0]
    assert notebook.errors() == [] and notebook.console_errors == []
