"""Replacing attributes for a while, and putting back exactly what was there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from ..interrupts import interrupts_later

_ABSENT = object()


class Patches:
    """A stack of replaced attributes and mapping entries; `undo` puts everything back, the last one first.

    What an owner did not have itself (a class inherits it, a module lacks it) is deleted again.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Make `owner.name` be `value`; what it was is returned (None where there was nothing)."""
        found, before = (
            getattr(owner, name, None),
            vars(owner).get(name, _ABSENT),
        )  # as stored: a staticmethod stays one
        if before is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)
        return found

    def set_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        """`set` for each name."""
        for name, value in values.items():
            self.set(owner, name, value)

    def set_item(self, mapping: MutableMapping, key: str, value: Any) -> None:
        """Make `mapping[key]` be `value`."""
        before = mapping.get(key, _ABSENT)
        if before is _ABSENT:
            self._undo.append(lambda: mapping.pop(key, None))
        else:
            self._undo.append(lambda: mapping.__setitem__(key, before))
        mapping[key] = value

    def append(self, values: list, value: Any) -> None:
        """Append to a list, or change nothing where it is in there."""
        if value not in values:
            self._undo.append(lambda: values.remove(value))
            values.append(value)

    def later(self, undo: Callable[[], Any]) -> None:
        """Call `undo` at its turn."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put back what was there before, all of it, also where Ctrl+C comes meanwhile."""
        with interrupts_later():
            while self._undo:
                self._undo.pop()()
