"""The blocks of the caching allocator's segments, each between its neighbours, and the pools that keep the free ones.

Source: struct Block, struct BlockPool, BlockComparatorSize in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from .allocator_settings import LARGE_SEGMENT_BYTES, MIB

SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
ADDRESSES = 2**19  # pages of address space for an expandable segment: more than any card has memory


class Block:
    """A piece of a segment, between its neighbours; not `mapped` only where an expandable segment has no memory.

    since: the searches of the pools of its kind before it was freed; those after it are its age (gc_count).
    """

    __slots__ = ("address", "after", "before", "free", "mapped", "since", "size")

    def __init__(self, address: int, size: int, *, mapped: bool = True):
        self.address, self.size, self.mapped = address, size, mapped
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = True
        self.since = 0


class Falling:
    """Addresses of new segments, each below the one before, from 2**47 on: as a driver on Linux mostly gives them.

    In published snapshots of machines with Linux 668 of 782 segments of a first training step lie below the one before,
    276 of 288 of a forward pass, and 8 of 8 of attention from an empty card (tests/data/traces); in 43 histories of an
    H100, 7,339 of 9,586. It matters where free blocks of one size are chosen by address (BlockComparatorSize): given
    the H100's requests, its peak of reserved bytes comes out in all 43 so, and with `Rising` in 29
    (tests/test_against_traces.py).
    """

    def __init__(self) -> None:
        self.lowest = 2**47

    def __call__(self, nbytes: int) -> int:
        """The address of a segment of so many bytes."""
        self.lowest -= nbytes
        return self.lowest


class Rising:
    """Addresses of new segments, each above the one before: as under WSL, by two published snapshots."""

    def __init__(self) -> None:
        self.end = 0x7F00_0000_0000  # where CUDA's addresses lie

    def __call__(self, nbytes: int) -> int:
        """The address of a segment of so many bytes."""
        self.end += nbytes
        return self.end - nbytes


class Pool:
    """The small or the large pool of a stream: its free blocks, by size and then by address (BlockComparatorSize).

    Where segments are expandable, `holes` are the stretches of its one segment that no memory backs, by address, and
    `base` is where that begins. searches: how often a free block was looked for in all small, or all large, pools.
    """

    def __init__(self, stream: int, small: bool, searches: list[int]):
        self.stream, self.small, self.searches = stream, small, searches
        self.free: list[tuple[int, int, Block]] = []
        self.holes: list[tuple[int, Block]] = []
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.base = 0

    def expand_from(self, base: int) -> None:
        """Take address space for an expandable segment, with no memory behind it."""
        self.base = base
        start = Block(base, 0)  # never free: the segment's edge
        start.free = False
        hole = Block(base, ADDRESSES * self.page_bytes, mapped=False)
        link(start, hole, None)
        self.holes.append((base, hole))

    def put(self, block: Block) -> None:
        """Keep a free block, merged with its free neighbours (free_block)."""
        before, after = block.before, block.after
        if before is not None and before.free and before.mapped:
            self.take(before)
            absorb(block, before)
        if after is not None and after.free and after.mapped:
            self.take(after)
            absorb(block, after)
        block.free, block.since = True, self.searches[0]
        insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        """Remove a block from the free ones."""
        self.free.pop(bisect_left(self.free, (block.size, block.address)))
        block.free = False


@dataclass(frozen=True)
class Piece:
    """A block as it lies in memory, in bytes; `name` is None where it is free."""

    address: int
    size: int
    name: int | None


@dataclass(frozen=True)
class Segment:
    """Memory of the driver (of an expandable segment a stretch that is mapped), and its blocks in order."""

    stream: int
    small: bool
    pieces: list[Piece]

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.pieces[0].address

    @property
    def size(self) -> int:
        """Bytes of all its blocks."""
        return sum(piece.size for piece in self.pieces)


def link(before: Block, block: Block, after: Block | None) -> None:
    """Put `block` between its neighbours."""
    block.before, block.after, before.after = before, after, block
    if after is not None:
        after.before = block


def absorb(block: Block, neighbour: Block) -> None:
    """Make `block` span a neighbour too (try_merge_blocks)."""
    block.size += neighbour.size
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block


def run_of(block: Block) -> Iterator[Block]:
    """A block and those after it, as far as memory is mapped."""
    while block is not None and block.mapped:
        yield block
        block = block.after


def room_of(block: Block | None) -> int:
    """Bytes from here on that are free or not mapped."""
    total = 0
    while block is not None and block.free:
        total, block = total + block.size, block.after
    return total


def can_grow_to(block: Block) -> int:
    """Bytes of a free block and of what is not mapped behind it."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)
