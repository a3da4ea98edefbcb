"""Counting the host's bytes: what is held, by category, its peak, and where the machine's RAM ends."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..language import tr
from ..units import human_bytes
from .machines import PROCESS, Machine
from .pinned import PinnedAllocator

CATEGORIES = (
    "parameters", "buffers", "gradients", "optimizer", "loading", "copies", "pinned", "workers", "other",
)  # fmt: skip
MAPPED = "mapped"  # pages of a file: resident as long as nobody else needs the room, so they kill nothing


class HostOutOfMemory(BaseException):
    """The machine's RAM is spent: here the kernel's out-of-memory killer would end the process, without a message.

    Not an Exception: no program catches SIGKILL. nbytes: what was asked for. held: category → bytes.
    """

    def __init__(self, text: str, nbytes: int, held: dict[str, int]):
        super().__init__(text)
        self.nbytes, self.held = nbytes, held


@dataclass(slots=True)
class HostBlock:
    """One allocation: bytes that it takes, for what, and when it was made and freed (count of the meter's events)."""

    nbytes: int
    category: str
    born: int
    freed: int | None = None


class HostMeter:
    """What the process holds of the host's RAM. machine: where it ends; None counts without limit.

    Bytes are of storages, as they are asked for (pageable) or as the caching host allocator rounds them (pinned). A
    page that is never written is counted too, though the kernel gives it none: `torch.empty` alone is cheaper. ranks:
    processes that share the machine; this is one of them, and the others are not counted.
    """

    def __init__(self, machine: Machine | None = None, pinned: PinnedAllocator | None = None, ranks: int = 1):
        self.machine, self.ranks = machine, ranks
        self.pinned = pinned or PinnedAllocator()
        self.blocks: dict[int, HostBlock] = {}
        self.current_bytes = self.peak_bytes = self.mapped_bytes = self.peak_mapped_bytes = 0
        self.peak_at = 0
        self.workers = self._workers_now = 0  # processes of DataLoaders: the most at once, and now
        self._events = self._next = 0
        self._pinned_block: int | None = None
        self._lock = threading.RLock()  # a DataLoader's thread pins, and a storage may die anywhere

    def allocate(self, nbytes: int, category: str) -> int:
        """Count a pageable block; its id. HostOutOfMemory where the machine cannot hold it."""
        with self._lock:
            if category != MAPPED:
                self._room_for(nbytes)
            self._events += 1
            self._next += 1
            self.blocks[self._next] = HostBlock(nbytes, category, self._events)
            self._add(nbytes, category)
            return self._next

    def free(self, block: int) -> None:
        """Release a pageable block."""
        with self._lock:
            held = self.blocks[block]
            self._events += 1
            held.freed = self._events
            self._add(-held.nbytes, held.category)
            if held.born > self.peak_at or held.category == MAPPED:
                del self.blocks[block]  # no peak has seen it

    def label(self, block: int, category: str) -> None:
        """Say what a block is for, from its birth on."""
        with self._lock:
            held = self.blocks.get(block)
            if held is None or held.category == category:
                return
            if MAPPED in (held.category, category):  # written: its pages are the process's own from now on
                self._add(-held.nbytes, held.category)
                self._events += 1
                self.blocks[block] = HostBlock(held.nbytes, category, self._events)
                self._add(held.nbytes, category)
            else:
                held.category = category

    def pin(self, nbytes: int) -> int:
        """Count a pinned block; its size, for `unpin`."""
        with self._lock:
            size, new = self.pinned.allocate(nbytes)
            try:
                self._locked(new)
            except HostOutOfMemory:
                self.pinned.reserved_bytes -= new
                raise
            return size

    def unpin(self, size: int) -> None:
        """Release a pinned block: it waits in the allocator, and in RAM."""
        with self._lock:
            self._locked(-self.pinned.free(size))

    def empty_pinned_cache(self) -> None:
        """Give pinned blocks that wait back to the system (`torch._C._host_emptyCache`)."""
        with self._lock:
            self._locked(-self.pinned.empty_cache())

    def processes(self, change: int) -> None:
        """So many processes of a DataLoader begin, or end."""
        with self._lock:
            self._workers_now += change
            self.workers = max(self.workers, self._workers_now)

    def by_category(self, at_peak: bool = False) -> dict[str, int]:
        """category → bytes held now, or at the peak."""
        totals = dict.fromkeys(CATEGORIES, 0)
        with self._lock:
            for block in self.blocks.values():
                if block.category == MAPPED:
                    continue
                if block.freed is None if not at_peak else _alive(block, self.peak_at):
                    totals[block.category] += block.nbytes
        return totals

    def reset_peak(self) -> None:
        """Start the peak anew from what is held now."""
        with self._lock:
            self.peak_bytes, self.peak_at = self.current_bytes, self._events
            self.blocks = {name: block for name, block in self.blocks.items() if block.freed is None}

    def _locked(self, change: int) -> None:
        """All pinned memory is one block, which grows and shrinks."""
        if not change:
            return
        before = 0 if self._pinned_block is None else self.blocks[self._pinned_block].nbytes
        if change > 0:
            self._room_for(change)
        if self._pinned_block is not None:
            self.free(self._pinned_block)
            self._pinned_block = None
        if before + change:
            self._pinned_block = self.allocate(before + change, "pinned")

    def _add(self, nbytes: int, category: str) -> None:
        if category == MAPPED:
            self.mapped_bytes += nbytes
            self.peak_mapped_bytes = max(self.peak_mapped_bytes, self.mapped_bytes)
            return
        self.current_bytes += nbytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.current_bytes, self._events

    def _room_for(self, nbytes: int) -> None:
        if self.machine is None:
            return
        needed = PROCESS.low + self.current_bytes + nbytes
        if needed > self.machine.free.high:
            held, asked = human_bytes(self.current_bytes), human_bytes(nbytes)
            free, name = human_bytes(self.machine.free.high), self.machine.name
            process = human_bytes(PROCESS.low)
            raise HostOutOfMemory(
                tr(
                    ko=f"Killed: 호스트 RAM이 모자란다. {asked}를 더 쓰려 한다. {name}에서 프로그램이 쓸 수 있는 RAM "
                    f"{free} 가운데 텐서가 {held}, Python과 라이브러리가 적어도 {process}를 쥐고 있다. 여기서 커널의 "
                    "OOM killer가 메시지 없이 프로세스를 끝낸다.",
                    en=f"Killed: out of host RAM. Tried to use {asked} more. Of the {free} that {name} has for the "
                    f"program, tensors hold {held}, Python and its libraries at least {process}. Here the kernel's "
                    "OOM killer would end the process, without a message.",
                ),
                nbytes,
                self.by_category(),
            )


def _alive(block: HostBlock, at: int) -> bool:
    return block.born <= at and (block.freed is None or block.freed > at)
