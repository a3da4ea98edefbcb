"""What hands can do to a panel, drawn by hypothesis, and what must be seen after each of their moves."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as widgets
import odd_inputs as odd
from hypothesis import strategies as st
from process_state import random_numbers

import helpers
from helpers.chapters.c7_split.panel import pipeline_panel
from helpers.chapters.c7_split.pipeline import PipelineRun, Work
from helpers.gpu import current_gpu
from helpers.panel import Panel
from virtual_gpu.language import language

PANELS = (*(name for name in helpers.__all__ if name.endswith("_panel")), "pipeline_panel")
LONGEST_LINE = 3000  # characters of what a panel says: the names of all models that it knows are 2,200
_SILLY = (
    "0", "-1", "8", "64", "abc", "팔", "3.5", "1/0", "1/3", "9" * 40, "9" * 5000, "1e999999999", "８", "\n", "None",
)  # fmt: skip
_INTEGERS = (-(10**9), -1, 0, 1, 2, 3, 7, 30, 10**9)
_FLOATS = (-1e308, -1.0, 0.0, 0.5, 1.0, 1e308, float("inf"), float("nan"))

Move = tuple[int, float, str]  # which control, where between its ends, what is typed into it


def moves(most: int, least: int = 0) -> st.SearchStrategy[list[list[Move]]]:
    """Groups of moves: what is in one group is changed before the panel has answered to the first of it."""
    typed = st.one_of(st.sampled_from(_SILLY), odd.NAMES, odd.logs().map(lambda data: data.decode("utf-8", "replace")))
    move = st.tuples(st.integers(0, 99), st.floats(0, 1), typed)
    return st.lists(st.one_of(move.map(lambda one: [one]), st.lists(move, min_size=2, max_size=4)),
                    min_size=least, max_size=most)  # fmt: skip


def parts(widget: Any) -> Iterator[Any]:
    """A widget and everything in it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from parts(child)


def controls_of(panel: Panel) -> list[Any]:
    """What a hand can move."""
    still = widgets.Box | widgets.HTML | widgets.Label
    return [part for part in parts(panel) if not isinstance(part, still) and hasattr(part, "description")]


def move(widget: Any, where: float, typed: str) -> None:
    """Do what a hand can do to a control: any value that it can take, any text, a double click."""

    def one_of(values: Any) -> Any:
        return values[min(int(where * len(values)), len(values) - 1)]

    match widget:
        case widgets.Button():
            widget.click()
            widget.click()
        case widgets.Checkbox() | widgets.ToggleButton():
            widget.value = where < 0.5
        case widgets.Text() | widgets.Textarea():  # a Combobox is a Text
            widget.value = typed
        case widgets.SelectionSlider() | widgets.Dropdown() | widgets.ToggleButtons() | widgets.RadioButtons():
            if widget.options:
                widget.index = one_of(range(len(widget.options)))
        case widgets.IntSlider() | widgets.BoundedIntText() | widgets.Play():
            widget.value = one_of(range(widget.min, widget.max + 1))
        case widgets.FloatSlider():
            widget.value = widget.min + where * (widget.max - widget.min)
        case widgets.IntText():
            widget.value = one_of(_INTEGERS)
        case widgets.FloatText():
            widget.value = one_of(_FLOATS)
        case _:
            raise AssertionError(f"nobody knows how to move a {type(widget).__name__}")


class Later:
    """The loop of a kernel's main thread, which is busy: what is handed over to it waits."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[..., None], tuple]] = []

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: Any) -> None:
        self.waiting.append((function, arguments))

    def goes_on(self) -> None:
        while self.waiting:
            function, arguments = self.waiting.pop(0)
            function(*arguments)


def drive(name: str, groups: list[list[Move]]) -> None:
    """Make a panel and move its controls; AssertionError where something is not as it must be."""
    before, numbers = current_gpu().memory_allocated(), random_numbers()
    _moved(made(name), groups)
    gc.collect()
    assert current_gpu().memory_allocated() == before
    assert random_numbers() == numbers, "the reader's next random numbers are others"


def made(name: str) -> Panel:
    """The panel of this name, as a notebook's cell makes it; a pipeline's has a schedule to show."""
    if name != "pipeline_panel":
        return getattr(helpers, name)()
    orders = {"GPipe": ("F0 F1 B0 B1", "F0 F1 B0 B1"), "1F1B": ("F0 F1 B0 B1", "F0 B0 F1 B1")}
    return pipeline_panel(
        {
            name: [
                PipelineRun(order=[Work(word[0], rank, int(word[1:])) for word in order.split()])
                for rank, order in enumerate(both)
            ]
            for name, both in orders.items()
        }
    )


def _moved(panel: Panel, groups: list[list[Move]]) -> None:
    errors, hand_over = [], panel.move

    def noted(method: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            try:
                method()
            except Exception as error:
                errors.append(error)
                raise

        return call

    panel.move = lambda method, *came: hand_over(noted(method), *came)
    panel._loop = later = Later()
    is_readable(panel)
    said = repr(panel)
    for group in groups:
        # The messages of a browser come to another thread; a single one is answered before the next comes.
        thread = threading.Thread(target=_move_all, args=(panel, group))
        thread.start()
        thread.join()
        later.goes_on()
        ends_well(panel)
        for error in errors:
            assert odd.is_clear(error), f"{type(error).__name__} in the panel's line: {error}"
        errors.clear()
    assert repr(panel) == said, "a notebook's stored output would change with every move"
    for part in [*parts(panel)]:  # ipywidgets keeps what is not closed
        part.close()


def _move_all(panel: Panel, group: list[Move]) -> None:
    for which, where, typed in group:
        controls = controls_of(panel)
        control = controls[which % len(controls)]
        if not getattr(control, "disabled", False):
            move(control, where, typed)


def ends_well(panel: Panel) -> None:
    """A picture or one clear line, in words that can be sent, and nothing of what was typed as it stands."""
    shown = "".join(part.value for part in parts(panel) if isinstance(part, widgets.HTML))
    shown.encode("utf-8")  # as a message to the browser
    lines = re.findall(r'role="(?:status|alert)"[^>]*><b>(.*?)</b>', panel.status.value, re.DOTALL)
    assert lines and all(line.strip() for line in lines), "the panel says nothing"
    assert max(map(len, lines)) <= LONGEST_LINE, f"a line of {max(map(len, lines))} characters: {lines[0][:100]}"
    assert "Traceback" not in panel.status.value and "&lt;opaque" not in shown
    assert odd.MARK not in shown and "<script" not in shown
    if 'role="alert"' in panel.status.value:
        assert len(lines) == 1 and panel.picture.value == "", "an error beside a picture"
        assert language() == "en" or re.search("[가-힣]", lines[0]), f"not in Korean: {lines[0]}"
    for control in controls_of(panel):  # a run that ended leaves its buttons to press
        assert not (isinstance(control, widgets.Button) and control.disabled)


def is_readable(panel: Panel) -> None:
    """Whether everybody can read it and use it without a mouse."""
    assert ("실행하면" if language() == "ko" else "is run") in repr(panel)
    assert 'role="status"' in panel.status.value
    if panel.prefix != "doctor":  # it shows words, and none before it is asked
        assert re.search(r'<svg [^>]*role="(?:img|group)" aria-label="[^"]{5,}"', panel.picture.value)
    controls = controls_of(panel)
    assert controls
    for control in controls:
        assert control.description.strip() and control.tabbable is not False
        assert any(css.startswith(f"{panel.prefix}-") for css in control._dom_classes)
