"""Does it fit on a card? Not one number, but what is known to the byte beside what is known only as a range.

Known: the tensors, and what the caching allocator reserves for them. A range: the card's memory (driver, ECC), what the
process holds outside the allocator (CUDA context, NCCL), and what kernels take that no rule describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cards import UNKNOWN_CONTEXT, GPUSpec, Range
from .language import tr
from .units import human_bytes

FITS, TIGHT, TOO_MUCH = "fits", "tight", "does not fit"

# A message of PyTorch prints four numbers to 0.01 GiB: what is left over of them is good to about this many bytes.
READING = 16 * 2**20
# What the allocator reserves for temporaries of kernels that no rule makes, as a share of all: those of flash and
# memory-efficient attention's, embedding's and layer norm's backward were read in PyTorch 2.13's source and added to a
# copy, in nine settings from 1.3 B on a T4 to 8 B on an A100: 0.0 to 0.8 %.
KERNELS = 0.01


@dataclass(frozen=True)
class Outside:
    """Bytes of the card that PyTorch's allocator does not get: what holds them, and from where that is known."""

    what: str
    bytes: Range
    source: str


@dataclass(frozen=True)
class Room:
    """What a card has: its memory and what lies outside the allocator, both as ranges of bytes."""

    card: str
    memory: Range
    outside: tuple[Outside, ...]

    @property
    def sure_bytes(self) -> int:
        """What may be reserved and fits whatever the unknowns are."""
        return int((self.memory.low - sum(part.bytes.high for part in self.outside)) / (1 + KERNELS))

    @property
    def possible_bytes(self) -> int:
        """What may be reserved and fits if every unknown is at its best."""
        return self.memory.high - sum(part.bytes.low for part in self.outside)

    def verdict(self, reserved_bytes: int) -> str:
        """FITS whatever the unknowns are, TIGHT where they decide, or TOO_MUCH."""
        if reserved_bytes <= self.sure_bytes:
            return FITS
        return TIGHT if reserved_bytes <= self.possible_bytes else TOO_MUCH

    def evicted(self, reserved_bytes: int, paged_bytes: int) -> int:
        """Of so many bytes of pages (see `models.pages`) what finds no room beside what is reserved, at least."""
        return min(max(reserved_bytes + paged_bytes - self.possible_bytes, 0), paged_bytes)

    def needed(self, reserved_bytes: int) -> Range:
        """Bytes of the card that are taken when the allocator has reserved so many."""
        low, high = (sum(getattr(part.bytes, end) for part in self.outside) for end in ("low", "high"))
        return Range(reserved_bytes + low, int(reserved_bytes * (1 + KERNELS)) + high)

    def taken(self, reserved_bytes: int) -> str:
        """`needed` as it is printed."""
        return _text(self.needed(reserved_bytes))

    def line(self, reserved_bytes: int) -> str:
        """What is needed and against what, as it is printed."""
        needed, memory = self.taken(reserved_bytes), _text(self.memory)
        return tr(ko=f"{self.card}의 {memory} 가운데 {needed}", en=f"{needed} of {self.card}'s {memory}")

    def needs(self, reserved_bytes: int) -> str:
        """As `line`, but what there is last where it is not enough: nobody needs more "of" less."""
        if self.verdict(reserved_bytes) != TOO_MUCH:
            return self.line(reserved_bytes)
        needed, memory = self.taken(reserved_bytes), _text(self.memory)
        return tr(ko=f"{needed}가 든다({self.card}의 메모리는 {memory})", en=f"{needed} ({self.card} has {memory})")

    def to_dict(self) -> dict[str, Any]:
        """The ranges as plain JSON values."""
        return {
            "memory_bytes": [self.memory.low, self.memory.high],
            "outside": [
                {"what": part.what, "bytes": [part.bytes.low, part.bytes.high], "source": part.source}
                for part in self.outside
            ],
            "kernels_share": [0, KERNELS],
            "sure_bytes": self.sure_bytes,
            "possible_bytes": self.possible_bytes,
        }


def _text(bytes_: Range) -> str:
    low, high = human_bytes(bytes_.low), human_bytes(bytes_.high)
    return low if low == high else f"{low.split()[0]}~{high}" if low.split()[1] == high.split()[1] else f"{low}~{high}"


def room_on(spec: GPUSpec, nccl: Range | None = None) -> Room:
    """The room on a card. nccl: what its buffers take where several cards work together (see `shards.nccl`)."""
    if spec.usable_bytes is None:
        context = UNKNOWN_CONTEXT, "none published for this card: the least to the most of any other CUDA card"
    else:
        read = spec.memory_bytes - spec.usable_bytes
        seen = spec.context_seen or Range(read, read)
        context = Range(max(seen.low - READING, 0), seen.high + READING), "cards.json, context_bytes"
    outside = [Outside("context", *context)]
    if nccl is not None:
        outside.append(Outside("NCCL", nccl, "github.com/NVIDIA/nccl/issues/964, /864, /986, /1685"))
    return Room(spec.name, spec.memory_seen or Range(spec.memory_bytes, spec.memory_bytes), tuple(outside))
