"""Request after request of an operation: the virtual GPU's meter, or PyTorch's own history of allocations on a card."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .cases.run import MARK, Case
from .verdicts import blocks

_OPENING = MARK + 512  # bytes of an allocation with which the history of a run begins
# C++ frames that say nothing about who asked: what makes any tensor, and the way through the dispatcher.
_NOT_TOLD = (
    "at::detail::",
    "at::native::empty",
    "at::_ops::empty",
    "at::TensorBase",
    "at::cuda::detail",
    "torch::unwind",
    "torch::CapturedTraceback",
    "torch::autograd::Engine",
    "torch::cuda",
)


class Virtual:
    """The recorder of a virtual GPU's meter, for the time of a run."""

    def __init__(self, gpu: Any):
        self.gpu = gpu
        self._blocks: dict[int, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, Any]]:
        """Fill the row with what the block asks for."""
        self._blocks = {block: held.nbytes for block, held in self.gpu.meter.live_blocks().items()}
        self._requests, self._operations = [], []
        before, self.gpu.meter.recorder = self.gpu.meter.recorder, self
        row: dict[str, Any] = {}
        try:
            yield row
        finally:
            self.gpu.meter.recorder = before
            row["requests"], row["operations"] = _marked(self._requests, self._operations)

    def allocated(self, block: int, size: int, *_: Any) -> None:
        """Called by the meter."""
        self._blocks[block] = size
        self._requests.append(size)
        operation = self.gpu.mode.operation
        self._operations.append("" if operation is None else operation._opname)

    def freed(self, block: int) -> None:
        """Called by the meter."""
        self._requests.append(-self._blocks.pop(block, 0))
        self._operations.append("")

    def label(self, block: int, category: str) -> None:
        """Called by the meter; of no interest here."""


class Card:
    """PyTorch's own history of allocations, for the time of a run. stacks: with the C++ functions that asked."""

    def __init__(self, stacks: bool = False):
        self.settings: dict[str, Any] = {"context": None} if not stacks else {"context": "alloc", "stacks": "all"}
        with self.recording() as row:
            torch.empty(1000, dtype=torch.uint8, device="cuda")
        if blocks(row["requests"]) != [1024, -1024]:
            raise RuntimeError(f"PyTorch's history of 1000 bytes taken and given back: {row['requests']}")

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, Any]]:
        """Fill the row with what the block asks for."""
        torch.cuda.synchronize()
        row: dict[str, Any] = {}
        history = torch.cuda.memory._record_memory_history
        history("all", max_entries=1_000_000, clear_history=True, **self.settings)
        torch.empty(_OPENING, dtype=torch.uint8, device="cuda")
        count = torch.cuda.memory_stats()["allocation.all.allocated"]
        try:
            yield row
        finally:
            torch.cuda.synchronize()
            count = torch.cuda.memory_stats()["allocation.all.allocated"] - count
            events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            history(None)
            born: dict[int, int] = {}
            requests, operations = [], []
            for event in events:
                if event["size"] == _OPENING:  # what stood before it is an older run's
                    born, requests, operations = {}, [], []
                elif event["action"] == "alloc":
                    born[event["addr"]] = event["size"]
                    requests.append(event["size"])
                elif event["action"] == "free_requested":
                    requests.append(-born.pop(event["addr"], event["size"]))
                if len(operations) < len(requests):
                    operations.append(_functions(event.get("frames", ())))
            if sum(size > 0 for size in requests) != count:
                row["counted"] = count  # by the allocator itself: then the history is not the whole truth
            row["requests"], operations = _marked(requests, operations)
            if "stacks" in self.settings:
                row["operations"] = operations


def _functions(frames: Any, most: int = 7) -> list[str]:
    """PyTorch's functions on a stack, innermost first, and the innermost lines of Python outside this folder."""
    told, here = [], str(Path(__file__).resolve().parent)
    for frame in frames:
        name, file = frame["name"].split("(")[0].strip(), frame["filename"]
        if file.endswith(".py"):
            if not file.startswith((here, os.path.join(os.path.dirname(torch.__file__), "_"))):
                told.append(f"{Path(file).name}:{frame['line']} {name}")
        elif (
            name.startswith(("at::", "torch::")) and not name.startswith(_NOT_TOLD) and not name.endswith("redispatch")
        ):
            told.append(name[:100])
        if len(told) == most:
            break
    return told


def _marked(requests: list[int], operations: list) -> tuple[list[int], list]:
    """Each mark as a zero."""
    out: tuple[list[int], list] = ([], [])
    for size, operation in zip(requests, operations, strict=True):
        if size != -MARK:
            out[0].append(0 if size == MARK else size)
            out[1].append(operation)
    return out


def record_case(case: Case, recorder: Virtual | Card) -> dict[str, Any]:
    """The rows of a case: two runs of one that is written by hand, one of each of PyTorch's samples."""
    row: dict[str, Any] = {"case": case[0]}
    try:
        made = case[1]()
        row["runs"] = []
        for one in made if isinstance(made, list) else [made]:
            row["runs"] += [_record_run(one, recorder)] if isinstance(made, list) else _record_twice(one, recorder)
    except Exception as error:
        row["error"] = _said(error)
    return row


def _record_twice(run: Any, recorder: Virtual | Card) -> list[dict[str, Any]]:
    first = _record(run, recorder)
    if "error" in first:
        return [first]
    run.reset()
    second = _record(run, recorder)
    return [first] if first == second else [first, second]


def _record_run(make: Any, recorder: Virtual | Card) -> dict[str, Any]:
    try:
        run = make()
    except Exception as error:
        return {"error": _said(error)}
    return _record(run, recorder)


def _record(run: Any, recorder: Virtual | Card) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    error = None
    with recorder.recording() as row:
        try:
            run()
        except Exception as raised:
            error = _said(raised)
    row["peak"] = torch.cuda.max_memory_allocated() - before[0]
    row["reserved"] = torch.cuda.max_memory_reserved() - before[1]
    if error is not None:
        row["error"] = error
    return row


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {lines[0][:200] if lines else ''} [{Path(where.filename).name}:{where.lineno}]"
    traceback.clear_frames(error.__traceback__)  # the tensors in them are not to outlive it
    return said
