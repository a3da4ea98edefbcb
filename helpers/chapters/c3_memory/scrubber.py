"""Chapter 3's scrubber: the caching allocator's memory, request by request, with and without expandable segments."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import numpy as np

from virtual_gpu.cards import card
from virtual_gpu.drawing.allocator import draw_films, happening
from virtual_gpu.language import tr
from virtual_gpu.trace.film import Film
from virtual_gpu.trace.trace import Trace

from ...experiment import predict_memory
from ...panel import Panel


class AllocatorPanel(Panel):
    """One training step in the caching allocator: a slider over its requests, both kinds of segments side by side.

    It begins where the first of them runs out of memory, and that is the picture that a page without widgets shows.
    """

    prefix = "allocator"
    still = True

    def __init__(self, trace: Trace, capacity_bytes: int) -> None:
        super().__init__()
        fixed = Film(trace, capacity_bytes)
        self.trace = trace
        self.films = {
            tr(ko="크기가 정해진 세그먼트(기본값)", en="segments of fixed size (the default)"): fixed,
            "expandable_segments:True": Film(trace, capacity_bytes, expandable_segments=True),
        }
        self.moments = _moments(trace, fixed.end - 1)
        self.stop = int(np.searchsorted(self.moments, fixed.end)) + 1 if fixed.failed is not None else len(self.moments)
        self.request = self.control(
            widgets.IntSlider,
            "request",
            tr(ko="요청", en="request"),
            value=self.stop,
            min=1,
            max=len(self.moments),
            continuous_update=True,
        )
        text = (
            tr(ko="OOM의 순간으로", en="to the OOM") if fixed.failed is not None else tr(ko="끝으로", en="to the end")
        )
        self.back = self.button("back", text, self._to_the_stop)
        self.lay_out([self.request], [self.back])
        self.move(self._changed)

    def _changed(self) -> None:
        number = self.request.value
        moment = int(self.moments[number - 1])
        where = f"{number:,}/{len(self.moments):,}"
        self.show(f"{where}: {happening(self.trace, moment)}", picture=draw_films(self.films, moment))

    def _to_the_stop(self) -> None:
        self.request.value = self.stop


def _moments(trace: Trace, entry: int) -> np.ndarray:
    """After each request of the optimizer step in which an entry lies."""
    phase = min(max(int(trace.span[entry]) - 1, 0) // 2, len(trace.names) - 1)
    ends = [number for number, name in enumerate(trace.names) if name == "step"]
    first = max((number + 1 for number in ends if number < phase), default=0)
    last = min((number for number in ends if number >= phase), default=len(trace.names) - 1)
    inside = (trace.span >= 2 * first + 1) & (trace.span <= 2 * last + 1)
    return np.flatnonzero(inside & trace.allocates) + 1


def allocator_panel(batch_size: int = 13, *, gpu: str = "T4", **settings: Any) -> AllocatorPanel:
    """Chapter 3: `batch_size` and `predict_memory`'s other settings → one training step in the caching allocator."""
    report = predict_memory(batch_size=batch_size, gpu=gpu, **settings)
    return AllocatorPanel(report.timeline.trace, card(gpu).capacity_bytes)
