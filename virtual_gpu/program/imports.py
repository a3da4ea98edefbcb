"""What is to happen when the program imports a library: patches for it, or that it finds no CUDA while it loads."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from .patches import Patches

# They load a shared library or compile a kernel for the card that they find.
_WITHOUT_CUDA = ("bitsandbytes", "triton", "xformers")


class _Filled(importlib.abc.Loader):
    """Loads a module that a function fills."""

    def __init__(self, fill: Callable[[ModuleType], Any]):
        self.exec_module = fill

    def exec_module(self, module: ModuleType) -> None:
        """Replaced by what fills it; the import system looks for it on the class."""


class Imports(importlib.abc.MetaPathFinder):
    """An import hook: callbacks by module name, called once the module is loaded (now, where it is)."""

    def __init__(self, patches: Patches):
        self._after: dict[str, list[Callable[[ModuleType], Any]]] = {}
        self._stand_ins: dict[str, tuple[Callable[[ModuleType], Any], Callable[[], bool]]] = {}
        self._made: set[str] = set()
        self._patches = patches
        sys.meta_path.insert(0, self)
        patches.later(lambda: sys.meta_path.remove(self))

    def after(self, name: str, callback: Callable[[ModuleType], Any]) -> None:
        """Call `callback(module)` when the module of this name is loaded."""
        self._after.setdefault(name, []).append(callback)
        if name in sys.modules:
            callback(sys.modules[name])

    def stand_in(self, name: str, fill: Callable[[ModuleType], Any], wanted: Callable[[], bool]) -> None:
        """Where no such package is installed and `wanted()` says so, import a module that `fill` has filled."""
        self._stand_ins[name] = fill, wanted
        self._patches.later(lambda: sys.modules.pop(name, None) if name in self._made else None)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The import system's question."""
        if name in self._stand_ins and importlib.machinery.PathFinder.find_spec(name, path, target) is None:
            fill, wanted = self._stand_ins[name]
            if not wanted():
                return None
            self._made.add(name)
            return importlib.machinery.ModuleSpec(name, _Filled(fill))
        if name not in self._after and name not in _WITHOUT_CUDA:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with ExitStack() as stack:
                    if name in _WITHOUT_CUDA:
                        hidden = Patches()
                        stack.callback(hidden.undo)
                        hidden.set(torch.cuda, "is_available", lambda: False)
                        hidden.set(torch.version, "cuda", None)
                    load(module)
                for callback in self._after.get(name, ()):
                    callback(module)

            spec.loader.exec_module = exec_module
        return spec
