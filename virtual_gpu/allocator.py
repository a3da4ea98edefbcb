"""The rules of PyTorch's CUDA caching allocator: what lies between the bytes of tensors and the bytes of the card.

Tensors take blocks; blocks are pieces of segments; segments come from the driver and stay ("reserved") when their
blocks are free again. An out-of-memory error means that no free block is large enough and that the driver has no room
for another segment, also after every segment that is wholly free was given back.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp with its default settings, one stream; the function that holds a
rule is named beside it. What cannot be known without a card is where the driver puts a segment (it decides between
free blocks of the same size): here each lies above the one before.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from dataclasses import dataclass

MIB = 2**20
BLOCK_BYTES = 512  # kMinBlockSize: every block is a multiple of it
SMALL_BYTES = MIB  # kSmallSize: up to here the small pool serves, beyond it the large pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a block gets a segment of its own size …
ROUND_SEGMENT_BYTES = 2 * MIB  # kRoundLarge: … in multiples of this
_ADDRESSES = 2**30  # pages of address space for an expandable segment: more than any card has memory


def round_size(nbytes: int) -> int:
    """Bytes of the block for `nbytes` (round_size): a multiple of 512; nothing takes no block."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def expandable_segments_asked() -> bool:
    """Whether the environment asks PyTorch for expandable segments (PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF)."""
    settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return "expandable_segments:true" in ",".join(settings).replace(" ", "").lower()


def segment_size(size: int) -> int:
    """Bytes that are taken from the driver for a block of `size` bytes (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES


class _Block:
    """A piece of a segment, between its neighbours; not `mapped` only where an expandable segment has no memory."""

    __slots__ = ("address", "after", "before", "free", "mapped", "size")

    def __init__(self, address: int, size: int, *, mapped: bool = True):
        self.address, self.size, self.mapped = address, size, mapped
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.free = True


class _Pool:
    """The small or the large pool: its free blocks, by size and then by address (BlockComparatorSize).

    Where segments are expandable, `holes` are the stretches of its one segment that no memory backs, by address.
    """

    def __init__(self, small: bool, expandable: bool):
        self.free: list[tuple[int, int, _Block]] = []
        self.holes: list[tuple[int, _Block]] = []
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if expandable:
            start = _Block((1 if small else 2) * _ADDRESSES * self.page_bytes, 0)  # never free: the segment's edge
            start.free = False
            hole = _Block(start.address, _ADDRESSES * self.page_bytes, mapped=False)
            _link(start, hole, None)
            self.holes.append((hole.address, hole))

    def put(self, block: _Block) -> None:
        """Keep a free block, merged with its free neighbours (free_block)."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free and neighbour.mapped:
                self.take(neighbour)
                _absorb(block, neighbour)
        block.free = True
        bisect.insort(self.free, (block.size, block.address, block))

    def take(self, block: _Block) -> None:
        """Remove a block from the free ones."""
        self.free.pop(bisect.bisect_left(self.free, (block.size, block.address)))
        block.free = False


@dataclass(frozen=True)
class Piece:
    """A block as it lies in memory, in bytes; `name` is None where it is free."""

    address: int
    size: int
    name: int | None


