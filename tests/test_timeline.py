"""Live bytes by category over the phases, against a recount of the same events."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from virtual_gpu.trace.recorder import TimelineRecorder
from virtual_gpu.trace.timeline import CATEGORIES, PhaseCurve, Timeline


def curve(name, *totals):
    """A phase that holds so many bytes, all of them activations."""
    live = np.zeros((len(totals), len(CATEGORIES)), dtype=np.int64)
    live[:, CATEGORIES.index("activations")] = totals
    return PhaseCurve(name, live)


def test_the_peak_is_the_first_of_equal_ones():
    timeline = Timeline([curve("forward", 0, 5, 3), curve("backward", 3, 9, 2, 9, 1), curve("step", 1, 9, 0)])
    assert timeline.peak == (1, 1)
    assert (timeline.peak_phase, timeline.peak_bytes) == ("backward", 9)
    assert timeline.at_peak() == dict.fromkeys(CATEGORIES, 0) | {"activations": 9}
    assert timeline.at_end(0)["activations"] == 3


def test_nothing_recorded():
    timeline = Timeline()
    assert (timeline.peak_bytes, timeline.peak_phase) == (0, None)
    assert timeline.at_peak() == dict.fromkeys(CATEGORIES, 0)
    assert TimelineRecorder({}).timeline().phases == []


def test_a_phase_without_events_keeps_what_was_there():
    recorder = TimelineRecorder({1: (512, 512, "parameters")})
    recorder.enter("forward")
    recorder.leave()
    [phase] = recorder.timeline().phases
    assert phase.total.tolist() == [512, 512]


def test_a_label_counts_from_birth():
    recorder = TimelineRecorder({})
    recorder.enter("backward")
    recorder.allocated(1, 512, 512, "activations")
    recorder.allocated(2, 1024, 1024, "activations")
    recorder.label(1, "gradients")
    recorder.freed(1)
    recorder.leave()
    [phase] = recorder.timeline().phases
    assert dict(zip(CATEGORIES, phase.live[1], strict=True))["gradients"] == 512
    assert phase.live[-1].tolist() == [0, 0, 0, 1024, 0]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 2**40), st.sampled_from(CATEGORIES)),
        st.tuples(st.just("free"), st.integers(0, 10**6)),
        st.tuples(st.just("label"), st.integers(0, 10**6), st.sampled_from(CATEGORIES)),
        st.tuples(st.just("phase"), st.sampled_from(["forward", "backward", "step"])),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2**40), st.sampled_from(CATEGORIES)), max_size=4), EVENTS)
def test_against_a_recount(before, events):
    blocks = dict(enumerate(before, start=1))
    recorder = TimelineRecorder({block: (size, size, kind) for block, (size, kind) in blocks.items()})
    size = {block: nbytes for block, (nbytes, _) in blocks.items()}
    category = {block: kind for block, (_, kind) in blocks.items()}
    living, moments, phases, inside = set(blocks), [], [], None

    def leave():
        if inside is not None:
            recorder.leave()
            phases.append((inside, list(moments)))

    for kind, *rest in events:
        if kind == "allocate":
            block = len(size) + 1
            size[block], category[block] = rest
            living.add(block)
            recorder.allocated(block, rest[0], *rest)
        elif kind == "free" and living:
            block = sorted(living)[rest[0] % len(living)]
            living.discard(block)
            recorder.freed(block)
        elif kind == "label" and size:
            block = sorted(size)[rest[0] % len(size)]
            category[block] = rest[1]
            recorder.label(block, rest[1])
        elif kind == "phase":
            leave()
            inside, moments = rest[0], []
            recorder.enter(rest[0])
        moments.append(set(living))
    leave()

    def row(held):
        return [sum(size[block] for block in held if category[block] == kind) for kind in CATEGORIES]

    timeline = recorder.timeline()
    assert [phase.name for phase in timeline.phases] == [name for name, _ in phases]
    for phase, (_, held) in zip(timeline.phases, phases, strict=True):
        rows = [row(moment) for moment in held]
        assert phase.live[0].tolist() == rows[0]
        assert phase.live[-1].tolist() == rows[-1]
        assert phase.peak_bytes == max(map(sum, rows))
        assert all(moment in rows for moment in phase.live.tolist())
    assert timeline.peak_bytes == max((phase.peak_bytes for phase in timeline.phases), default=0)
