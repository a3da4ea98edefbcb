"""Replacing attributes for a while, and putting back exactly what was there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from ..interrupts import interrupts_later

_ABSENT = object()
_OURS = __name__.partition(".")[0]


class Patches:
    """A stack of replaced attributes and mapping entries; `undo` puts everything back, the last one first.

    What an owner did not have itself (a class inherits it, a module lacks it) is deleted again. A module that is first
    imported meanwhile may bind a replacement by name (`from safetensors.torch import save_file`), for good: there too
    stands afterwards what was replaced.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._set: list[tuple[Any, str, Any]] = []  # (owner, name, what it was)
        self._replaced: dict[int, tuple[Any, Any]] = {}  # id of a function of ours -> (it, what it stands for)

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
            if isinstance(owner, ModuleType) and isinstance(value, FunctionType) and value.__module__.startswith(_OURS):
                self._replaced[id(value)] = value, self._replaced.get(id(before), (None, before))[1]
        self._set.append((owner, name, before))
        setattr(owner, name, value)
        return found

    def originals(self) -> dict[int, Any]:
        """Functions and types that were replaced, by `id`."""
        return {id(before): before for _, _, before in self._set if callable(before)}

    def original(self, owner: Any, name: str) -> Any:
        """What `owner.name` was, where it was replaced."""
        return next(before for place, known, before in self._set if place is owner and known == name)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """In here attributes are what they were before; afterwards what they were when it began."""
        now = []
        with interrupts_later():
            for owner, name, before in reversed(self._set):
                now.append((owner, name, vars(owner).get(name, _ABSENT)))
                _put(owner, name, before)
        try:
            yield
        finally:
            with interrupts_later():
                for entry in reversed(now):
                    _put(*entry)

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
            self._set.clear()
            if self._replaced:
                self._undo_copies()
                self._replaced.clear()

    def _undo_copies(self) -> None:
        """Put back what modules of others have bound by name."""
        for path, module in list(sys.modules.items()):
            names = {} if path.startswith(_OURS) else getattr(module, "__dict__", {})
            for name, value in list(names.items()):
                if id(value) in self._replaced:
                    names[name] = self._replaced[id(value)][1]


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
