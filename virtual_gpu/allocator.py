"""The rules of PyTorch's CUDA caching allocator: what lies between the bytes of tensors and the bytes of the card.

Tensors take blocks; blocks are pieces of segments; segments come from the driver and stay ("reserved") when their
blocks are free again. Each stream has a small and a large pool of its own: a block that one stream freed serves no
other. An out-of-memory error means that no free block is large enough and that the driver has no room for another
segment, also after every segment that is wholly free was given back.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp; the function that holds a rule is named beside it. What no
source says is where the driver puts a segment, which decides between free blocks of the same size: each lies below the
one before, as on Linux (`allocator_blocks.Falling`), unless `place` says where.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from .allocator_blocks import (
    ADDRESSES,
    SMALL_SEGMENT_BYTES,
    Block,
    Falling,
    Piece,
    Pool,
    Segment,
    absorb,
    can_grow_to,
    link,
    room_of,
    run_of,
)
from .allocator_settings import BLOCK_BYTES, LARGE_SEGMENT_BYTES, MIB, AllocatorSettings

SMALL_BYTES = MIB  # kSmallSize: up to here the small pool serves, beyond it the large pool
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a block gets a segment of its own size …
ROUND_SEGMENT_BYTES = 2 * MIB  # kRoundLarge: … in multiples of this


def round_size(nbytes: int) -> int:
    """Bytes of the block for `nbytes` (round_size): a multiple of 512; nothing takes no block."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def expandable_segments_asked() -> bool:
    """Whether the environment asks PyTorch for expandable segments (PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF)."""
    return AllocatorSettings.from_environment().expandable_segments


