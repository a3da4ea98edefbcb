"""What the panels share: controls with a CSS class, their layout, and the one place where a move begins and ends.

No `Output` widget, no print, no thread: what a panel shows is the value of an `HTML` widget, which works the same in
JupyterLab and in Colab. What a setting gives is computed by `Panel.answer` from its arguments alone, so that it can be
kept, and computed before it is asked for (`ahead`).
"""

from __future__ import annotations

import asyncio
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

import ipywidgets as widgets

from virtual_gpu.cards import CATALOG
from virtual_gpu.errors import UnknownName
from virtual_gpu.frames import clear_frames
from virtual_gpu.language import tr
from virtual_gpu.models.configs import DEFAULT_MODEL, architectures
from virtual_gpu.step.optimizers import OPTIMIZERS

from .ahead import EXPECTED, Ahead, nearby
from .gpu import current_gpu, release_memory
from .spoken import spoken

WIDE = {"width": "calc(100% - 4px)", "max_width": "340px", "min_width": "0"}  # a narrow output cuts no value off
# What is shown of the setting before is faded as soon as a move begins, but not for a move that is done in a tenth of a
# second; so is what was found for another setting, until a button is pressed. A picture and a table scroll inside
# themselves, and the text beside them keeps to the page; Korean is not broken inside words. On a narrow page the label
# of a slider gives way, not its track, and so does the room before a checkbox.
_LOOK = """<style>
.course-panel { word-break: keep-all }
.course-panel .course-shown { overflow-x: auto; transition: opacity .15s }
.course-panel .course-shown .widget-html-content { width: 100%; min-width: 0 }
.course-panel .course-shown svg { min-width: 560px; display: block }
.course-panel .course-shown table { white-space: nowrap }
.course-panel :is(.widget-slider, .widget-checkbox) .widget-label { flex-shrink: 1; min-width: 0 }
.course-panel .widget-checkbox { height: auto }
.course-panel .widget-checkbox .widget-label-basic { white-space: normal; height: auto; line-height: 1.4 }
.course-panel .widget-slider .slider-container { flex: 1 1 3em; min-width: 3em }
.course-panel .widget-slider .widget-readout { flex-shrink: 1; min-width: 4em }
.course-panel.course-busy .course-shown { opacity: .35; transition-delay: .1s }
.course-panel.course-old .course-shown:not(.course-lasting) { opacity: .35 }
.course-panel.course-busy { cursor: progress }
.course-panel .course-working { visibility: hidden; margin: 0; height: 0; overflow: visible; text-align: right }
.course-panel.course-busy .course-working { visibility: visible; transition: visibility 0s .3s }
</style>"""
STYLE = {"description_width": "110px"}
ROW = {"flex_flow": "row wrap"}
ANSWERS, TRACES = 256, 48  # kept of each panel; a trace is half a megabyte, of the largest models three
LONG = 200  # characters of a list of names
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Answer(NamedTuple):
    """What a setting gives: lines for the status, and what draws itself (`_repr_svg_`)."""

    lines: tuple[str, ...]
    picture: Any


