"""The stop button in JupyterLab and Chromium, pressed soon after a control was moved."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# A panel whose moves take a moment, and as long what is computed ahead of them.
SOURCE = """import time

import ipywidgets as widgets

from helpers.panel import Answer, Panel


class Drawn(str):
    def _repr_svg_(self):
        return f"<svg>{self}</svg>"


class SlowPanel(Panel):
    prefix = "slow"

    def __init__(self):
        super().__init__()
        self.controls = {
            "kind": self.control(widgets.Dropdown, "kind", "kind", options=list("abcdefghij")),
            "side": self.control(widgets.IntSlider, "side", "side", value=2, max=9),
        }
        self.lay_out([*self.controls.values()], [])
        self.move(self._changed)

    def answer(self, *, kind, side):
        end = time.perf_counter() + (3 if kind != "a" else 0.8)
        while time.perf_counter() < end:
            pass
        return Answer((f"{kind} of {side}",), Drawn(side))


SlowPanel()"""
# The first piece begins a quarter of a second after the answer: the menu is moved in its middle, the button pressed
# while it goes on, or once the move itself has begun.
MOVE_AND_STOP = """async wait => {
    const sleep = ms => new Promise(done => setTimeout(done, ms)), status = document.querySelector(".slow-status");
    const slider = document.querySelector(".slow-side .noUi-handle");
    slider.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    while (!status.innerText.includes("a of 3")) await sleep(5);
    await sleep(500);
    const menu = document.querySelector(".slow-kind select");
    menu.value = "g";
    menu.dispatchEvent(new Event("change", { bubbles: true }));
    await sleep(wait);
    await window.courseNotebook.sessionContext.session.kernel.interrupt();
}"""


@pytest.mark.parametrize("wait_ms", [0, 100, 250, 1000])
def test_a_stop_is_that_of_the_move_before_it(open_notebook, tmp_path, wait_ms):
    path = tmp_path / "slow.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[new_code_cell(SOURCE)], metadata={"kernelspec": kernel}), path)
    notebook = open_notebook(path)
    notebook.run_all()
    notebook.wait_until_text(".slow-status", lambda text: "a of 2" in text)
    notebook.page.evaluate(MOVE_AND_STOP, wait_ms)
    said = notebook.wait_until_text(".slow-status", lambda text: "a of 3" not in text)
    assert "중단했다" in said and "<svg" not in notebook.html(".slow-picture")
    notebook.choose(".slow-kind", "a")
    notebook.wait_until_text(".slow-status", lambda text: "a of 3" in text)
    assert notebook.errors() == [] and notebook.console_errors == []
