"""How far a long wait is, for whoever watches: lines on a terminal, in a notebook one line that changes and goes.

Where nobody watches (a file, a pipe) nothing is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.terminal import tell


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """A function that says how far the work of this block is, and how to stop it."""
    if not _in_a_cell():
        yield _on_a_terminal()
        return
    line: Any = None

    def told(text: str) -> None:
        nonlocal line
        if line is None:
            from IPython.display import display

            line = display({}, raw=True, display_id=True)  # nothing yet: what is displayed first is kept and compared
        stop = tr(ko=f"{text} (멈추려면 노트북의 ■)", en=f"{text} (the notebook's ■ stops)")
        line.update({"text/plain": stop, "text/html": f'<p role="status">{escape(stop)}</p>'}, raw=True)

    try:
        yield told
    finally:
        if line is not None:
            line.update({}, raw=True)


def _on_a_terminal() -> Callable[[str], None]:
    said = False

    def told(text: str) -> None:
        nonlocal said
        tell(text if said else tr(ko=f"{text} (멈추려면 Ctrl+C)", en=f"{text} (Ctrl+C stops)"))
        said = True

    return told


def _in_a_cell() -> bool:
    """Whether a notebook's cell is running: what a panel's control has asked for says itself that it works."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and kernel.get_parent().get("header", {}).get("msg_type") == "execute_request"