class Kept(dict):
    """A dict that forgets its oldest entries beyond `most`."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > self.most:
            del self[next(iter(self))]


class Panel(widgets.VBox):
    """Controls in two columns, a status line, a picture. A subclass has a `prefix` for its CSS classes and `answer`.

    Its repr is what a page without widgets shows, and a notebook whose kernel has ended.
    """

    prefix: str
    still = False  # whether the picture stands on a page without widgets too, as it is at first

    def __init__(self) -> None:
        super().__init__()
        self.add_class(f"{self.prefix}-panel").add_class("course-panel")
        self.controls: dict[str, Any] = {}
        self.status, self.picture = self.html("status").add_class("course-status"), self.html("picture")
        self._moving = False
        self._loop = _loop_of_the_main_thread()
        self._answers = Kept(ANSWERS)
        self.ahead = Ahead(self, self._loop)

    def __repr__(self) -> str:
        return tr(ko="조작 패널(이 셀을 실행하면 나타난다)", en="a panel (it appears when this cell is run)")

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        return bundle | {"image/svg+xml": self.picture.value} if bundle and self.still else bundle

    def values(self) -> dict[str, Any]:
        """What is chosen, by the names of `controls`."""
        return {name: control.value for name, control in self.controls.items()}

    def answer(self, **chosen: Any) -> Answer:
        """What these values of the controls give: of nothing else, and changing nothing. Errors say what is wrong."""
        raise NotImplementedError

    def answered(self, chosen: dict[str, Any]) -> Answer:
        """`answer`, kept."""
        key = tuple(chosen.items())
        if key not in self._answers:
            start = time.perf_counter()
            self._answers[key] = self.answer(**chosen)
            self.ahead.took(chosen, time.perf_counter() - start)
        return self._answers[key]

    def knows(self, chosen: dict[str, Any]) -> bool:
        """Whether the answer is there already."""
        return tuple(chosen.items()) in self._answers

    def pieces(self, **chosen: Any) -> Iterator[Callable[[], Any]]:
        """The work for an answer in pieces that leave room for a move between them; the last gives the answer."""
        if type(self).answer is not Panel.answer:  # some panels wait for a button
            yield partial(self.answered, chosen)

    def nearby(self, moved: Any = None) -> Iterator[dict[str, Any]]:
        """The settings that a hand can choose next, `moved` being the control that it moved last."""
        return nearby(self, moved)

    # -- what it is made of ----------------------------------------------------------------------------------------

    def control(
        self, kind: Any, name: str, description: str, changed: Callable[[], None] | None = None, **arguments: Any
    ) -> Any:
        """A control of class `prefix-name`, which `changed`, or else `_changed`, follows: a slider while it is dragged,
        a text once it is settled.
        """
        if "continuous_update" in kind.class_trait_names():
            arguments.setdefault("continuous_update", not issubclass(kind, widgets.Text | widgets.Textarea))
        if "tooltip" in kind.class_trait_names():  # from ipywidgets 8 on, where none is shown as "null"
            arguments.setdefault("tooltip", description)
        control = kind(description=description, **{"layout": WIDE, "style": STYLE, **arguments})
        control.add_class(f"{self.prefix}-{name}")
        control.observe(lambda _: self._moved(control, changed or self._changed), names="value")
        return control

    def button(self, name: str, description: str, pressed: Callable[[], None], **arguments: Any) -> widgets.Button:
        """A button of class `prefix-name`; a click that comes while it is disabled is dropped."""
        button = widgets.Button(description=description, **arguments)
        button.add_class(f"{self.prefix}-{name}")
        button.on_click(lambda _: None if button.disabled else self.move(pressed, time.monotonic()))
        return button

    def player(self, slider: widgets.IntSlider, interval_ms: int = 400) -> widgets.Play:
        """Buttons that move a slider on by themselves, in the page: each value comes as if it were dragged there."""
        play = widgets.Play(
            value=slider.value,
            min=slider.min,
            max=slider.max,
            interval=interval_ms,
            description=tr(ko="재생", en="play"),
        )
        play.add_class(f"{self.prefix}-play")
        widgets.jslink((play, "value"), (slider, "value"))
        widgets.dlink((slider, "max"), (play, "max"))
        return play

    def html(self, name: str) -> widgets.HTML:
        """A place to show something, of class `prefix-name`."""
        return widgets.HTML().add_class(f"{self.prefix}-{name}")

    def model(self, value: str = DEFAULT_MODEL, others: Sequence[str] = ()) -> widgets.Dropdown:
        """A model whose architecture the course has, or one of `others`."""
        options = [*architectures(), *others]
        return self.control(widgets.Dropdown, "model", tr(ko="모델", en="model"), options=options, value=value)

    def gpu(self, value: str = "T4") -> widgets.Dropdown:
        """A GPU of the catalogue."""
        return self.control(
            widgets.Dropdown,
            "gpu",
            "GPU",
            options=[name for name, spec in CATALOG.items() if spec.platform == "cuda"],
            value=value,
        )

    def batch(self, value: int, largest: int = 64) -> widgets.IntSlider:
        """A batch size in samples."""
        name = tr(ko="배치 크기", en="batch size")
        return self.control(widgets.IntSlider, "batch", name, value=value, min=1, max=largest)

    def length(self, value: int = 256, options: Sequence[int] = LENGTHS) -> widgets.SelectionSlider:
        """A sequence length in tokens."""
        name = tr(ko="길이(토큰)", en="length (tokens)")
        return self.control(widgets.SelectionSlider, "length", name, options=options, value=value)

    def optimizer(self, *first: tuple[str, str]) -> widgets.Dropdown:
        """An optimizer by its name; before those, `first`."""
        options = [*first, *((name, name) for name in OPTIMIZERS)]
        return self.control(widgets.Dropdown, "optimizer", tr(ko="옵티마이저", en="optimizer"), options=options)

    def checkpointing(self, value: bool = False) -> widgets.Checkbox:
        """Gradient checkpointing, on or off."""
        name = tr(ko="그레이디언트 체크포인팅", en="gradient checkpointing")
        return self.control(widgets.Checkbox, "checkpointing", name, value=value)

    def lay_out(
        self, left: Sequence[Any], right: Sequence[Any], *rows: Sequence[Any], shown: Sequence[Any] = ()
    ) -> None:
        """Two columns of controls, rows of more, the status, and `shown`, which is the picture if nothing is named."""
        column = {"width": "352px", "max_width": "100%", "min_width": "0"}
        columns = widgets.VBox(list(left), layout=column), widgets.VBox(list(right), layout=column)
        lines = [widgets.HBox(list(line), layout=ROW) for line in (columns, *rows)]
        shown = [one.add_class("course-shown") for one in shown or [self.picture]]
        working = tr(ko="계산하는 중… 멈추려면 노트북의 ■", en="Working… stop: the notebook's ■")
        look = f'{_LOOK}{spoken()}<p class="course-working" aria-hidden="true">{escape(working)}</p>'
        self.children = [widgets.HTML(look), *lines, self.status, *shown]

    # -- a move ----------------------------------------------------------------------------------------------------

    def _moved(self, control: Any, changed: Callable[[], None]) -> None:
        """A hand, or the program, has changed a control."""
        came = time.monotonic()
        self.move(changed, came)
        self.ahead.begin(control, came)

    def move(self, method: Callable[[], None], came: float = math.inf) -> None:
        """Do what a control asks for. It ends in a result or in one line; it runs in the main thread.

        JupyterLab sends widgets' messages to a thread of the kernel (a subshell), where the notebook's stop button is
        not heard and a cell may run at the same time: from there the move is handed over to wait for its turn. A stop
        that is heard meanwhile is its own, if it `came` from a hand before that (time.monotonic()).
        """
        if self._loop is None or _in_main_thread():
            self._move(method, came)
        else:
            self._loop.call_soon_threadsafe(self._move, method, came)

    def _move(self, method: Callable[[], None], came: float) -> None:
        if self._moving:  # the move sets a control itself
            method()
            return
        self.ahead.rest()
        if self.ahead.is_stopped(came):
            self._say_stopped()
            return
        handler = signal.getsignal(signal.SIGINT)
        listen = partial(signal.signal, signal.SIGINT) if _in_main_thread() else lambda _: None
        self._moving = True
        self.add_class("course-busy")
        try:
            try:
                listen(signal.default_int_handler)  # between cells the kernel ignores it
                method()
            finally:
                listen(signal.SIG_IGN)  # once is enough: what follows puts things in order
        except KeyboardInterrupt as interrupt:
            self.ahead.stop()
            clear_frames(interrupt)  # they hold what lay in memory
            self._say_stopped()
        except EXPECTED as error:
            self.clear()
            said, *choices = _in_parts(error)
            self.status.value = error_line(self._in_its_words(said), *choices)
        except Exception as error:  # a defect, whose traceback belongs into the notebook's log
            self.clear()
            self.status.value = error_line(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._moving = False
            self.remove_class("course-busy")
            listen(handler)

    def _say_stopped(self) -> None:
        release_memory(current_gpu())
        self.clear()
        stopped = tr(ko="중단했다. 메모리는 모두 돌려주었다.", en="Stopped; all memory was given back.")
        self.status.value = status_line(stopped)

    def _in_its_words(self, text: str) -> str:
        """An argument's name at the beginning of an error as the control's label says it."""
        begins = re.match(r"(\w+)(=|: )", text)
        name, rest = ("", text) if begins is None else (begins[1], text[begins.end() :])
        its = (one for key, one in self.controls.items() if name == key or name.startswith(f"{key}_"))
        if (control := next(its, None)) is None:
            return text
        return f"{control.description}{' ' if begins[2] == '=' else ': '}{rest}"

    def _changed(self) -> None:
        answer = self.answered(self.values())
        self.show(*answer.lines, picture=answer.picture)

    def show(self, *lines: str, picture: Any) -> None:
        """The result of a move: lines of status and a picture."""
        self.picture.value = picture._repr_svg_()
        self.picture.layout.min_height = None
        self.status.value = "".join(map(status_line, lines))  # last: what it tells of is there to be seen

    def clear(self) -> None:
        """Show nothing, and forget what was shown: the move has no result. What stands below stays where it is."""
        if height := re.match(r'<svg[^>]* height="(\d+)"', self.picture.value):
            self.picture.layout.min_height = f"{height[1]}px"
        self.picture.value = ""


def status_line(text: str) -> str:
    """A line of a panel's status, as HTML."""
    return f'<p role="status" style="margin:4px 0"><b>{escape(text)}</b></p>'


