"""benchmarks/against_traces.py: the card's kept requests beside those of a prediction."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import against_traces
from benchmarks.measure_gpu import NUMBERS, slug
from virtual_gpu.allocator import CachingAllocator
from virtual_gpu.allocator_blocks import Falling, Rising
from virtual_gpu.cards import CATALOG
from virtual_gpu.trace.histories import read_histories
from virtual_gpu.trace.replay import replayed

TITLE = "gpt2, batch 4, length 256"
PATH = against_traces.TRACES / f"{slug(TITLE)}.json.gz"


@pytest.fixture(scope="module")
def rows():
    return {row["title"]: row for row in json.loads(against_traces.RECORD.read_text(encoding="utf-8"))["rows"]}


def predicted(monkeypatch, row, trace):
    numbers = {name: row["measured"][name] for name in NUMBERS}
    report = SimpleNamespace(timeline=SimpleNamespace(trace=trace), **numbers)
    monkeypatch.setattr("helpers.experiment.predict_memory", lambda **_: report)


def test_every_kept_trace_is_of_a_setting(rows):
    titles = {slug(title) for title in rows}
    kept = {path.name.removesuffix(".json.gz") for path in against_traces.TRACES.iterdir()}
    assert len(kept) == 43 and kept <= titles


def test_the_first_request_that_differs_is_told(monkeypatch, rows):
    real = read_histories(PATH)[0].trace()
    predicted(monkeypatch, rows[TITLE], real)
    found = against_traces.again(rows[TITLE], PATH, CATALOG["H100"])
    assert found["equal"] == found["entries"][0] == found["entries"][1] == 4462 and "first" not in found
    assert found["errors"] == dict.fromkeys(NUMBERS.values(), 0)
    sizes = real.nbytes.copy()
    changed = int(np.flatnonzero(real.allocates & (real.span > 0))[100])
    sizes[real.born == changed] += 512
    predicted(monkeypatch, rows[TITLE], replace(real, nbytes=sizes))
    found = against_traces.again(rows[TITLE], PATH, CATALOG["H100"])
    ours, theirs, _, place = found["first"]
    assert (ours, theirs) == (int(real.nbytes[changed]) + 512, int(real.nbytes[changed])) and 100 <= found[
        "equal"
    ] < 200
    assert place == read_histories(PATH)[0].places()[changed] and place in against_traces.line(found)


def reserved_peak(history, place):
    """Of the requests of a history, with the driver's addresses made up: from those that it begins with."""
    allocator = CachingAllocator(settings=history.settings, place=place)
    allocator.restore(history.before)
    allocator.reset_peaks()
    names = {piece.address: piece.name for segment in history.before for piece in segment.pieces}
    for index, (action, address, nbytes, stream) in enumerate(history.events):
        if action == "alloc":
            names[address] = 10**12 + index
            allocator.allocate(names[address], nbytes, stream)
        elif action == "free_completed":
            allocator.free(names.pop(address))
    return allocator.peak_reserved_bytes


def reserved_peaks(path):
    """(on the card, with segments that fall, with segments that rise)."""
    [history] = read_histories(path)
    falling, rising = Falling(), Rising()
    falling.lowest = min(segment.address for segment in history.before)
    rising.end = max(segment.address + segment.size for segment in history.before)
    return replayed(history).peak_reserved_bytes, reserved_peak(history, falling), reserved_peak(history, rising)


def test_segments_that_fall_reserve_what_the_card_reserved():
    """In all 43 histories, and with segments that rise in 29 (`allocator_blocks.Falling` says so)."""
    found = [reserved_peaks(path) for path in against_traces.TRACES.iterdir()]
    assert [sum(peaks[0] == peaks[way] for peaks in found) for way in (1, 2)] == [43, 29]
