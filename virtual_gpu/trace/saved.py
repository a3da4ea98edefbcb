"""A run in a file: its trace, with what each block was for and where it was asked for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WrongValue
from ..language import tr
from ..units import path_of
from .histories import LARGEST_FILE, MOST_BYTES, WRONG_FORM, read_histories
from .timeline import CATEGORIES
from .trace import Trace

SCHEMA = 1  # of the JSON; it grows when a name changes its meaning
_COLUMNS = ("born", "nbytes", "held", "category", "span", "stream", "kind", "place")


@dataclass(frozen=True)
class Saved:
    """A trace with names: kind, place and operation have, for each entry, an index into kinds, places and operations.

    start: so many entries stand for what was there before the recording. rules: those of CUDA's that had a say
    (`rules.active.ActiveRules.acted`); None where that is not known, as of a card.
    """

    trace: Trace
    kinds: tuple[str, ...]
    kind: np.ndarray
    places: tuple[str, ...]
    place: np.ndarray
    operations: tuple[str, ...] = ("",)
    operation: np.ndarray | None = None
    start: int = 0
    rules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.operation is None:
            object.__setattr__(self, "operation", np.zeros(len(self.trace), dtype=np.int64))

    def phase_of(self, entry: int) -> str:
        """The phase in which an entry came; "" outside of all."""
        span = int(self.trace.span[entry])
        return self.trace.names[span // 2] if span % 2 else ""

    def kind_of(self, entry: int) -> str:
        """What the block of an entry was for."""
        return self.kinds[self.kind[entry]]

    def place_of(self, entry: int) -> str:
        """The line, and the module, that asked for the block of an entry."""
        return self.places[self.place[entry]]

    def operation_of(self, entry: int) -> str:
        """The operation that asked for the block of an entry; "" where none did, or none is known."""
        return self.operations[self.operation[entry]]

    def json(self) -> dict[str, Any]:
        """In JSON's types; `read` takes it back."""
        columns = {name: getattr(self.trace, name, getattr(self, name, None)).tolist() for name in _COLUMNS}
        names = {"phases": self.trace.names, "categories": CATEGORIES, "kinds": self.kinds, "places": self.places}
        later = {"operations": self.operations, "operation": self.operation.tolist(), "start": self.start}
        return {"schema": SCHEMA, **names, **columns, **later, "rules": self.rules}


def read(path: str | Path) -> Saved:
    """A run that was saved as JSON, or PyTorch's own memory snapshot; WrongValue where it is neither."""
    path = path_of(path)
    if not os.path.isfile(path):  # no error for a name that can be no path
        raise WrongValue(tr(ko=f"{path}: 그런 파일이 없다.", en=f"{path}: no such file."))
    if path.suffix != ".json":
        histories = read_histories(path)
        if not histories:
            raise WrongValue(tr(ko=f"{path}: GPU의 기록이 없다.", en=f"{path}: the history of no GPU."))
        trace = histories[0].trace()
        one = np.zeros(len(trace), dtype=np.int64)
        places, place = np.unique(np.array(histories[0].places(), dtype=object), return_inverse=True)
        start = int(np.searchsorted(trace.span, 1))
        return Saved(trace, ("activations",), one, (*places.tolist(), ""), place, start=start)
    if path.stat().st_size > LARGEST_FILE:
        raise WrongValue(tr(ko=f"{path}: 너무 크다.", en=f"{path}: too large."))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["trace"]
        if found["schema"] != SCHEMA:
            raise WrongValue(tr(ko=f"{path}: 다른 판의 파일이다.", en=f"{path}: a file of another schema."))
        columns = {name: np.array(found[name], dtype=np.int64) for name in _COLUMNS}
        kind, place = columns.pop("kind"), columns.pop("place")
        operation = None if found.get("operation") is None else np.array(found["operation"], dtype=np.int64)
        rules = None if found.get("rules") is None else tuple(found["rules"])
        saved = Saved(
            Trace(names=tuple(found["phases"]), **columns), tuple(found["kinds"]), kind, tuple(found["places"]), place,
            tuple(found.get("operations", ("",))), operation, found.get("start", 0), rules,
        )  # fmt: skip
        _check(saved)
    except WrongValue:
        raise
    except (*WRONG_FORM, OSError) as error:
        raise WrongValue(tr(ko=f"{path}: 저장된 실행이 아니다.", en=f"{path}: not a saved run.")) from error
    return saved


def _check(saved: Saved) -> None:
    trace, entries = saved.trace, np.arange(len(saved.trace))
    columns = (trace.nbytes, trace.held, trace.category, trace.span, trace.stream, saved.kind, saved.place)
    columns += (saved.operation,)
    tops = ((saved.kind, len(saved.kinds)), (saved.place, len(saved.places)), (trace.span, 2 * len(trace.names) + 1))
    tops += ((saved.operation, len(saved.operations)),)
    if any(column.shape != entries.shape or (column < 0).any() for column in (trace.born, *columns)):
        raise TypeError("columns of different lengths")
    if type(saved.start) is not int or not 0 <= saved.start <= len(trace):
        raise TypeError("a start that is no entry")
    texts = (*trace.names, *saved.kinds, *saved.places, *saved.operations, *(saved.rules or ()))
    if not all(isinstance(name, str) for name in texts):
        raise TypeError("a name that is no text")
    if (trace.nbytes >= MOST_BYTES).any() or (trace.held >= MOST_BYTES).any():
        raise TypeError("more bytes than any memory has")
    if (trace.born > entries).any() or any(len(column) and column.max() >= top for column, top in tops):
        raise TypeError("an index out of range")
    if not trace.allocates[trace.born].all():
        raise TypeError("a release of what was never allocated")
