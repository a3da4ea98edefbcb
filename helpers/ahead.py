"""A panel's next moves, computed while nobody moves anything.

A piece at a time on the kernel's own loop, between cells, in the main thread: the notebook's stop button is heard, a
move that comes meanwhile waits for one piece at most, and a page that nobody touches computes nothing. Where pieces are
long, as those of a large model, there is no next one. A stop is meant for what the hand moved last: one that meets a
piece stops the move that waits for it, too.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import ipywidgets as widgets

from virtual_gpu.frames import clear_frames

if TYPE_CHECKING:
    from .panel import Panel

EXPECTED = (ValueError, ImportError, OSError, RuntimeError)  # what ends a move in one line
IDLE_S = 0.25  # after a move, before the first piece
PAUSE_S = 0.02  # between two, for what else the kernel has to do
STEPS = 2  # of the slider that was moved last, in each direction; of the others one
LONG_S = 1.0  # for so long may a move wait for a piece that nobody asked for; in silence, the kernel cannot say a word
JUST_S = 0.2  # after a stop that met a piece; no hand is so quick, a move that comes by then was made before the stop
FEW = 8  # options of which each may be next; of longer lists a reader jumps anywhere

_STOPPED: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()  # a kernel's last stop


class Ahead:
    """Computes a panel's answers to the moves that a hand can make next; `loop`: the kernel's, None for never."""

    def __init__(self, panel: Panel, loop: asyncio.AbstractEventLoop | None):
        self._panel, self._loop = panel, loop
        self._timer: asyncio.TimerHandle | None = None
        self._pieces: Iterator[Callable[[], Any]] = iter(())
        self._took: dict[tuple, float] = {}  # what the menus say (a model, a card) -> a piece's seconds at most

    def stop(self, grace_s: float = 0.0) -> None:
        """The stop button was heard: all that a hand has asked for by now, in any panel, is not wanted any more."""
        if self._loop is not None:
            _STOPPED[self._loop] = time.monotonic() + grace_s

    def is_stopped(self, came: float) -> bool:
        """Whether a stop was heard after this moment, of time.monotonic()."""
        return self._loop is not None and came < _STOPPED.get(self._loop, -math.inf)

    def begin(self, moved: Any, came: float = math.inf) -> None:
        """Soon compute what is next to the present setting, the control that was moved last first; not where the move,
        which came at that moment, was stopped.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin, moved, came)

    def took(self, chosen: dict[str, Any], seconds: float) -> None:
        """So long the answer to a setting took, all its pieces."""
        if seconds > LONG_S:
            self._note(chosen, seconds / max(1, sum(1 for _ in self._panel.pieces(**chosen))))

    def rest(self) -> None:
        """Compute no more until the next `begin`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, moved: Any, came: float) -> None:
        self.rest()
        if self.is_stopped(came):
            return
        self._pieces = self.pieces(moved)
        self._timer = self._loop.call_later(IDLE_S, self._one)

    def pieces(self, moved: Any = None) -> Iterator[Callable[[], Any]]:
        """The work for the answers nearby that are not there, one piece after another."""
        if self._is_long(self._panel.values()):
            return
        for chosen in self._panel.nearby(moved):
            if not self._panel.knows(chosen) and not self._is_long(chosen):
                try:
                    for piece in self._panel.pieces(**chosen):
                        yield partial(self._timed, chosen, piece)
                except EXPECTED:  # no such setting: said if it is chosen
                    continue

    def _timed(self, chosen: dict[str, Any], piece: Callable[[], Any]) -> None:
        start = time.perf_counter()
        piece()
        self._note(chosen, time.perf_counter() - start)

    def _note(self, chosen: dict[str, Any], seconds: float) -> None:
        menus = self._menus(chosen)
        self._took[menus] = max(seconds, self._took.get(menus, 0.0))

    def _is_long(self, chosen: dict[str, Any]) -> bool:
        return self._took.get(self._menus(chosen), 0.0) > LONG_S

    def _menus(self, chosen: dict[str, Any]) -> tuple:
        controls = self._panel.controls
        return tuple(value for name, value in chosen.items() if isinstance(controls.get(name), widgets.Dropdown))

    def _one(self) -> None:
        self.rest()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # between cells the kernel ignores it
        try:
            piece = next(self._pieces, None)
            if piece is None:
                return
            piece()
        except KeyboardInterrupt as interrupt:
            self.stop(JUST_S)
            clear_frames(interrupt)
            return
        except EXPECTED as error:
            clear_frames(error)
        finally:
            signal.signal(signal.SIGINT, handler)
        self._timer = self._loop.call_later(PAUSE_S, self._one)


def nearby(panel: Panel, moved: Any = None) -> Iterator[dict[str, Any]]:
    """The settings that differ from the present one in one control by a step; of the one moved last by STEPS."""
    chosen = panel.values()
    first = [name for name, control in panel.controls.items() if control is moved]
    for name in [*first, *(name for name in panel.controls if name not in first)]:
        for value in _values(panel.controls[name], STEPS if name in first else 1):
            yield chosen | {name: value}


def _values(control: Any, steps: int) -> Iterator[Any]:
    """A slider's values up to so many steps away, the nearest first; of a short list each."""
    shifts = [sign * step for step in range(1, steps + 1) for sign in (1, -1)]
    match control:
        case widgets.Checkbox():
            yield not control.value
        case widgets.IntSlider():
            yield from (v for shift in shifts if control.min <= (v := control.value + shift) <= control.max)
        case widgets.SelectionSlider():
            places = (control.index + shift for shift in shifts)
            yield from (_value(control, place) for place in places if 0 <= place < len(control.options))
        case widgets.Dropdown() if len(control.options) <= FEW:
            yield from (_value(control, place) for place in range(len(control.options)) if place != control.index)


def _value(control: Any, place: int) -> Any:
    option = control.options[place]
    return option[1] if isinstance(option, tuple) else option
