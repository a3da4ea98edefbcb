"""The least memory in which the allocator gets a trace through: what is not replayed would have said the same."""

import numpy as np
import pytest

from virtual_gpu.allocator import MIB
from virtual_gpu.trace.trace import Trace

SIZES = (512, 3 * 2**17, MIB, 3 * MIB, 9 * MIB, 21 * MIB, 30 * MIB)


def drawn(seed, entries=400):
    """Blocks of sizes around the allocator's limits that come and go; those that are left go at the end."""
    random = np.random.default_rng(seed)
    born, sizes, live = [], [], []
    while len(born) < entries or live:
        if live and (len(born) >= entries or random.random() < 0.4):
            entry = live.pop(random.integers(len(live)))
            sizes.append(sizes[entry])
        else:
            entry = len(born)
            live.append(entry)
            sizes.append(random.choice(SIZES))
        born.append(entry)
    zeros = np.zeros(len(born), dtype=np.int64)
    return Trace(np.array(born), np.array(sizes), zeros, zeros, ())


def searched(trace, step_bytes):
    """The same search, every limit replayed."""
    peak = trace.peak_bytes
    low, high = 0, -(-(trace.reserved_peak() - peak) // step_bytes)
    while low < high:
        middle = (low + high) // 2
        try:
            trace.reserved_peak(peak + middle * step_bytes)
            high = middle
        except MemoryError:
            low = middle + 1
    return peak + low * step_bytes


@pytest.mark.parametrize("step_bytes", [MIB // 4, 2 * MIB])
def test_the_search_is_that_which_replays_everything(step_bytes, monkeypatch):
    replays, replay = [], Trace.reserved_peak
    monkeypatch.setattr(Trace, "reserved_peak", lambda *a, **named: replays.append(1) or replay(*a, **named))
    few = every = 0
    for seed in range(30):
        trace = drawn(seed)
        found, before = trace.smallest_capacity(step_bytes), len(replays)
        assert found == searched(trace, step_bytes), seed
        few, every = few + before, every + len(replays) - before
        replays.clear()
    assert few < every


def test_with_less_room_but_all_that_it_reserved_a_run_is_the_same():
    smaller = 0
    for seed in range(30):
        trace = drawn(seed)
        limit = trace.reserved_peak() - MIB
        try:
            reserved = trace.reserved_peak(limit)
        except MemoryError:
            continue
        held = trace.through(limit)[0].held
        assert np.array_equal(trace.through(reserved)[0].held, held)
        smaller += reserved < limit
    assert smaller