def error_line(text: str, choices: str = "") -> str:
    """What went wrong, in place of a result, as HTML; `choices` unfold below it."""
    look = "margin:4px 0;padding:2px 6px;background:#fff1e6;color:#8a3b00"  # can be read in either theme
    said = f'<p role="alert" style="{look}"><b>{escape(text)}</b></p>'
    if not choices:
        return said
    head = tr(ko="쓸 수 있는 값 모두", en="All that there are")
    return f"{said}<details><summary>{escape(head)}</summary>{escape(choices)}</details>"


def _in_parts(error: Exception) -> tuple[str, ...]:
    """What an error says; a list of names that would fill the screen apart."""
    if isinstance(error, UnknownName) and len(error.choices) > LONG:
        return error.said, error.choices
    return (str(error),)


def whole(text: str) -> int | str:
    """A whole number that was typed; anything else as it is, of which the check of the value says what is wrong."""
    typed = text.strip()
    is_one = typed.isascii() and typed.removeprefix("-").isdecimal() and len(typed) <= 20  # int() refuses 4,301 digits
    return int(typed) if is_one else text


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _loop_of_the_main_thread() -> asyncio.AbstractEventLoop | None:
    """A kernel's event loop, where a cell is running in it; None in a script."""
    try:
        return asyncio.get_running_loop() if _in_main_thread() else None
    except RuntimeError:
        return None
