"""The allocator's memory at every moment: the same pieces as the allocator itself has there, and a picture of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_svg_report import boxes, language

from helpers import allocator_panel
from virtual_gpu.allocator import CachingAllocator
from virtual_gpu.cards import CATALOG
from virtual_gpu.drawing.allocator import draw_films, happening
from virtual_gpu.trace.film import HOLE, Film
from virtual_gpu.trace.trace import Trace
from virtual_gpu.units import MiB

__all__ = ["language"]  # a fixture
REQUESTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 10**6), st.sampled_from([0, 512, 4096, MiB, 3 * MiB, 12 * MiB, 30 * MiB])),
    min_size=1,
    max_size=60,
)


def trace_of(requests):
    """A trace: (True, _, bytes) asks, (False, which, _) gives one of those that are there back."""
    rows, there = [], []
    for asks, which, nbytes in requests:
        if asks or not there:
            there.append(len(rows))
            rows.append((len(rows), nbytes, len(rows) % 5))
        else:
            born = there.pop(which % len(there))
            rows.append(rows[born])
    born, nbytes, category = np.array(rows, dtype=np.int64).T
    return Trace(born, nbytes, category, np.ones(len(rows), dtype=np.int64), ("forward",))


@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.booleans(), st.sampled_from([None, 64 * MiB, 100 * MiB]))
def test_every_moment_is_the_allocators(requests, expandable, capacity):
    trace = trace_of(requests)
    film = Film(trace, capacity, expandable_segments=expandable)
    allocator = CachingAllocator(capacity, expandable_segments=expandable)
    for entry, (born, nbytes) in enumerate(zip(trace.born.tolist(), trace.nbytes.tolist(), strict=True)):
        failed = False
        if born == entry:
            try:
                allocator.allocate(entry, nbytes)
            except MemoryError:
                failed = True
        else:
            allocator.free(born)
        frame, segments = film.at(entry + 1), allocator.segments()
        pieces = [piece for segment in segments for piece in segment.pieces]
        assert frame.nbytes.tolist() == [piece.size for piece in pieces]
        assert frame.category.tolist() == [HOLE if p.name is None else trace.category[p.name] for p in pieces]
        assert frame.segments.tolist() == [segment.size for segment in segments]
        assert frame.reserved == allocator.reserved_bytes
        assert frame.largest_hole == max((piece.size for piece in pieces if piece.name is None), default=0)
        if failed:
            assert (film.failed, film.end) == (entry, entry + 1)
            assert film.at(entry + 5).reserved == frame.reserved
            return
    assert (film.failed, film.end) == (None, len(trace))


@pytest.fixture(scope="module")
def panel():
    return allocator_panel(13, gpu="T4")


def test_the_chapters_story(panel):
    fixed, expandable = panel.films.values()
    assert expandable.failed is None
    asked, last = int(fixed.trace.nbytes[fixed.failed]), fixed.at(fixed.end)
    left = CATALOG["T4"].capacity_bytes - last.reserved
    assert last.largest_hole < asked < last.holes.sum()
    assert left < asked
    # The same bytes of blocks lie in either, up to the rests that are not split off.
    for moment in panel.moments[:: len(panel.moments) // 7]:
        if moment < fixed.end:
            a, b = (film.at(moment) for film in (fixed, expandable))
            assert 0 <= (a.reserved - a.holes.sum()) - (b.reserved - b.holes.sum()) < 256 * MiB


def test_the_panel_begins_at_the_oom_and_follows(panel):
    assert panel.moments[panel.request.value - 1] == panel.films[next(iter(panel.films))].end
    at_the_stop = panel.picture.value
    assert "OOM" in at_the_stop and "381.88 MiB 요청" in panel.status.value
    assert panel._repr_mimebundle_()["image/svg+xml"] == at_the_stop
    panel.request.value = 1
    assert "OOM" not in panel.picture.value and f"1/{len(panel.moments):,}: 4. 순전파" in panel.status.value
    panel.back.click()
    assert panel.picture.value == at_the_stop


def test_the_slider_covers_one_optimizer_step(panel):
    trace = panel.trace
    names = [trace.names[trace.span[moment - 1] // 2] for moment in panel.moments]
    assert list(dict.fromkeys(names)) == ["forward", "backward", "step"]
    assert trace.allocates[panel.moments - 1].all()


@pytest.mark.parametrize("share", [0, 1 / 3, 1])
def test_the_picture_stays_inside_its_sheet(panel, share, language):
    moment = int(panel.moments[int(share * (len(panel.moments) - 1))])
    drawing = draw_films(panel.films, moment)
    for _, left, top, right, bottom in boxes(drawing):
        assert 0 <= left <= right <= drawing.width + 1 and 0 <= top <= bottom <= drawing.height
    assert drawing.svg() == draw_films(panel.films, moment).svg()


def test_what_happens_is_said(panel):
    assert happening(panel.trace, panel.films[next(iter(panel.films))].end) == "4. 순전파, 381.88 MiB 요청"


def test_a_setting_that_fits_ends_at_its_end():
    panel = allocator_panel(1, gpu="T4", model_id="gpt2", sequence_length=64, optimizer="sgd")
    assert [film.failed for film in panel.films.values()] == [None, None]
    assert panel.request.value == len(panel.moments)
    panel.request.value = 1
    panel.back.click()
    assert panel.request.value == len(panel.moments)
