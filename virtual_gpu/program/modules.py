"""Which module is running, by the name that the whole model has for it, and which line of the program called it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from .frames import is_program
from .patches import Patches


@dataclass(slots=True, eq=False)
class Name:
    """A module's name. It grows where a module turns out to be part of another one, for all who hold it."""

    text: str


@dataclass(slots=True)
class _Call:
    name: Name
    line: tuple[str, int] | None = None  # of the program, outside of this call


NOWHERE = Name("")


class _Here(threading.local):
    """The modules that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class Modules:
    """The modules of a program, found as they are called; `roots` are those that belong to no other."""

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, Name] = weakref.WeakKeyDictionary()
        self._here = _Here()

    def install(self, patches: Patches, begins: Callable[[nn.Module], Any]) -> None:
        """Follow every call. begins: told of a module that is called from outside any other."""
        call, here, name_of = nn.Module.__call__, self._here, self.name_of

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls = here.calls
            if not calls:
                begins(module)
            calls.append(_Call(name_of(module)))
            try:
                return call(module, *args, **kwargs)
            finally:
                calls.pop()

        self._code = __call__.__code__
        patches.set(nn.Module, "__call__", __call__)

    @property
    def running(self) -> Name:
        """The innermost module that runs."""
        calls = self._here.calls
        return calls[-1].name if calls else NOWHERE

    def line(self, frame: FrameType | None) -> tuple[str, int]:
        """(file, line) of the program's innermost frame; ("", 0) where none is running.

        What lies outside of a module's call stands still until the call ends: it is looked for once.
        """
        known_calls, passed, found = self._here.calls, [], ("", 0)
        calls = len(known_calls)
        while frame is not None:
            code = frame.f_code
            if code is self._code and calls:
                calls -= 1
                known = known_calls[calls]
                if known.line is not None:
                    found = known.line
                    break
                passed.append(known)
            elif is_program(code):
                found = code.co_filename, frame.f_lineno
                break
            frame = frame.f_back
        for one in passed:
            one.line = found
        return found

    def name_of(self, module: nn.Module) -> Name:
        """A module's name; its class's where it belongs to none that is known."""
        known = self._names.get(module)
        return Name(type(module).__name__) if known is None else known

    def add(self, root: nn.Module) -> bool:
        """Name a module and its parts; False where it is part of a known one, or known itself."""
        if root in self._names:
            return False
        for name, part in root.named_modules():
            self._names.setdefault(part, Name("")).text = name or type(part).__name__
            self.roots.discard(part)
        self.roots.add(root)
        return True

    def find(self) -> None:
        """Look for all modules that there are, so that each is named as part of the largest one that holds it."""
        alive = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        # also of those that another thread is making
        parts = {id(child) for module in alive for child in list(vars(module).get("_modules", {}).values())}
        for module in alive:
            if id(module) not in parts and module not in self.roots and any(True for _ in module.parameters()):
                self._names.pop(module, None)
                self.add(module)