class CachingAllocator:
    """Allocates by name as CUDA's caching allocator does, in at most `capacity_bytes` (None: without limit).

    expandable_segments: the setting `PYTORCH_ALLOC_CONF=expandable_segments:True`: one segment a pool that grows and
    shrinks by pages of 2 MiB (small pool) or 20 MiB, instead of many of fixed size.
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False):
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0  # how often cached segments had to go back to the driver to make room
        self._pools = {small: _Pool(small, expandable_segments) for small in (True, False)}
        self._used: dict[int, tuple[_Block, _Pool] | None] = {}
        self._end = 0  # the first address that no segment has had

    @property
    def unused_bytes(self) -> int:
        """Reserved and not allocated: what is cached, and what lies lost between blocks that are in use."""
        return self.reserved_bytes - self.allocated_bytes

    def allocate(self, name: int, nbytes: int) -> int:
        """Take a block for `nbytes`, and return its bytes. MemoryError, with nothing taken, where there is no room."""
        size = round_size(nbytes)
        if not size:
            self._used[name] = None
            return 0
        pool = self._pools[size <= SMALL_BYTES]
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None:  # malloc: give back what is wholly free, then try once more
            self.retries += 1
            self.empty_cache()
            block = self._grow(pool, size)
            if block is None:
                raise MemoryError(size)
        rest = block.size - size
        # should_split: from a large block of a segment of fixed size, a rest of up to 1 MiB is not split off.
        if rest >= BLOCK_BYTES if pool.small or self.expandable_segments else rest > SMALL_BYTES:
            block.size = size
            remainder = _Block(block.address + size, rest)
            _link(block, remainder, block.after)
            pool.put(remainder)
        self._used[name] = block, pool
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.size

    def free(self, name: int) -> None:
        """Put a block back into its pool, merged with its free neighbours (free_block)."""
        entry = self._used.pop(name)
        if entry is None:
            return
        block, pool = entry
        self.allocated_bytes -= block.size
        pool.put(block)

    def empty_cache(self) -> None:
        """Give the driver back every segment, or page, that is wholly free (release_cached_blocks)."""
        for pool in self._pools.values():
            for size, _, block in list(pool.free):
                if self.expandable_segments:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved_bytes -= size

    def reset_peaks(self) -> None:
        """Start both peaks anew from what is held now."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def segments(self) -> list[list[Piece]]:
        """Every segment (of expandable ones every mapped stretch), ordered by address, as its blocks in order."""
        names = {id(entry[0]): name for name, entry in self._used.items() if entry is not None}
        blocks = [entry[0] for entry in self._used.values() if entry is not None]
        blocks += [block for pool in self._pools.values() for _, _, block in pool.free]
        first = [b for b in blocks if b.before is None or not b.before.mapped or not b.before.size]
        return [
            [Piece(b.address, b.size, names.get(id(b))) for b in _run(start)]
            for start in sorted(first, key=lambda b: b.address)
        ]

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough (get_free_block)."""
        place = bisect.bisect_left(pool.free, (size, -1))
        if place == len(pool.free):
            return None
        if self.expandable_segments:  # a block that can grow counts as the size that it can grow to
            while place + 1 < len(pool.free) and _can_grow_to(pool.free[place + 1][2]) < _can_grow_to(
                pool.free[place][2]
            ):
                place += 1
        block = pool.free.pop(place)[2]
        block.free = False
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """A block from a new segment; None where the driver has no room for it (alloc_block)."""
        if self.expandable_segments:
            return self._grow_expandable(pool, size)
        wanted = segment_size(size)
        if not self._reserve(wanted):
            return None
        block = _Block(self._end, wanted)
        self._end += wanted
        block.free = False
        return block

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    # -- expandable segments -----------------------------------------------------------------------------------------

    def _grow_expandable(self, pool: _Pool, size: int) -> _Block | None:
        """Back the lowest stretch that is free for `size` with memory (find_expandable_block, map_block)."""
        for _, hole in pool.holes:  # the last one always has room
            before = hole.before
            block = before if before.free and before.mapped else hole
            if _room(block) >= size:
                break
        while not block.mapped or block.size < size:
            hole = block.after if block.mapped else block
            missing = size - (block.size if block.mapped else 0)
            wanted = min(-(-missing // pool.page_bytes) * pool.page_bytes, hole.size)
            if not self._reserve(wanted):
                return None
            block = self._map(pool, hole, wanted)
        pool.take(block)
        return block

    def _map(self, pool: _Pool, hole: _Block, nbytes: int) -> _Block:
        """Back the beginning of a hole; the free block that it becomes, or becomes part of."""
        pool.holes.pop(bisect.bisect_left(pool.holes, (hole.address,)))
        if nbytes < hole.size:
            rest = _Block(hole.address + nbytes, hole.size - nbytes, mapped=False)
            _link(hole, rest, hole.after)
            bisect.insort(pool.holes, (rest.address, rest))
            hole.size = nbytes
        hole.mapped = True
        pool.put(hole)
        return hole

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Give the pages that lie wholly inside a free block back to the driver (unmap_block)."""
        page = pool.page_bytes
        start, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if end <= start:
            return
        pool.take(block)
        pieces = [(block.address, start, True), (start, end, False), (end, block.address + block.size, True)]
        before, after = block.before, block.after
        for first, last, mapped in pieces:
            if first < last:
                piece = _Block(first, last - first, mapped=mapped)
                _link(before, piece, after)
                before = piece
                if mapped:
                    bisect.insort(pool.free, (piece.size, piece.address, piece))
                else:
                    hole = piece
        self.reserved_bytes -= hole.size
        for neighbour in (hole.before, hole.after):
            if neighbour is not None and not neighbour.mapped:
                pool.holes.pop(bisect.bisect_left(pool.holes, (neighbour.address,)))
                _absorb(hole, neighbour)
        bisect.insort(pool.holes, (hole.address, hole))


def _link(before: _Block, block: _Block, after: _Block | None) -> None:
    """Put `block` between its neighbours."""
    block.before, block.after, before.after = before, after, block
    if after is not None:
        after.before = block


def _absorb(block: _Block, neighbour: _Block) -> None:
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


def _run(block: _Block) -> Iterator[_Block]:
    """A block and those after it, as far as memory is mapped."""
    while block is not None and block.mapped:
        yield block
        block = block.after


def _room(block: _Block | None) -> int:
    """Bytes from here on that are free or not mapped."""
    total = 0
    while block is not None and block.free:
        total, block = total + block.size, block.after
    return total


def _can_grow_to(block: _Block) -> int:
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)
