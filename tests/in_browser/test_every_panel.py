"""Every panel: what a screen reader is told, as Chromium's accessibility tree has it, and what fits a narrow page."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import helpers

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PANELS = [name for name in helpers.__all__ if name.endswith("_panel")]
PIPELINE = """\
from helpers.chapters.c7_split.panel import pipeline_panel
from helpers.chapters.c7_split.pipeline import PipelineRun, Work

pipeline_panel({"two in turn": [PipelineRun([Work("F", 0, 0), Work("F", 0, 1), Work("B", 0, 0), Work("B", 0, 1)])]})"""
ACTS = {"button", "checkbox", "combobox", "DisclosureTriangle", "slider", "spinbutton", "switch", "textbox"}
SIGN = re.compile("[\ue000-\uf8ff]")  # of a font of icons


@pytest.fixture(scope="module")
def notebook(open_notebook, tmp_path_factory):
    """Every panel under another on one page."""
    path = tmp_path_factory.mktemp("page") / "spoken.ipynb"
    sources = [f"from helpers import {', '.join(PANELS)}", *(f"{name}()" for name in PANELS), PIPELINE]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in sources]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    notebook = open_notebook(path)
    notebook.run_all()
    assert notebook.errors() == []
    return notebook


def told(notebook, css):
    """(role, name) of everything below the element that assistive technology is told of."""
    session = notebook.page.context.new_cdp_session(notebook.page)
    root = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
    place = session.send("DOM.querySelector", {"nodeId": root, "selector": css})["nodeId"]
    node = session.send("DOM.describeNode", {"nodeId": place})["node"]["backendNodeId"]
    nodes = session.send("Accessibility.queryAXTree", {"backendNodeId": node})["nodes"]
    session.detach()
    return [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in nodes if not one["ignored"]]


def css_of(name):
    return f".{'levers' if name == 'checkpointing_memory_panel' else name.removesuffix('_panel')}-panel"


@pytest.mark.parametrize("name", [*PANELS, "pipeline_panel"])
def test_every_control_has_a_name_and_a_slider_says_what_is_seen(notebook, name):
    css = css_of(name)
    notebook.find(f"{css} .course-status p")
    parts = told(notebook, css)
    acting = [part for part in parts if part[0] in ACTS]
    assert acting and [part for part in acting if not part[1].strip() or SIGN.search(part[1])] == []
    assert [part for part in parts if part[0] in ("image", "img") and not part[1].strip()] == []

    sliders = notebook.page.locator(f"{css} .widget-slider")
    described = sliders.locator(".widget-label").all_inner_texts()
    assert [found for role, found in parts if role == "slider"][: len(described)] == described
    for slider in sliders.all():
        handle = slider.locator("[role=slider]")
        before = slider.locator(".widget-readout").inner_text()
        assert handle.get_attribute("aria-valuetext") == before
        off = slider.locator("[disabled]").count() > 0
        assert handle.get_attribute("aria-disabled") == str(off).lower()
        if off:
            continue
        at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
        handle.focus()
        handle.press("ArrowLeft" if at_end else "ArrowRight")
        after = slider.locator(".widget-readout").inner_text()
        assert after != before and handle.get_attribute("aria-valuetext") == after
    assert notebook.page.locator(f"{css} .course-status").get_attribute("aria-live") == "polite"


# Of a panel's controls those that reach beyond it; what it shows scrolls inside itself.
BEYOND = """css => {
    const panel = document.querySelector(css), right = panel.getBoundingClientRect().right;
    return [...panel.querySelectorAll("*")]
        .filter(part => !part.closest(".course-shown, .course-working") && part.getClientRects().length > 0)
        .filter(part => part.getBoundingClientRect().right > right + 1)
        .map(part => part.className);
}"""


@pytest.mark.parametrize("width", [320, 640, 700])  # 640 px is a page of 1,280 at 200 %
def test_no_control_reaches_beyond_a_narrow_page(notebook, width):
    notebook.page.set_viewport_size({"width": width, "height": 1000})
    notebook.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    notebook.page.wait_for_timeout(300)
    found = {name: notebook.page.evaluate(BEYOND, css_of(name)) for name in [*PANELS, "pipeline_panel"]}
    assert {name: parts for name, parts in found.items() if parts} == {}
    tracks = notebook.page.locator(".course-panel .noUi-target").all()
    assert len(tracks) > 20 and min(track.bounding_box()["width"] for track in tracks) >= 30  # there is a way to slide
