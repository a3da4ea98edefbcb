"""Results that are remembered, and that another process may have found: a fork of this one, or an earlier one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Elsewhere(Protocol):
    """Where results stay when this process has ended."""

    def take(self, key: tuple) -> Any:
        """What is there under this key, once; None where nothing is."""

    def put(self, key: tuple, result: Any) -> None:
        """Keep a result."""


elsewhere: Elsewhere | None = None  # see `disk_cache`
_noted: dict[tuple, Any] | None = None  # see `noting`
_learned: dict[tuple, Any] = {}  # what another process found and nobody has asked for here yet, the oldest first
_MOST_LEARNED = 256  # of several MB at most


def remembered(function: Callable | None = None, /, *, maxsize: int = 512) -> Callable:
    """`functools.lru_cache`, to which `learn` can bring what the function gave in another process."""
    if function is None:
        return functools.partial(remembered, maxsize=maxsize)
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.lru_cache(maxsize=maxsize)
    @functools.wraps(function)
    def found(*arguments: Any, **named: Any) -> Any:
        key = name, arguments, tuple(sorted(named.items()))
        if (result := taken(key)) is not None:
            return result
        result = function(*arguments, **named)
        note(key, result)
        return result

    @functools.wraps(found)
    def call(*arguments: Any, **named: Any) -> Any:
        return found(*arguments, **named)

    def clear() -> None:
        found.cache_clear()
        forget(name)

    call.cache_clear, call.cache_info = clear, found.cache_info
    return call


def note(key: tuple, result: Any) -> None:
    """Tell whoever is `noting` what was found, and keep it `elsewhere`."""
    if _noted is not None:
        _noted[key] = result
    if elsewhere is not None:
        elsewhere.put(key, result)


def taken(key: tuple) -> Any:
    """What another process noted under this key, once; None where none did."""
    learned = _learned.pop(key, None)
    return elsewhere.take(key) if learned is None and elsewhere is not None else learned


@contextmanager
def noting() -> Iterator[dict[tuple, Any]]:
    """What is noted in this block, above all by functions that are `remembered`: for `learn` in another process."""
    global _noted
    before, _noted = _noted, {}
    try:
        yield _noted
    finally:
        _noted = before


def learn(noted: dict[tuple, Any]) -> None:
    """Take over what `noting` has of another process: it is found here without computing it."""
    _learned.update(noted)
    while len(_learned) > _MOST_LEARNED:
        del _learned[next(iter(_learned))]


def forget(name: str) -> None:
    """Forget what was learned under keys that begin with this name."""
    for key in [key for key in _learned if key[0] == name]:
        del _learned[key]
