"""Replaying what comes again: the allocator ends as if it had been given everything, and was given less."""

import pytest

from virtual_gpu.allocator import CachingAllocator
from virtual_gpu.allocator_blocks import Falling, Piece, Segment
from virtual_gpu.allocator_settings import MIB, AllocatorSettings
from virtual_gpu.cards import CATALOG
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.step.predict import virtual_run
from virtual_gpu.step.setting import Setting
from virtual_gpu.trace import trace as of_trace
from virtual_gpu.trace.micro_batches import LATER, MICRO_BATCHES, with_micro_batches
from virtual_gpu.trace.repeats import repeats_of

WANTED = 24


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"peft": "lora", "gradient_checkpointing": True, "model_id": "Qwen/Qwen3-4B", "sequence_length": 1024},
        {"precision": "mixed_fp16", "optimizer": "adamw_8bit"},
    ],
    ids=str,
)
def many(request):
    setting = Setting(
        **{"batch_size": 1, "model_id": "gpt2", "gradient_accumulation_steps": MICRO_BATCHES} | request.param
    )
    config = with_depth(load_config(setting.model_id), 4)
    return with_micro_batches(virtual_run(setting, config, CATALOG["T4"], LATER).trace, WANTED)


def test_they_are_found_step_by_step(many):
    """The first of a step is not like the others."""
    repeats = repeats_of(many)
    assert [repeat.times for repeat in repeats] == [WANTED - 1] * 2
    for repeat, phase in zip(repeats, (2, 2 * WANTED + 3), strict=True):
        assert many.span[repeat.start] == 2 * phase + 1 > many.span[repeat.start - 1]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("room", [None, 1.0, 1.03])
def test_it_is_what_a_replay_of_everything_gives(many, room, expandable, monkeypatch):
    capacity = None if room is None else int(room * many.peak_bytes)
    asked = []
    allocate = CachingAllocator.allocate
    monkeypatch.setattr(CachingAllocator, "allocate", lambda self, *what: (asked.append(1), allocate(self, *what))[1])

    def replayed():
        asked.clear()
        try:
            trace, allocator = many.through(capacity, expandable_segments=expandable)
        except MemoryError as error:
            return error.args, len(asked)
        peaks = allocator.peak_reserved_bytes, allocator.peak_allocated_bytes, allocator.retries
        return (trace.held.tolist(), allocator.segments(), peaks), len(asked)

    ours, requests = replayed()
    monkeypatch.setattr(of_trace, "repeats_of", lambda trace: [])
    whole, all_requests = replayed()
    assert ours == whole and requests <= all_requests
    if room is None:
        assert all_requests == many.allocates.sum() > 1.5 * requests


def test_blocks_that_grow_old_are_replayed_whole(many, monkeypatch):
    """Garbage collection goes by how often something was asked for since."""
    settings = AllocatorSettings(garbage_collection_threshold=0.6, memory_fraction=0.9)
    monkeypatch.setattr(of_trace, "repeats_of", lambda trace: pytest.fail("looked for repeats"))
    many.through(2 * many.peak_bytes, settings=settings)


def test_fewer_than_three_or_other_entries_are_none(many):
    first = repeats_of(many)[0]
    sizes = many.nbytes.copy()
    for turn in range(2, first.times, 3):
        sizes[first.start + turn * first.length] += 512
    changed = of_trace.Trace(many.born, sizes, many.category, many.span, many.names, stream=many.stream)
    assert repeats_of(changed)[:-1] == [] and repeats_of(changed)[-1] == repeats_of(many)[-1]
    short = virtual_run(
        Setting(1, MICRO_BATCHES, model_id="gpt2"), with_depth(load_config("gpt2"), 2), CATALOG["T4"]
    ).trace
    assert repeats_of(short) == []


def test_the_state_of_an_allocator_knows_where_segments_end():
    """Two blocks side by side: of one segment, or of two."""
    base = 2**47

    def state(*cuts):
        allocator = CachingAllocator(place=Falling())
        pieces = [Piece(base, 2 * MIB, 0), Piece(base + 2 * MIB, 2 * MIB, 1)]
        allocator.restore(Segment(0, False, [*pieces[a:b]]) for a, b in zip((0, *cuts), (*cuts, 2), strict=True))
        return allocator.state(0)

    assert state() == state() != state(1)


def test_names_count_from_where_they_are_asked_for():
    one, other = CachingAllocator(), CachingAllocator()
    for allocator, names in ((one, (3, 10)), (other, (3, 17))):
        for name in names:
            allocator.allocate(name, MIB)
    assert one.state(10) == other.state(17) != other.state(16)
    one.rename(10, 7)
    assert one.state(0) == other.state(0)
    one.free(17)
    assert one.state(0) != other.state(0)
