"""Published facts of common GPUs, read from cards.json: memory, context, compute capability, rates, multiprocessors,
and what it costs to rent one.

Each value in the file stands beside its source; where it moves (with driver, ECC, CUDA's version, kernels loaded) a low
and a high stand there too. Rates are dense and for a sum kept in fp32, which is how PyTorch trains. None: no value was
found published.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from .errors import NotSupported, WrongValue
from .language import tr
from .units import SIZE, choose, positive_int, size_in_bytes


@dataclass(frozen=True)
class Range:
    """Bytes that are not known to the byte: the least and the most that were seen."""

    low: int
    high: int


@dataclass(frozen=True)
class Rent:
    """Dollars for an hour of one GPU on demand: the least and the most that was found, and where.

    Of a machine with several GPUs one's share, CPU and RAM with it. date: when the least was read.
    """

    low: float
    high: float
    low_at: str
    high_at: str
    date: str


PLATFORMS = ("cuda", "rocm")


@dataclass(frozen=True)
class GPUSpec:
    """One GPU: memory in bytes, rates in dense TFLOP/s, bandwidth in bytes a second, and a source for each value.

    memory_bytes: what PyTorch calls `total_memory` and an out-of-memory message "total capacity". usable_bytes: less
    what the process holds outside PyTorch (the CUDA context, loaded kernels) in one published message; None where no
    such message was found. platform: "cuda" or "rocm". multiprocessors, l2_cache_bytes: an A100's where none were said.
    pcie: generation and lanes of the link to the host. rent: None where none was found.
    """

    name: str
    device_name: str
    memory_bytes: int
    usable_bytes: int | None
    compute_capability: tuple[int, int]
    fp16_tflops: float | None = None
    bf16_tflops: float | None = None
    bandwidth_bytes_per_s: int | None = None
    pcie: tuple[int, int] | None = None  # generation and lanes
    multiprocessors: int = 108
    l2_cache_bytes: int = 40 * 2**20
    source: tuple[str, ...] = ()
    platform: str = "cuda"
    memory_seen: Range | None = None  # None: no other than memory_bytes
    context_seen: Range | None = None  # None: unknown, where usable_bytes is None, else one message alone
    also_called: tuple[str, ...] = ()
    rent: Rent | None = None

    def __post_init__(self) -> None:
        """WrongValue for a card that cannot be."""
        total, pair = positive_int(self.memory_bytes, "memory_bytes"), self.compute_capability
        if self.usable_bytes is not None and positive_int(self.usable_bytes, "usable_bytes") > total:
            raise WrongValue(
                tr(
                    ko=f"usable_bytes={self.usable_bytes}: memory_bytes={total} 이하여야 한다. 모르면 None으로 둔다.",
                    en=f"usable_bytes={self.usable_bytes}: must be at most memory_bytes={total}; None where unknown.",
                )
            )
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(part) is int for part in pair)):
            raise WrongValue(
                tr(
                    ko=f"compute_capability={pair!r:.80}: (8, 6)처럼 정수 두 개여야 한다.",
                    en=f"compute_capability={pair!r:.80}: must be two integers, as (8, 6).",
                )
            )
        choose(self.platform, PLATFORMS, "platform")
        if not (isinstance(self.name, str) and self.name.isprintable()):
            raise WrongValue(
                tr(
                    ko=f"name={self.name!r:.80}: GPU의 이름이어야 한다.",
                    en=f"name={self.name!r:.80}: must be the name of a GPU.",
                )
            )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that PyTorch can allocate: the usable ones where they were published, else all."""
        return self.usable_bytes or self.memory_bytes

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes a second to the host, and as many from it at once, before packets' headers; None where not published.

        PCI-SIG: 8 GT/s a lane in the third generation, twice that in the fourth and again in the fifth, of 130 bits 128
        data. No bound in a machine whose CPU has NVLink (IBM's with V100).
        """
        if self.pcie is None:
            return None
        generation, lanes = self.pcie
        return 1e9 * 2**generation * lanes * 128 / 130 / 8

    @property
    def has_bf16(self) -> bool:
        """Whether it has tensor cores for bf16 (since compute capability 8.0)."""
        return self.compute_capability >= (8, 0)

    @property
    def threads_per_multiprocessor(self) -> int:
        """Threads that a multiprocessor holds at once (CUDA C++ Programming Guide, by compute capability)."""
        if self.compute_capability == (7, 5):
            return 1024
        return 1536 if self.compute_capability[0] in (8, 12) and self.compute_capability != (8, 0) else 2048

    def needs_cuda(self) -> GPUSpec:
        """The card itself; NotSupported names one of another maker, whose kernels and libraries no rule describes."""
        if self.platform != "cuda":
            raise NotSupported(
                tr(
                    ko=f"{self.name}: {self.platform.upper()} GPU다. 이 도구는 CUDA의 커널과 할당자만 흉내 낸다.",
                    en=f"{self.name} is a {self.platform.upper()} card. Only CUDA's kernels are known here.",
                )
            )
        return self


def _read(card: dict[str, Any]) -> GPUSpec:
    memory, context, rent = card["memory_bytes"], card["context_bytes"], card["usd_per_hour"]
    plain = ("fp16_tflops", "bf16_tflops", "bandwidth_bytes_per_s", "multiprocessors", "l2_cache_bytes")
    sourced = ("memory_bytes", "context_bytes", "compute_capability", *plain, "pcie", "usd_per_hour")
    return GPUSpec(
        name=card["name"],
        device_name=card["device_name"],
        memory_bytes=memory["value"],
        usable_bytes=None if context["value"] is None else memory["value"] - context["value"],
        compute_capability=tuple(card["compute_capability"]["value"]),
        **{name: card[name]["value"] for name in plain},
        pcie=tuple(card["pcie"]["value"]) if card["pcie"]["value"] else None,
        source=tuple(f"{name}: {card[name]['source']}" for name in sourced),
        platform=card["platform"],
        memory_seen=_range(memory),
        context_seen=_range(context),
        also_called=tuple(card["also_called"]),
        rent=None if rent["low"] is None else Rent(**{name: value for name, value in rent.items() if name != "source"}),
    )


def _range(value: dict[str, Any]) -> Range | None:
    return None if value["low"] is None else Range(value["low"], value["high"])


CATALOG: dict[str, GPUSpec] = {
    card["name"]: _read(card)
    for card in json.loads(files("virtual_gpu").joinpath("cards.json").read_text(encoding="utf-8"))["cards"]
}
# Of a card whose context nobody has published: from the least to the most that any other CUDA card's is.
_CONTEXTS = [s.memory_bytes - s.usable_bytes for s in CATALOG.values() if s.usable_bytes and s.platform == "cuda"]
UNKNOWN_CONTEXT = Range(min(_CONTEXTS), max(_CONTEXTS))

DEFAULT_CAPABILITY = (8, 0)  # of a free card that does not say its own: Ampere, the first with bf16
_FREE = re.compile(SIZE + r"(?:\s*,\s*(?P<major>\d{1,2})\.(?P<minor>\d))?", re.IGNORECASE)


def card(name: Any) -> GPUSpec:
    """The card that `name` means: a name of the catalogue, what it is also called, or a free one by its memory.

    A free card is "24GiB" or "24GB, 8.6": all of that memory, and its compute capability (8.0 where none is said).
    UnknownName lists the nearest names. A `GPUSpec` is returned as it is.
    """
    if isinstance(name, GPUSpec):
        return name
    if not isinstance(name, str):
        raise WrongValue(
            tr(
                ko=f"gpu={name!r}: 'T4' 같은 GPU의 이름이나 '24GiB, 8.6' 같은 크기여야 한다.",
                en=f'gpu={name!r}: must be the name of a GPU, as "T4", or a size, as "24GiB, 8.6".',
            )
        )
    free = _FREE.fullmatch(name.strip())
    if free:
        return _free_card(free)
    return CATALOG[choose(_ALIASES.get(name.strip().lower(), name), CATALOG, "GPU")]


def _free_card(found: re.Match[str]) -> GPUSpec:
    size = size_in_bytes(found)
    capability = (int(found["major"]), int(found["minor"])) if found["major"] else DEFAULT_CAPABILITY
    if not 2**30 <= size <= 2**40 or not (5, 0) <= capability < (20, 0):
        raise WrongValue(
            tr(
                ko=f"{found.string!r}: 메모리는 1 GiB에서 1 TiB, compute capability는 5.0에서 19.9 사이여야 한다.",
                en=f"{found.string!r}: 1 GiB to 1 TiB of memory, and a compute capability from 5.0 to 19.9.",
            )
        )
    name = f"{found['size']}{found['unit']}, {capability[0]}.{capability[1]}"
    return GPUSpec(name, name, size, None, capability, source=("as given; multiprocessors: an A100's",))


_ALIASES = {
    called.lower(): spec.name for spec in CATALOG.values() for called in (*spec.also_called, spec.device_name)
} | {name.lower(): name for name in CATALOG}
