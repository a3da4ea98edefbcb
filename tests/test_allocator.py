"""The caching allocator's rules: known cases, conservation, no overlap, and a naive reference on random traces."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virtual_gpu.allocator import BLOCK_BYTES, MIB, SMALL_BYTES, CachingAllocator, round_size, segment_size
from virtual_gpu.trace.recorder import TimelineRecorder


def test_sizes():
    assert [round_size(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert segment_size(512) == segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(10 * MIB + 512) == 12 * MIB


def test_a_large_rest_is_split_off_and_a_small_one_is_not():
    allocator = CachingAllocator()
    allocator.allocate(1, 117 * MIB + 512)  # a segment of 118 MiB; the rest is below 1 MiB and stays with the block
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (118 * MIB, 118 * MIB)
    allocator.allocate(2, 5 * MIB)  # of a segment of 20 MiB; the rest is free
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (123 * MIB, 138 * MIB)
    allocator.allocate(3, 15 * MIB)  # fits that rest exactly
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (138 * MIB, 138 * MIB)


def test_the_smallest_block_that_is_large_enough():
    allocator = CachingAllocator()
    for name, size in enumerate((30, 14, 22), start=1):
        allocator.allocate(name, size * MIB)
    for name in (1, 2, 3):
        allocator.free(name)
    allocator.allocate(4, 20 * MIB)
    pieces = [piece for segment in allocator.segments() for piece in segment.pieces]
    assert next(piece for piece in pieces if piece.name == 4).address == 2**47 - 66 * MIB  # in the one of 22 MiB
    assert allocator.reserved_bytes == 66 * MIB


def test_neighbours_merge_and_only_a_wholly_free_segment_goes_back():
    allocator = CachingAllocator()
    for name in (1, 2):
        allocator.allocate(name, 6 * MIB)
    allocator.free(1)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(2)
    assert [[piece.size for piece in segment.pieces] for segment in allocator.segments()] == [[20 * MIB]]
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0


def test_cached_segments_go_back_before_the_error():
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate(1, 60 * MIB)
    allocator.free(1)
    allocator.allocate(2, 80 * MIB)  # no room beside the cached 60 MiB
    assert (allocator.retries, allocator.reserved_bytes, allocator.peak_reserved_bytes) == (1, 80 * MIB, 80 * MIB)
    with pytest.raises(MemoryError):
        allocator.allocate(3, 21 * MIB)
    assert (allocator.retries, allocator.allocated_bytes) == (2, 80 * MIB)
    allocator.allocate(4, 20 * MIB)


def test_fragments_that_expandable_segments_do_not_have():
    """Every second of many blocks is freed: as much is free as is asked for, in pieces."""
    for expandable in (False, True):
        allocator = CachingAllocator(200 * MIB, expandable_segments=expandable)
        for name in range(10):
            allocator.allocate(name, 20 * MIB)
        for name in range(0, 10, 2):
            allocator.free(name)
        allocator.allocate(100, 60 * MIB)  # segments, or pages, of freed blocks go back and come anew
        assert allocator.allocated_bytes == 160 * MIB
        assert allocator.reserved_bytes <= 200 * MIB
    # Within one segment only pages can move: fixed segments are stuck, expandable ones are not.
    sizes = [5 * MIB] * 4  # one segment of 20 MiB, or one page
    for expandable, outcome in ((False, MemoryError), (True, None)):
        allocator = CachingAllocator(60 * MIB, expandable_segments=expandable)
        for name, size in enumerate([*sizes, *sizes, *sizes]):
            allocator.allocate(name, size)
        for name in (1, 2, 3, 4, 5, 6):  # 30 MiB in a row, across two segments
            allocator.free(name)
        if outcome:
            with pytest.raises(outcome):
                allocator.allocate(100, 30 * MIB)
        else:
            allocator.allocate(100, 30 * MIB)


def run(allocator, trace, capacity):
    """Random allocations and releases by name; the living ones, and which were refused."""
    living, refused = {}, []
    for name, (release, choice, size) in enumerate(trace):
        if release and living:
            gone = sorted(living)[choice % len(living)]
            allocator.free(gone)
            del living[gone]
            continue
        before = allocator.allocated_bytes
        try:
            allocator.allocate(name, size)
        except MemoryError:
            refused.append(name)
            assert allocator.allocated_bytes == before  # nothing was taken
        else:
            living[name] = size
        check(allocator, living, capacity)
    return living, refused


def check(allocator, living, capacity):
    """Conservation: pieces tile their segments, none overlap, what is in use is what is alive."""
    segments = allocator.segments()
    pieces = [piece for segment in segments for piece in segment.pieces]
    assert sum(piece.size for piece in pieces) == allocator.reserved_bytes
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert capacity is None or allocator.peak_reserved_bytes <= capacity
    used = {piece.name: piece.size for piece in pieces if piece.name is not None}
    assert used.keys() == {name for name, size in living.items() if size}
    assert sum(used.values()) == allocator.allocated_bytes
    for name, size in used.items():
        assert round_size(living[name]) <= size <= round_size(living[name]) + SMALL_BYTES
        assert size % BLOCK_BYTES == 0
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.address):
        assert piece.address >= end
        end = piece.address + piece.size
    for segment in segments:
        for a, b in itertools.pairwise(segment.pieces):
            assert a.address + a.size == b.address
            assert a.name is not None or b.name is not None  # free neighbours have merged


HOLE = "hole"
# Where the rules turn: the smallest block, the small pool's end and segment, a segment of one's own, a large segment.
EDGES = [512, MIB, 2 * MIB, 10 * MIB, 20 * MIB]
SIZES = st.one_of(
    st.tuples(st.sampled_from(EDGES), st.integers(-1024, 1024)).map(sum),
    st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES), st.integers(-512, 512)).map(sum),
    st.integers(0, 60 * MIB),
)
traces = st.lists(st.tuples(st.booleans(), st.integers(0, 10**6), SIZES.map(lambda n: max(n, 0))), max_size=60)


@settings(max_examples=60, deadline=None)
@given(traces, st.sampled_from([None, 40 * MIB, 150 * MIB]), st.booleans())
def test_conservation_on_random_traces(trace, capacity, expandable):
    allocator = CachingAllocator(capacity, expandable_segments=expandable)
    living, _ = run(allocator, trace, capacity)
    for name in living:
        allocator.free(name)
    allocator.empty_cache()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0


class Naive:
    """The same rules without any index: lists of [size, name] per segment, searched from end to end.

    An expandable segment is a list of the same kind, with HOLE in the place of a name where no memory is behind it.
    """

    def __init__(self, capacity, expandable):
        self.capacity, self.expandable = capacity, expandable
        self.segments, self.address = [], 2**47  # (address, pool, [[size, name], …]); each below the one before

    def reserved(self):
        return sum(size for _, _, blocks in self.segments for size, name in blocks if name != HOLE)

    def has_room(self, nbytes):
        return self.capacity is None or self.reserved() + nbytes <= self.capacity

    def find(self, size, pool):
        """The best fit: the smallest, then the lowest; of expandable ones what can grow least, among the larger."""
        free = []
        for address, of, blocks in self.segments:
            for block, after in zip(blocks, [*blocks[1:], None], strict=True):
                if of == pool and block[1] is None and block[0] >= size:
                    grown = block[0] + (after[0] if after is not None and after[1] == HOLE else 0)
                    free.append((block[0], address, grown, blocks, block))
                address += block[0]
        free.sort(key=lambda entry: entry[:2])
        if not free:
            return None
        best = free[0]
        for entry in free[1:] if self.expandable else ():
            if entry[2] >= best[2]:
                break
            best = entry
        return best[3:]

    def page(self, pool):
        return 2 * MIB if pool[1] else 20 * MIB

    def expand(self, size, pool):
        """Back the first stretch of free and missing memory that is long enough, from its missing pages on."""
        if all(of != pool for _, of, _ in self.segments):
            self.address -= 2**19 * self.page(pool)
            self.segments.append((self.address, pool, [[2**19 * self.page(pool), HOLE]]))
        blocks = next(blocks for _, of, blocks in self.segments if of == pool)
        for hole in (i for i, block in enumerate(blocks) if block[1] == HOLE):
            first = hole - 1 if hole and blocks[hole - 1][1] is None else hole
            last, room = first, 0
            while last < len(blocks) and blocks[last][1] in (None, HOLE) and room < size:
                room, last = room + blocks[last][0], last + 1
            if room >= size:
                break
        start = sum(block[0] for block in blocks[:first])
        while True:
            first = self.at(blocks, start)
            have = blocks[first][0] if blocks[first][1] is None else 0
            if have >= size:
                return blocks, blocks[first]
            hole = first + (have > 0)
            pages = -(-(size - have) // self.page(pool)) * self.page(pool)
            mapped = min(pages, blocks[hole][0])
            if not self.has_room(mapped):
                return None
            rest = blocks[hole][0] - mapped
            blocks[hole : hole + 1] = [[mapped, None], *([[rest, HOLE]] if rest else [])]
            self.merge(blocks)

    def at(self, blocks, offset):
        """The block that holds this place."""
        for i, (size, _) in enumerate(blocks):
            if offset < size:
                return i
            offset -= size

    def give_back(self):
        if not self.expandable:
            self.segments = [s for s in self.segments if any(name is not None for _, name in s[2])]
            return
        for _, pool, blocks in self.segments:
            offset, pieces = 0, []
            for size, name in blocks:
                page = self.page(pool)
                low, high = -(-offset // page) * page, (offset + size) // page * page
                if name is None and low < high:
                    pieces += [[low - offset, None], [high - low, HOLE], [offset + size - high, None]]
                else:
                    pieces.append([size, name])
                offset += size
            blocks[:] = [piece for piece in pieces if piece[0]]
            self.merge(blocks)

    def new(self, size, pool):
        if self.expandable:
            return self.expand(size, pool)
        wanted = 2 * MIB if pool[1] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if not self.has_room(wanted):
            return None
        self.address -= wanted
        self.segments.append((self.address, pool, [[wanted, None]]))
        return self.segments[-1][2], self.segments[-1][2][0]

    def allocate(self, name, nbytes, stream):
        size = -(-nbytes // 512) * 512
        if not size:
            return
        pool = stream, size <= MIB
        found = self.find(size, pool) or self.new(size, pool)
        if found is None:
            self.give_back()
            found = self.new(size, pool)
            if found is None:
                raise MemoryError
        blocks, block = found
        rest = block[0] - size
        block[1] = name
        if rest >= 512 if pool[1] or self.expandable else rest > MIB:
            block[0] = size
            blocks.insert(next(i for i, b in enumerate(blocks) if b is block) + 1, [rest, None])

    def free(self, name):
        for _, _, blocks in self.segments:
            for block in blocks:
                if block[1] == name:
                    block[1] = None
            self.merge(blocks)

    def merge(self, blocks):
        """One of each two neighbours that are both free, or both without memory."""
        i = 0
        while i + 1 < len(blocks):
            if blocks[i][1] == blocks[i + 1][1] and blocks[i][1] in (None, HOLE):
                blocks[i][0] += blocks.pop(i + 1)[0]
            else:
                i += 1

    def mapped(self):
        """[(address, [(size, name), …]), …] of every stretch with memory behind it, by address."""
        found = []
        for address, _, blocks in self.segments:
            fresh = True
            for size, name in blocks:
                if name != HOLE:
                    if fresh:
                        found.append((address, []))
                    found[-1][1].append((size, name))
                fresh = name == HOLE
                address += size
        return sorted(found)


@settings(max_examples=400, deadline=None)
@given(traces, st.sampled_from([None, 64 * MIB, 200 * MIB]), st.booleans(), st.integers(1, 3))
def test_equal_to_a_naive_reference(trace, capacity, expandable, streams):
    ours, naive = CachingAllocator(capacity, expandable_segments=expandable), Naive(capacity, expandable)
    living = set()
    for name, (release, choice, size) in enumerate(trace, 1):
        if release and living:
            gone = sorted(living)[choice % len(living)]
            living.remove(gone)
            ours.free(gone)
            naive.free(gone)
        else:
            outcomes = []
            for allocator in (ours, naive):
                try:
                    allocator.allocate(name, size, choice % streams)
                    outcomes.append("taken")
                except MemoryError:
                    outcomes.append("refused")
            assert outcomes[0] == outcomes[1]
            if outcomes[0] == "taken":
                living.add(name)
        mine = [
            (segment.address, [(piece.size, piece.name) for piece in segment.pieces]) for segment in ours.segments()
        ]
        assert mine == naive.mapped()
        assert ours.reserved_bytes == naive.reserved()


def test_a_trace_is_replayed():
    """Without a limit, with one, and with one that ends it."""
    chance = random.Random(0)
    sizes = {name: chance.randrange(1, 40 * MIB) for name in range(1, 30)}
    recorder = TimelineRecorder({1: (sizes[1], round_size(sizes[1]), "other")})
    for name in range(2, 30):
        recorder.allocated(name, sizes[name], round_size(sizes[name]), "other")
    for name in range(2, 30):
        recorder.freed(name)
    trace = recorder.trace()
    free = trace.reserved_peak()
    assert free >= sum(sizes.values())
    assert trace.reserved_peak(free) == free
    with pytest.raises(MemoryError):
        trace.reserved_peak(sum(sizes.values()) - 1)
    assert trace.reserved_peak(expandable_segments=True) >= sum(sizes.values())