def segment_size(size: int) -> int:
    """Bytes that are taken from the driver for a block of `size` bytes (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES


class CachingAllocator:
    """Allocates by name as CUDA's caching allocator does, in at most `capacity_bytes` (None: without limit).

    settings: PYTORCH_ALLOC_CONF; `expandable_segments` is the one of them that can be given by itself. place: asked
    for the address of each new segment of so many bytes (None: `Falling`). driver_calls: a list that is told what the
    driver is asked for: ("segment_alloc", "segment_free", "segment_map" or "segment_unmap", address, bytes, stream).
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        settings: AllocatorSettings | None = None,
        place: Callable[[int], int] | None = None,
        driver_calls: list[tuple[str, int, int, int]] | None = None,
    ):
        self.capacity_bytes = capacity_bytes
        self.configure(settings or AllocatorSettings(expandable_segments=expandable_segments))
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0  # how often cached segments had to go back to the driver to make room
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._searches = {True: [0], False: [0]}
        self._used: dict[int, tuple[Block, Pool] | None] = {}
        self._place = place or Falling()
        self.driver_calls = driver_calls

    def configure(self, settings: AllocatorSettings) -> None:
        """Follow other settings; they are for an allocator that has given nothing yet."""
        fraction = settings.memory_fraction
        if fraction is not None and self.capacity_bytes is None:
            raise ValueError("a fraction of the memory may be used, but of how much? capacity_bytes is missing")
        self.settings = settings
        self.expandable_segments = settings.expandable_segments
        self.limit_bytes = None if fraction is None else int(fraction * self.capacity_bytes)  # allowed_memory_maximum
        self._round = settings.round_size if settings.roundup_power2_divisions else round_size
        self._unsplit = settings.max_split_size or 2**63

    @property
    def unused_bytes(self) -> int:
        """Reserved and not allocated: what is cached, and what lies lost between blocks that are in use."""
        return self.reserved_bytes - self.allocated_bytes

    def allocate(self, name: int, nbytes: int, stream: int = 0) -> int:
        """Take a block for `nbytes`, and return its bytes. MemoryError, with nothing taken, where there is no room."""
        size = self._round(nbytes)
        if not size:
            self._used[name] = None
            return 0
        small = size <= SMALL_BYTES
        pool = self._pools.get((stream, small)) or self._new_pool(stream, small)
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        rest = block.size - size
        if rest and self._splits(pool, size, rest):
            remainder = Block(block.address + size, rest)
            block.size = size
            link(block, remainder, block.after)
            pool.put(remainder)
        self._used[name] = block, pool
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block.size

    def address_of(self, name: int) -> int | None:
        """Where the block of this name lies; None where nothing was asked for."""
        entry = self._used[name]
        return None if entry is None else entry[0].address

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
            for _, _, block in list(pool.free):
                self._release(pool, block)

    def release(self, address: int) -> bool:
        """Give back the one segment, or the pages of the one free block, that lie here; whether there were any."""
        for pool in self._pools.values():
            for size, start, block in pool.free:
                if start <= address < start + size:
                    return self._release(pool, block)
        return False

    def restore(self, segments: Iterable[Segment]) -> None:
        """Take over segments of fixed size as they lie somewhere else, their blocks under the names that they have."""
        for segment in segments:
            pool = self._pools.get((segment.stream, segment.small)) or self._new_pool(segment.stream, segment.small)
            before = None
            for piece in segment.pieces:
                block = Block(piece.address, piece.size)
                if before is not None:
                    link(before, block, None)
                before = block
                if piece.name is None:
                    insort(pool.free, (block.size, block.address, block))
                else:
                    block.free = False
                    self._used[piece.name] = block, pool
                    self.allocated_bytes += block.size
            self.reserved_bytes += segment.size
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Start both peaks anew from what is held now."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def segments(self) -> list[Segment]:
        """Every segment (of expandable ones every mapped stretch), ordered by address."""
        names = {id(entry[0]): name for name, entry in self._used.items() if entry is not None}
        blocks = [entry for entry in self._used.values() if entry is not None]
        blocks += [(block, pool) for pool in self._pools.values() for _, _, block in pool.free]
        first = [(b, pool) for b, pool in blocks if b.before is None or not b.before.mapped or not b.before.size]
        return [
            Segment(pool.stream, pool.small, [Piece(b.address, b.size, names.get(id(b))) for b in run_of(start)])
            for start, pool in sorted(first, key=lambda entry: entry[0].address)
        ]

    def state(self, since: int) -> tuple:
        """All that decides what later requests get, but for ages (garbage collection); names count from `since` on.

        Of an allocator whose segments are placed by an object (`Falling`), which is part of it.
        """
        pools = (
            (key, [(size, address, not b.before, not b.after) for size, address, b in pool.free],
             [(address, hole.size) for address, hole in pool.holes])
            for key, pool in self._pools.items()
        )  # fmt: skip
        used = {
            (name >= since, name - since if name >= since else name): entry
            and (entry[0].address, entry[0].size, not entry[0].before, not entry[0].after)
            for name, entry in self._used.items()
        }
        return used, [*pools], self.reserved_bytes, self.retries, {**vars(self._place)}

    def rename(self, since: int, by: int) -> None:
        """Add `by` to the names from `since` on."""
        self._used = {name + by if name >= since else name: entry for name, entry in self._used.items()}

    # -- finding a block ---------------------------------------------------------------------------------------------

    def _new_pool(self, stream: int, small: bool) -> Pool:
        pool = self._pools[stream, small] = Pool(stream, small, self._searches[small])
        return pool

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough (get_free_block)."""
        pool.searches[0] += 1
        place = bisect_left(pool.free, (size,))
        if place == len(pool.free):
            return None
        if self.expandable_segments:  # a block that can grow counts as the size that it can grow to
            while place + 1 < len(pool.free) and can_grow_to(pool.free[place + 1][2]) < can_grow_to(
                pool.free[place][2]
            ):
                place += 1
        found = pool.free[place][0]
        if found >= self._unsplit and (
            size < self._unsplit or found >= size + self.settings.max_non_split_rounding_size
        ):
            return None
        block = pool.free.pop(place)[2]
        block.free = False
        return block

    def _new_block(self, pool: Pool, size: int) -> Block:
        """A block that was not cached, of memory that the driver gives or that is given back to it (malloc)."""
        if self.limit_bytes is not None and self.settings.garbage_collection_threshold:
            self._collect()
        block = self._grow(pool, size)
        if block is None and self._release_available(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._grow(pool, size)
            if block is None:
                raise MemoryError(size)
        return block

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        """Whether the rest becomes a block (should_split): of large blocks of fixed segments only beyond 1 MiB."""
        if pool.small or self.expandable_segments:
            return rest >= BLOCK_BYTES
        return rest > SMALL_BYTES and size < self._unsplit

    # -- the driver --------------------------------------------------------------------------------------------------

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A block from a new segment; None where the driver has no room for it (alloc_block)."""
        wanted = segment_size(size)
        if self.limit_bytes is not None and self.reserved_bytes + wanted > self.limit_bytes:
            return None
        if self.expandable_segments:
            return self._grow_expandable(pool, size)
        if not self._reserve(wanted):
            return None
        block = Block(self._place(wanted), wanted)
        block.free = False
        self._tell("segment_alloc", block.address, wanted, pool)
        return block

    def _tell(self, what: str, address: int, nbytes: int, pool: Pool) -> None:
        if self.driver_calls is not None:
            self.driver_calls.append((what, address, nbytes, pool.stream))

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release(self, pool: Pool, block: Block) -> bool:
        """Give back a free block that is a whole segment, or its pages; whether anything went (release_block)."""
        if self.expandable_segments:
            return self._unmap(pool, block)
        if block.before is not None or block.after is not None:
            return False
        pool.take(block)
        self.reserved_bytes -= block.size
        self._tell("segment_free", block.address, block.size, pool)
        return True

    def _release_available(self, pool: Pool, size: int) -> bool:
        """Give back just enough of the blocks that are never split (release_available_cached_blocks)."""
        if self.settings.max_split_size is None or self.expandable_segments:
            return False
        wanted = max(size, self._unsplit)
        place = bisect_left(pool.free, (wanted, -1))
        if place < len(pool.free):
            return self._release(pool, pool.free[place][2])
        released = 0
        for found, _, block in reversed(pool.free[:]):
            if released >= wanted or found < self._unsplit:
                break
            released += found
            self._release(pool, block)
        return released >= wanted

    def _collect(self) -> None:
        """Give back large segments that were free for long, if much is reserved (garbage_collect_cached_blocks)."""
        missing = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self.limit_bytes)
        searches = self._searches[False][0]
        pools = [pool for pool in self._pools.values() if not pool.small]
        while missing > 0:
            free = [(p, b) for p in pools for _, _, b in p.free if b.before is None and b.after is None]
            if not free:
                break
            average = sum(searches - block.since for _, block in free) / len(free)
            for pool, block in free:
                if searches - block.since >= average:
                    missing -= block.size
                    self._release(pool, block)

    # -- expandable segments -----------------------------------------------------------------------------------------

    def _grow_expandable(self, pool: Pool, size: int) -> Block | None:
        """Back the lowest stretch that is free for `size` with memory (find_expandable_block, map_block)."""
        if not pool.holes:
            pool.expand_from(self._place(ADDRESSES * pool.page_bytes))
        for _, hole in pool.holes:  # the last one always has room
            before = hole.before
            block = before if before.free and before.mapped else hole
            if room_of(block) >= size:
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

    def _map(self, pool: Pool, hole: Block, nbytes: int) -> Block:
        """Back the beginning of a hole; the free block that it becomes, or becomes part of."""
        pool.holes.pop(bisect_left(pool.holes, (hole.address,)))
        if nbytes < hole.size:
            rest = Block(hole.address + nbytes, hole.size - nbytes, mapped=False)
            link(hole, rest, hole.after)
            insort(pool.holes, (rest.address, rest))
            hole.size = nbytes
        hole.mapped = True
        self._tell("segment_map", hole.address, nbytes, pool)
        pool.put(hole)
        return hole

    def _unmap(self, pool: Pool, block: Block) -> bool:
        """Give the pages that lie wholly in a free block back to the driver; whether there are any (unmap_block)."""
        page, offset = pool.page_bytes, block.address - pool.base
        start, end = (pool.base + n * page for n in (-(-offset // page), (offset + block.size) // page))
        if end <= start:
            return False
        pool.take(block)
        pieces = [(block.address, start, True), (start, end, False), (end, block.address + block.size, True)]
        before, after = block.before, block.after
        for first, last, mapped in pieces:
            if first < last:
                piece = Block(first, last - first, mapped=mapped)
                link(before, piece, after)
                before = piece
                if mapped:
                    insort(pool.free, (piece.size, piece.address, piece))
                else:
                    hole = piece
        self.reserved_bytes -= hole.size
        self._tell("segment_unmap", hole.address, hole.size, pool)
        for neighbour in (hole.before, hole.after):
            if neighbour is not None and not neighbour.mapped:
                pool.holes.pop(bisect_left(pool.holes, (neighbour.address,)))
                absorb(hole, neighbour)
        insort(pool.holes, (hole.address, hole))
        return True
