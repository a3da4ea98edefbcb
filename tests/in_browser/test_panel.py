"""A panel in JupyterLab and Chromium: the stop button, changes during a run, and everything with the keyboard alone."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

GPT2, LARGE = "openai-community/gpt2", "meta-llama/Llama-3.1-70B"

# The CSS class of the control that has the focus, of those that the panel gave: "memory-batch".
FOCUSED = """panel => {
    const found = document.activeElement.closest(`.${panel}-panel [class*="${panel}-"]`);
    return found && [...found.classList].find(name => name.startsWith(`${panel}-`));
}"""
# The controls as they lie on the page: the left column from top to bottom, then the right one.
IN_ORDER = """panel => [...document.querySelectorAll(`.${panel}-panel [class*="${panel}-"]`)]
    .filter(part => part.matches("button") || part.querySelector("input, select, .noUi-handle"))
    .map(part => ({
        name: [...part.classList].find(name => name.startsWith(`${panel}-`)),
        column: part.parentElement.getBoundingClientRect().left,
        top: part.getBoundingClientRect().top,
    }))
    .sort((a, b) => a.column - b.column || a.top - b.top)
    .map(({ name }) => name)"""


@pytest.fixture(scope="module")
def page(open_notebook, tmp_path_factory):
    """One page and one kernel for all of them: each runs the cell anew, which makes a new panel."""
    path = tmp_path_factory.mktemp("page") / "panel.ipynb"
    source = "from helpers import memory_panel\n\nmemory_panel()"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[new_code_cell(source)], metadata={"kernelspec": kernel}), path)
    return open_notebook(path)


@pytest.fixture
def notebook(page):
    page.console_errors.clear()
    page.run_all()
    assert page.errors() == []
    return page


def stop(notebook):
    """The notebook's own button; its name in the toolbar is "interrupt"."""
    notebook.page.locator('[data-jp-item-name="interrupt"] >> visible=true').first.click()


def shown(notebook, *words):
    return notebook.wait_until_text(".memory-status", lambda text: all(word in text for word in words))


def test_a_run_is_stopped_and_the_next_move_works(notebook):
    notebook.choose(".memory-gpu", "H200")
    notebook.choose(".memory-model", LARGE)
    shown(notebook, "예측", "메모리 부족")
    notebook.choose(".memory-model", GPT2)
    shown(notebook, "예측", "들어간다")
    for _ in range(2):  # the second time the kernel hears of the button by another way than the first time
        notebook.choose(".memory-model", LARGE)
        shown(notebook, "메모리 부족")
        notebook.click(".memory-run")
        shown(notebook, "H200에서 실행하는 중")
        stop(notebook)
        shown(notebook, "중단했다", "메모리는 모두 돌려주었다")
        assert "<svg" not in notebook.html(".memory-picture")
        notebook.wait_until(lambda: notebook.find("button.memory-run").is_enabled(), "the button can be pressed")
        notebook.choose(".memory-model", GPT2)
        shown(notebook, "예측", "들어간다")
        notebook.click(".memory-run")
        shown(notebook, "실행 (H200)", "들어간다")
    assert notebook.errors() == [] and notebook.console_errors == []


def test_after_changes_during_a_run_the_last_counts(notebook):
    notebook.choose(".memory-gpu", "H200")
    notebook.choose(".memory-model", LARGE)
    shown(notebook, "메모리 부족")
    notebook.click(".memory-run")
    shown(notebook, "H200에서 실행하는 중")
    notebook.choose(".memory-model", GPT2)
    notebook.press_slider(".memory-batch", "ArrowRight", times=3)
    shown(notebook, "예측", "들어간다")
    notebook.wait_until(lambda: "gpt2 · 배치 7 " in notebook.html(".memory-picture"), "the last value of both")
    assert notebook.errors() == [] and notebook.console_errors == []


