"""What was held when: live bytes by category over the phases of training, on either GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .trace import Trace


# "activations" is whatever a phase allocates that turns out to be nothing else; "other" are buffers, the batch and
# library workspaces.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
_INDEX = {category: index for index, category in enumerate(CATEGORIES)}


@dataclass
class PhaseCurve:
    """One phase: `live[i, c]` bytes of category c at its beginning, at every local maximum, and at its end.

    reserved_bytes: the most that the caching allocator held reserved in it, where a real GPU's counter said so.
    """

    name: str
    live: np.ndarray
    reserved_bytes: int | None = None

    @property
    def total(self) -> np.ndarray:
        """Live bytes over the phase, all categories together."""
        return self.live.sum(axis=1)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once in this phase."""
        return int(self.total.max())


@dataclass
class Timeline:
    """The phases of a run in their order, and on a virtual GPU the trace that they were read from."""

    phases: list[PhaseCurve] = field(default_factory=list)
    trace: Trace | None = field(default=None, repr=False)

    @property
    def peak(self) -> tuple[int, int]:
        """(index of the phase, index in the phase) of the first moment at which most bytes are held."""
        index = max(range(len(self.phases)), key=lambda i: (self.phases[i].peak_bytes, -i))
        return index, int(self.phases[index].total.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return max((phase.peak_bytes for phase in self.phases), default=0)

    @property
    def peak_phase(self) -> str | None:
        """The name of the phase that holds the peak."""
        return self.phases[self.peak[0]].name if self.phases else None

    def at_peak(self) -> dict[str, int]:
        """category → bytes at the moment of the peak."""
        if not self.phases:
            return dict.fromkeys(CATEGORIES, 0)
        phase, moment = self.peak
        return dict(zip(CATEGORIES, map(int, self.phases[phase].live[moment]), strict=True))

    @property
    def after_first_step_bytes(self) -> int:
        """Bytes held at the end of the first optimizer step, its gradients with it; 0 where there was none."""
        return next((int(phase.total[-1]) for phase in self.phases if phase.name == "step"), 0)

    def at_end(self, index: int) -> dict[str, int]:
        """category → bytes at the end of the phase with that index."""
        return dict(zip(CATEGORIES, map(int, self.phases[index].live[-1]), strict=True))
