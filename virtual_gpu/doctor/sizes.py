"""What the numbers of one message say by themselves: who holds the card, and whether gathered holes would be enough."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import GiB, MiB
from .message import Message, Size

# What a process holds outside PyTorch's allocator: the most of one process in the published messages is 1.3 GiB (a V100
# under CUDA 11.2); below the least, no other process is spoken of. More than TOO_MUCH is worth a word of its own.
CONTEXT_MOST = 2 * GiB
NOTICEABLE = 256 * MiB
TOO_MUCH = 2 * GiB
MOST_OUTSIDE = 8 * GiB  # the most of one published message: 7.7 GiB, in a job of many GPUs with NCCL


@dataclass(frozen=True)
class Share:
    """Bytes of the card that one party holds, and how far the prints' rounding may move them."""

    bytes: int
    slack: int
    listed: bool = True  # printed by PyTorch; else a difference of what it printed
    doubtful: bool = False  # it could be this process's own, outside PyTorch: what that holds was not printed


def own(message: Message) -> Share | None:
    """All that this process holds on the card: as printed, or its row in the list, as inside a container.

    None where neither says: the driver gave PyTorch no list, or a nonsensical one (WSL, some containers).
    """
    held, total = message.held, message.total
    least = held.bytes - held.slack if held else 1
    if message.in_use and _within(message.in_use, least, total):
        return Share(message.in_use.bytes, message.in_use.slack)
    rows = _own_row(message)
    return Share(rows[0].bytes, rows[0].slack, listed=False) if rows else None


def _own_row(message: Message) -> list[Size]:
    """The row that is this process itself, where PyTorch did not know its number in the list."""
    held = message.held
    if message.in_use or not held or not held.bytes:
        return []
    rows = [size for _, size in message.processes if size.bytes + size.slack >= held.bytes - held.slack]
    near = sorted((size for size in rows if size.bytes - held.bytes < CONTEXT_MOST), key=lambda size: size.bytes)
    return near[:1]


def _within(size: Size, least: int, total: Size | None) -> bool:
    return least <= size.bytes + size.slack and (not total or size.bytes - size.slack <= total.bytes + total.slack)


def others(message: Message) -> Share | None:
    """What other processes hold: those that are listed, else what is neither free nor this one's; None: nothing."""
    rows = [size for _, size in message.processes]
    for row in _own_row(message):
        rows.remove(row)
    listed = sum(row.bytes for row in rows)
    if listed >= NOTICEABLE:
        return Share(listed, sum(row.slack for row in rows))
    held, mine = message.held, own(message)
    if not message.total or not message.free or not held or held.bytes > message.total.bytes:
        return None
    mine_most = mine.bytes if mine else held.bytes + CONTEXT_MOST
    rest = message.total.bytes - message.free.bytes - mine_most
    slack = sum(size.slack for size in (message.total, message.free, held))
    doubtful = mine is None and rest < MOST_OUTSIDE
    return Share(rest, slack, listed=False, doubtful=doubtful) if rest - slack >= NOTICEABLE else None


def outside_pytorch(message: Message) -> Share | None:
    """What this process holds on the card beside PyTorch's allocator: context, NCCL, other libraries."""
    mine, held = own(message), message.held
    return Share(mine.bytes - held.bytes, mine.slack + held.slack, listed=False) if mine and held else None


def spilled(message: Message) -> bool:
    """Whether the allocator holds more than the card has: Windows and WSL lend it the machine's memory."""
    held = message.held
    return bool(message.total and held and held.bytes - held.slack > message.total.bytes + message.total.slack)


def empty_card(message: Message) -> int | None:
    """Bytes that this process could have if it were alone and held no tensor: the card less what is not PyTorch's."""
    if not message.total:
        return None
    outside = outside_pytorch(message)
    return message.total.bytes - (max(0, outside.bytes) if outside else 0)


def over_any_card(message: Message) -> bool:
    """Whether the one request is larger than the whole empty card."""
    room = empty_card(message)
    slack = message.total.slack + message.tried.slack if message.total and message.tried else 0
    return bool(room and message.tried and message.tried.bytes - slack > room)


# The driver gives whole pages of 2 MiB, and of a full H100 not the last: 2.00 MiB were refused with 2.19 MiB free
# (benchmarks/records, claims: most, oom-*).
PAGE = 2 * 2**20


@dataclass(frozen=True)
class Holes:
    """T, F and R: tried, free, reserved but unallocated. `slack`: how far rounding may move their comparison."""

    tried: int
    free: int
    cached: int
    slack: int

    @property
    def enough(self) -> bool | None:
        """Whether T fits in F + R, were every hole gathered; None where rounding hides it."""
        gap = self.tried - self.free - self.cached
        return None if abs(gap) <= self.slack else gap < 0

    @property
    def free_alone(self) -> bool:
        """Whether what the driver had free, when the message was written, was enough by itself."""
        return self.tried + self.slack + PAGE <= self.free


def holes(message: Message) -> Holes | None:
    """The three numbers, where the message states all of them."""
    tried, free, cached = message.tried, message.free, message.cached
    if not (tried and free and cached):
        return None
    return Holes(tried.bytes, free.bytes, cached.bytes, tried.slack + free.slack + cached.slack)


def over_limit(message: Message) -> bool:
    """Whether `set_per_process_memory_fraction` refused it: what is held and what was tried pass what is allowed."""
    allowed, held, tried, total = message.allowed, message.held, message.tried, message.total
    if not (allowed and held and tried):
        return False
    lower = not total or allowed.bytes + allowed.slack < total.bytes - total.slack
    return lower and held.bytes + tried.bytes + held.slack + tried.slack > allowed.bytes


def adds_up(message: Message) -> bool | None:
    """Whether total is free + this process + the others listed, within rounding; None where it does not state them."""
    mine = own(message)
    if not (message.total and message.free and mine):
        return None
    rows = [size for _, size in message.processes]
    for row in _own_row(message):
        rows.remove(row)
    rest = message.total.bytes - message.free.bytes - mine.bytes - sum(row.bytes for row in rows)
    return abs(rest) <= message.total.slack + message.free.slack + mine.slack + sum(row.slack for row in rows)
