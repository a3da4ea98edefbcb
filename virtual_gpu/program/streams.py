"""Streams, events and graphs: enough for a program to go on. Everything happens at once, in the program's order.

What a stream is for here is its pools of memory: a block that one stream freed serves no other.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda._utils import _get_device_index

if TYPE_CHECKING:
    from .device import ProgramGPU

_OF_A_PRIORITY = 32  # kStreamsPerPool (c10/cuda/CUDAStream.cpp): after as many, the first one is given out again


class Stream:
    """A CUDA stream: equal to others of its number and card. 0 is the default one."""

    device_type = 1

    def __init__(self, gpu: ProgramGPU, number: int = 0, priority: int = 0, card: int | None = None):
        self._gpu, self.priority = gpu, priority
        self._card = card  # of several in one process
        self.stream_id = self.cuda_stream = number
        self._outer: list[Any] = []

    @property
    def device(self) -> torch.device:
        """The card."""
        return torch.device("cuda", self.device_index)

    @property
    def device_index(self) -> int:
        """Of the card."""
        return self._gpu.index if self._card is None else self._card

    def __enter__(self) -> Stream:
        context = torch.cuda.stream(self)
        self._outer.append(context)
        context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._outer.pop().__exit__(*exception)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (other.stream_id, other._card) == (self.stream_id, self._card)

    def __hash__(self) -> int:
        return self.stream_id

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


class Streams:
    """The streams of a virtual GPU; `kind` is what the program finds as `torch.cuda.Stream`."""

    def __init__(self, gpu: ProgramGPU):
        self._gpu = gpu
        self._defaults: dict[int | None, Stream] = {}
        self._chosen = threading.local()  # each thread has a current one, on each card
        made: Counter[tuple[int | None, bool]] = Counter()

        class kind(Stream):
            __doc__ = Stream.__doc__

            def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any):
                urgent, card = priority < 0, None
                if gpu.several is not None:
                    card = _get_device_index(device, optional=True)
                    gpu.check_index(torch.device("cuda", card))
                if stream_id is None:
                    stream_id = 1 + made[card, urgent] % _OF_A_PRIORITY + urgent * _OF_A_PRIORITY
                    made[card, urgent] += 1
                super().__init__(gpu, stream_id, priority, card)

        kind.__name__ = kind.__qualname__ = "Stream"
        self.kind = kind

    def default_of(self, index: int) -> Stream:
        """A card's default stream."""
        card = None if self._gpu.several is None else index
        return self._defaults.setdefault(card, Stream(self._gpu, card=card))

    def on(self, index: int) -> Stream:
        """What this thread allocates on a card comes from this stream's pools."""
        card = None if self._gpu.several is None else index
        return vars(self._chosen).get("streams", {}).get(card) or self.default_of(index)

    @property
    def current(self) -> Stream:
        """This thread's stream on the current card."""
        return self.on(self._gpu.index)

    def choose(self, stream: Stream) -> None:
        """Make a stream the current one of its card, and that the current card (THCPModule_setStream_wrap)."""
        vars(self._chosen).setdefault("streams", {})[stream._card] = stream
        if stream._card is not None:
            self._gpu.choose(stream._card)

    @contextlib.contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """`torch.cuda.stream(…)`."""
        if stream is None:
            yield
            return
        index, before = self._gpu.index, self.on(stream.device_index)
        self.choose(stream)
        try:
            yield
        finally:
            self.choose(before)
            self._gpu.choose(index)


class Event:
    """A CUDA event; the time between two of them is not known and counts as 0.001 ms."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds; never zero, programs divide by it."""
        return 0.001

    def query(self) -> bool:
        """It has happened."""
        return True

    record = wait = synchronize = Stream._nothing


class Graph:
    """`torch.cuda.CUDAGraph`: captured, and replayed by running nothing again; its pool's memory is not modelled."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def pool(self) -> tuple[int, int]:
        """The id of its memory pool."""
        return 0, 1

    capture_begin = capture_end = replay = reset = debug_dump = enable_debug_mode = Stream._nothing


class graph(contextlib.nullcontext):
    """`torch.cuda.graph(…)`: the block runs once, as it stands."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