def test_the_keyboard_is_enough(notebook):
    page = notebook.page
    order = page.evaluate(IN_ORDER, "memory")
    assert (
        order[0] == "memory-model" and order[-3:] == ["memory-run", "memory-hold", "memory-look"] and len(order) == 10
    )

    def focused():
        return page.evaluate(FOCUSED, "memory")

    def tab_to(name):
        for _ in range(20):
            if focused() == name:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not come to {name}, but to {focused()}")

    # Tab goes through all of them, as they lie; a slider's number is a stop of its own. And back.
    notebook.find(".memory-model select").focus()
    visited = [focused()]
    while visited[-1] != order[-1] and len(visited) < 20:
        page.keyboard.press("Tab")
        visited.append(focused())
    assert list(dict.fromkeys(visited)) == order
    for name in reversed(visited[:-1]):
        page.keyboard.press("Shift+Tab")
        assert focused() == name

    # Each is moved by its keys, and the picture follows.
    def picture_with(words):
        notebook.wait_until(lambda: words in notebook.html(".memory-picture"), f"a picture with {words}")

    tab_to("memory-batch")
    page.keyboard.press("ArrowRight")
    picture_with("배치 5 ")
    tab_to("memory-length")
    page.keyboard.press("ArrowRight")
    picture_with("길이 512 ")
    tab_to("memory-optimizer")
    page.keyboard.press("s")  # a drop-down goes by letters, Home and End: JupyterLab takes the arrows for its cells
    picture_with("sgd")
    tab_to("memory-checkpointing")
    page.keyboard.press("Space")
    picture_with("체크포인팅")
    tab_to("memory-run")
    page.keyboard.press("Enter")
    shown(notebook, "실행 (T4)")
    notebook.screenshot("panel_by_keyboard", ".memory-panel")
    assert notebook.errors() == [] and notebook.console_errors == []


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_it_can_be_read_in_both_themes(notebook, theme):
    """The labels stand out against the page: a contrast of 4.5, as WCAG 2.2 (1.4.3) asks."""
    notebook.page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", theme)
    notebook.wait_until(
        lambda: notebook.page.evaluate("() => document.body.dataset.jpThemeName") == theme, f"the theme is {theme}"
    )
    notebook.page.wait_for_load_state("networkidle")
    for part in (".memory-batch label", ".memory-status b"):
        colours = notebook.find(part).evaluate(COLOURS)
        assert contrast(*colours) >= 4.5, (part, colours)
    notebook.screenshot(f"panel_{theme.split()[-1].lower()}", ".memory-panel")


# Of a part: its colour and that of the nearest background behind it, as [red, green, blue].
COLOURS = """part => {
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    let behind = part;
    while (behind.parentElement && (numbers(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0)
        behind = behind.parentElement;
    return [part, behind].map((node, i) =>
        numbers(getComputedStyle(node)[i ? "backgroundColor" : "color"]).slice(0, 3));
}"""


def contrast(one, other):
    """WCAG's contrast ratio of two colours of 0…255."""

    def luminance(colour):
        shares = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


WIDER_THAN_THE_PANEL = """() => {
    const panel = document.querySelector(".memory-panel").getBoundingClientRect();
    return [...document.querySelectorAll(".memory-panel [class*='memory-']")]
        .filter(part => part.getBoundingClientRect().right > panel.right + 1)
        .map(part => [part.className, part.getBoundingClientRect().right - panel.right]);
}"""


def test_a_late_result_shows_that_it_is_late_and_a_narrow_page_cuts_nothing_off(notebook):
    shown(notebook, "예측")
    page = notebook.page
    page.set_viewport_size({"width": 700, "height": 1000})
    page.wait_for_timeout(300)
    notebook.screenshot("panel_at_700_px")
    assert page.evaluate(WIDER_THAN_THE_PANEL) == []
    picture = page.locator(".memory-picture svg").bounding_box()
    assert picture["width"] >= 560  # it scrolls, and its words keep their size

    notebook.choose(".memory-gpu", "H200")
    notebook.choose(".memory-model", LARGE)
    page.wait_for_selector(".memory-panel.course-busy", timeout=20_000)
    shown(notebook, "메모리 부족")
    page.wait_for_selector(".memory-panel:not(.course-busy)", timeout=20_000)
    assert notebook.errors() == [] and notebook.console_errors == []
