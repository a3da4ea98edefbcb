"""A zoomed report and the allocator's scrubber in JupyterLab and Chromium, in light and in dark."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

IMPORTS = "from helpers import allocator_panel, predict_memory"
OPEN = """words => {
    for (const summary of document.querySelectorAll(".vg-zoom summary"))
        summary.parentElement.open ||= words.some(word => summary.textContent.includes(word));
}"""
THEME = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
NAME = "() => document.body.dataset.jpThemeName"
LEAVES = """() => [...document.querySelectorAll(".vg-zoom td")].filter(cell => cell.checkVisibility())
    .map(cell => cell.textContent)"""


def themed(notebook, name, css):
    """Screenshots in both themes."""
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        notebook.page.evaluate(THEME, theme)
        notebook.wait_until(lambda theme=theme: notebook.page.evaluate(NAME) == theme, f"the theme is {theme}")
        notebook.page.wait_for_load_state("networkidle")
        notebook.screenshot(f"{name}_{theme.split()[-1].lower()}", css)


@pytest.fixture
def opened(open_notebook, tmp_path):
    def opened(source):
        path = tmp_path / "page.ipynb"
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        cells = [new_code_cell(IMPORTS), new_code_cell(source)]
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
        notebook = open_notebook(path)
        notebook.run_all()
        assert notebook.errors() == []
        return notebook

    return opened


def test_a_bar_opens_down_to_the_line(opened):
    notebook = opened('predict_memory(batch_size=16, gpu="T4").zoom()')
    assert notebook.page.evaluate(LEAVES) == []
    category = notebook.page.locator(".vg-zoom summary", has_text="순전파 상태와 임시 텐서").first
    category.focus()
    category.press("Enter")  # the keyboard alone
    assert notebook.page.locator(".vg-zoom summary", has_text="4. 순전파").first.is_visible()
    notebook.page.evaluate(OPEN, ["4. 순전파", "똑같은", "mlp"])
    leaves = notebook.page.evaluate(LEAVES)
    assert "GeluBackward0activations.py:89 return self.act(input)" in leaves
    assert "float16 [16, 256, 8192]" in leaves
    themed(notebook, "zoom_report", ".vg-zoom")
    assert notebook.console_errors == []


def test_the_scrubber_follows_the_finger(opened):
    notebook = opened("allocator_panel()")
    told = notebook.wait_until_text(".allocator-status", lambda text: "381.88 MiB" in text)
    stop = int(told.partition("/")[0])
    assert "OOM" in notebook.html(".allocator-picture")
    themed(notebook, "zoom_scrubber_oom", ".allocator-panel")
    notebook.press_slider(".allocator-request", "ArrowRight", times=20)
    notebook.wait_until_text(".allocator-status", lambda text: text.startswith(f"{stop + 20}/"))
    notebook.press_slider(".allocator-request", "Home")
    notebook.wait_until_text(".allocator-status", lambda text: text.startswith("1/"))
    assert "OOM" not in notebook.html(".allocator-picture")
    notebook.press_slider(".allocator-request", "PageUp")
    notebook.screenshot("zoom_scrubber_start", ".allocator-panel")
    notebook.click(".allocator-back")
    notebook.wait_until_text(".allocator-status", lambda text: text.startswith(f"{stop}/"))
    assert notebook.console_errors == []
