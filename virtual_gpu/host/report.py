"""What a run held of the host's RAM, against what the machine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cards import Range
from ..language import tr
from ..room import FITS, TIGHT, TOO_MUCH
from ..units import human_bytes
from .machines import PROCESS, WORKER, Machine
from .meter import HostMeter


@dataclass(frozen=True)
class HostReport:
    """Bytes of the host.

    current, peak: of tensors. at_peak: category → bytes. mapped: the most pages of files, which kill nothing.
    pinned_reserved: locked in RAM, in use or waiting. workers: processes of DataLoaders at once. ranks: processes
    that share the machine, of which this is one alone. killed: it ended here.
    """

    machine: Machine | None
    current: int
    peak: int
    at_peak: dict[str, int]
    mapped: int
    pinned_reserved: int
    workers: int
    ranks: int = 1
    killed: bool = False

    @property
    def needed(self) -> Range:
        """The peak with the process itself and the loaders' processes."""
        return Range(
            self.peak + PROCESS.low + self.workers * WORKER.low, self.peak + PROCESS.high + self.workers * WORKER.high
        )

    @property
    def verdict(self) -> str:
        """ "fits", "tight" or "does not fit"; "" where no machine is named."""
        if self.machine is None:
            return ""
        if self.killed or self.needed.low > self.machine.free.high:
            return TOO_MUCH
        return FITS if self.needed.high <= self.machine.free.low else TIGHT

    @property
    def line(self) -> str:
        """One line: what the tensors held, what the process needs, and of how much."""
        low, high = human_bytes(self.needed.low), human_bytes(self.needed.high)
        peak = human_bytes(self.peak)
        text = tr(
            ko=f"호스트 RAM: 텐서 최대 {peak}, 프로세스까지 {low}~{high}",
            en=f"host RAM: tensors {peak} at the peak, with the process {low} to {high}",
        )
        if self.ranks > 1:
            text += tr(ko=f" (rank {self.ranks}개 가운데 이 rank만)", en=f" (this rank alone, of {self.ranks})")
        if self.machine is None:
            return text
        told = {
            FITS: tr(ko="들어간다", en="fits"),
            TIGHT: tr(ko="빠듯하다", en="tight"),
            TOO_MUCH: tr(ko="모자란다", en="too much"),
        }[self.verdict]
        room = human_bytes(self.machine.free.low)
        return text + tr(
            ko=f". {self.machine.name}에서 쓸 수 있는 {room}에 {told}",
            en=f"; {told}: {self.machine.name} has {room} for it",
        )

    def __str__(self) -> str:
        return "\n".join([self.line, *(f"{human_bytes(n):>14}  {name}" for name, n in self.at_peak.items() if n)])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "machine": None if self.machine is None else self.machine.name,
            "current_bytes": self.current,
            "peak_bytes": self.peak,
            "at_peak": self.at_peak,
            "mapped_bytes": self.mapped,
            "pinned_reserved_bytes": self.pinned_reserved,
            "workers": self.workers,
            "ranks": self.ranks,
            "needed_bytes": [self.needed.low, self.needed.high],
            "verdict": self.verdict,
            "killed": self.killed,
        }


def host_report(meter: HostMeter, *, killed: bool = False) -> HostReport:
    """Read a report off a meter."""
    return HostReport(
        meter.machine, meter.current_bytes, meter.peak_bytes, meter.by_category(at_peak=True), meter.peak_mapped_bytes,
        meter.pinned.reserved_bytes, meter.workers, meter.ranks, killed,
    )  # fmt: skip
