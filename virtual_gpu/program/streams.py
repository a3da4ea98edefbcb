"""Streams, events and graphs: enough for a program to go on; on a virtual GPU everything happens at once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Stream:
    """A CUDA stream: everything on a virtual GPU happens at once, in the order of the program."""

    cuda_stream = stream_id = device_type = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.priority = priority
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_index = self.device.index

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        """Everything is done."""
        return True

    def record_event(self, event: Any = None) -> Event:
        """An event, which has happened."""
        return event or Event()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    synchronize = wait_event = wait_stream = _nothing

    def is_capturing(self) -> bool:
        """No graph is being captured."""
        return False


class Event(Stream):
    """A CUDA event; the time between two of them is not known and counts as 0.001 ms."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds; never zero, programs divide by it."""
        return 0.001

    record = wait = Stream._nothing


class CUDAGraph:
    """A graph that is captured and replayed by running nothing again; the memory of its pool is not modelled."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    capture_begin = capture_end = replay = reset = debug_dump = enable_debug_mode = _nothing

    def pool(self) -> tuple[int, int]:
        """The id of its memory pool."""
        return 0, 1


class graph(contextlib.nullcontext):
    """`torch.cuda.graph(…)`: the block runs once, as it stands."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
