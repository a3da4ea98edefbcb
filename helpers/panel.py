"""What the panels share: controls with a CSS class, their layout, and the one place where a move begins and ends.

No `Output` widget, no print, no thread: what a panel shows is the value of an `HTML` widget, which works the same in
JupyterLab and in Colab.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets

from virtual_gpu.cards import CATALOG
from virtual_gpu.frames import clear_frames
from virtual_gpu.language import tr
from virtual_gpu.models.configs import DEFAULT_MODEL, architectures
from virtual_gpu.step.optimizers import OPTIMIZERS

from .gpu import current_gpu, release_memory

WIDE = {"width": "calc(100% - 4px)", "max_width": "340px", "min_width": "0"}  # a narrow output cuts no value off
# What is shown of the setting before is faded as soon as a move begins, but not for a move that is done in a tenth of a
# second. A picture and a table scroll inside themselves; Korean is not broken inside words.
_LOOK = """<style>
.course-panel { word-break: keep-all }
.course-panel .course-shown { overflow-x: auto; transition: opacity .15s }
.course-panel .course-shown svg { min-width: 560px }
.course-panel .course-shown table { white-space: nowrap }
.course-panel.course-busy .course-shown { opacity: .35; transition-delay: .1s }
.course-panel.course-busy { cursor: progress }
</style>"""
STYLE = {"description_width": "110px"}
ROW = {"flex_flow": "row wrap"}
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Panel(widgets.VBox):
    """Controls in two columns, a status line, a picture. A subclass has a `prefix` for its CSS classes and `_changed`.

    Its repr is fixed, so that notebooks can be compared.
    """

    prefix: str

    def __init__(self) -> None:
        super().__init__()
        self.add_class(f"{self.prefix}-panel").add_class("course-panel")
        self.controls: dict[str, Any] = {}
        self.status, self.picture = self.html("status"), self.html("picture")
        self._moving = False
        self._loop = _loop_of_the_main_thread()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def values(self) -> dict[str, Any]:
        """What is chosen, by the names of `controls`."""
        return {name: control.value for name, control in self.controls.items()}

    # -- what it is made of ----------------------------------------------------------------------------------------

    def control(
        self, kind: Any, name: str, description: str, changed: Callable[[], None] | None = None, **arguments: Any
    ) -> Any:
        """A control of class `prefix-name`; `changed`, or else `_changed`, follows its value once that is settled."""
        if "continuous_update" in kind.class_trait_names():
            arguments.setdefault("continuous_update", False)
        if "tooltip" in kind.class_trait_names():  # from ipywidgets 8 on, where none is shown as "null"
            arguments.setdefault("tooltip", description)
        control = kind(description=description, **{"layout": WIDE, "style": STYLE, **arguments})
        control.add_class(f"{self.prefix}-{name}")
        control.observe(lambda _: self.move(changed or self._changed), names="value")
        return control

    def button(self, name: str, description: str, pressed: Callable[[], None], **arguments: Any) -> widgets.Button:
        """A button of class `prefix-name`; a click that comes while it is disabled is dropped."""
        button = widgets.Button(description=description, **arguments)
        button.add_class(f"{self.prefix}-{name}")
        button.on_click(lambda _: None if button.disabled else self.move(pressed))
        return button

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
        self.children = [widgets.HTML(_LOOK), *lines, self.status, *shown]

    # -- a move ----------------------------------------------------------------------------------------------------

    def move(self, method: Callable[[], None]) -> None:
        """Do what a control asks for. It ends in a result or in one line; it runs in the main thread.

        JupyterLab sends widgets' messages to a thread of the kernel (a subshell), where the notebook's stop button is
        not heard and a cell may run at the same time: from there the move is handed over to wait for its turn.
        """
        if self._loop is None or _in_main_thread():
            self._move(method)
        else:
            self._loop.call_soon_threadsafe(self._move, method)

    def _move(self, method: Callable[[], None]) -> None:
        if self._moving:  # the move sets a control itself
            method()
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
            clear_frames(interrupt)  # they hold what lay in memory
            release_memory(current_gpu())
            self.clear()
            stopped = tr(ko="중단했다. 메모리는 모두 돌려주었다.", en="Stopped; all memory was given back.")
            self.status.value = status_line(stopped)
        except (ValueError, ImportError, OSError, RuntimeError) as error:
            self.clear()
            self.status.value = error_line(str(error))
        except Exception as error:  # a defect, whose traceback belongs into the notebook's log
            self.clear()
            self.status.value = error_line(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._moving = False
            self.remove_class("course-busy")
            listen(handler)

    def _changed(self) -> None:
        raise NotImplementedError

    def show(self, *lines: str, picture: Any) -> None:
        """The result of a move: lines of status and a picture."""
        self.picture.value = picture._repr_svg_()
        self.status.value = "".join(map(status_line, lines))  # last: what it tells of is there to be seen

    def clear(self) -> None:
        """Show nothing, and forget what was shown: the move has no result."""
        self.picture.value = ""


def status_line(text: str) -> str:
    """A line of a panel's status, as HTML."""
    return f'<p role="status" style="margin:4px 0"><b>{escape(text)}</b></p>'


def error_line(text: str) -> str:
    """What went wrong, in place of a result, as HTML."""
    return f'<p role="alert" style="margin:4px 0;color:#d55e00"><b>{escape(text)}</b></p>'


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _loop_of_the_main_thread() -> asyncio.AbstractEventLoop | None:
    """A kernel's event loop, where a cell is running in it; None in a script."""
    try:
        return asyncio.get_running_loop() if _in_main_thread() else None
    except RuntimeError:
        return None
