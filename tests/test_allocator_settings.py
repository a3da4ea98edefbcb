"""PYTORCH_ALLOC_CONF: what it says, and what the allocator makes of it; numbers of PyTorch's test/test_cuda.py."""

import pytest

from virtual_gpu.allocator import MIB, CachingAllocator, expandable_segments_asked
from virtual_gpu.allocator_settings import AllocatorSettings


def allocator(capacity=None, text=""):
    return CachingAllocator(capacity, settings=AllocatorSettings.parse(text))


def refused(allocator, name, nbytes):
    with pytest.raises(MemoryError):
        allocator.allocate(name, nbytes)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False,max_split_size_mb:128", {"max_split_size": 128 * MIB}),
        (" garbage_collection_threshold : 0.5 ", {"garbage_collection_threshold": 0.5}),
        ("per_process_memory_fraction:1.0", {"memory_fraction": 1.0}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": (4,) * 16}),
        (
            "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]",
            {"roundup_power2_divisions": (*[8] * 7, 2, 2, 2, *[1] * 6)},
        ),
        ("backend:native,pinned_num_register_threads:4", {}),
    ],
)
def test_what_the_text_says(text, expected):
    assert AllocatorSettings.parse(text) == AllocatorSettings(**expected)


@pytest.mark.parametrize(
    "text",
    [
        "garbage_collection_threshold:1.2",  # test_allocator_settings: "invalid"
        "garbage_collection_threshold:0",
        "max_split_size_mb:2",  # … "too small"
        "max_split_size_mb:much",
        "expandable_segments:1",
        "expandable_segments",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[64:3]",
        "backend:cudaMallocAsync",
        "expandable_segment:True",
    ],
)
def test_what_is_refused(text):
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        AllocatorSettings.parse(text)


def test_the_newer_variable_goes_first(monkeypatch):
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:20"}
    assert AllocatorSettings.from_environment(both) == AllocatorSettings(expandable_segments=True)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert expandable_segments_asked()


@pytest.mark.parametrize(
    "text, asked, given",
    [
        ("", 84 * MIB, 84 * MIB),  # test_allocator_settings
        ("roundup_power2_divisions:4", 84 * MIB, 96 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 84 * MIB, 88 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 400 * MIB, 512 * MIB),
        ("roundup_power2_divisions:4", 2048, 2048),  # up to 512 bytes × divisions: not rounded further
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:8", 64 * MIB, 64 * MIB),
    ],
)
def test_sizes_are_rounded_up(text, asked, given):
    assert allocator(text=text).allocate(1, asked) == given


def test_a_fraction_of_the_memory():
    """test_set_per_process_memory_fraction: 0.499 of all is given where half is allowed, half with it is not."""
    total = 16_000 * MIB
    half = allocator(total, "per_process_memory_fraction:0.5")
    half.allocate(1, int(0.499 * total))
    half.free(1)
    half.empty_cache()
    refused(half, 2, total // 2 + 1)
    with pytest.raises(ValueError, match="capacity_bytes"):
        allocator(None, "per_process_memory_fraction:0.5")


def test_out_of_memory_and_again():
    """test_out_of_memory_retry: two blocks of half the memory do not fit; after the first is freed the second does."""
    total = 1000 * MIB
    ours = allocator(total)
    ours.allocate(1, total // 2)
    refused(ours, 2, total // 2 + MIB)
    ours.free(1)
    ours.allocate(2, total // 2 + 2 * MIB)
    assert ours.retries == 2 and ours.reserved_bytes == total // 2 + 2 * MIB


def test_blocks_above_the_split_size_are_not_split():
    """test_max_split_expandable without and with expandable segments: 40 MiB three times, then 120 MiB at once."""
    for text in ("max_split_size_mb:40", "max_split_size_mb:40,expandable_segments:True"):
        ours = allocator(120 * MIB, text)
        for name in range(3):
            ours.allocate(name, 40 * MIB)
        refused(ours, 3, 40 * MIB)
        for name in range(3):
            ours.free(name)
        ours.allocate(4, 120 * MIB)
        assert ours.reserved_bytes == 120 * MIB
    plain, split = allocator(), allocator(text="max_split_size_mb:40")
    for ours in (plain, split):
        ours.allocate(1, 100 * MIB)
        ours.free(1)
        ours.allocate(2, 30 * MIB)  # from the block of 100 MiB, unless that is above the split size
    assert (plain.reserved_bytes, split.reserved_bytes) == (100 * MIB, 130 * MIB)
    assert split.allocate(3, 90 * MIB) == 100 * MIB  # as a whole: not 20 MiB more than is asked for
    split.free(3)
    assert split.allocate(4, 78 * MIB) == 78 * MIB


def test_only_as_many_large_blocks_go_back_as_are_needed():
    ours = allocator(200 * MIB, "max_split_size_mb:40")
    for name, size in enumerate((40, 60, 100)):
        ours.allocate(name, size * MIB)
    for name in range(3):
        ours.free(name)
    ours.allocate(3, 120 * MIB)  # the largest goes first: 100, then 60 MiB
    assert (ours.reserved_bytes, ours.retries) == (160 * MIB, 0)
    ours.free(3)
    ours.allocate(4, 141 * MIB)  # one that is large enough by itself is not there: both go
    assert ours.reserved_bytes == 142 * MIB


def test_old_blocks_are_collected():
    """test_garbage_collect_expandable's sizes: a limit of 120 MiB, half of it the threshold, 40 + 40 freed, 80 fits."""
    for expandable in ("", ",expandable_segments:True"):
        text = f"per_process_memory_fraction:1.0,garbage_collection_threshold:0.5{expandable}"
        ours = allocator(120 * MIB, text)
        for name in range(2):
            ours.allocate(name, 40 * MIB)
        for name in range(2):
            ours.free(name)
        ours.allocate(2, 80 * MIB)
        assert ours.retries == 0  # collected, or grown together, before an allocation failed
        assert ours.reserved_bytes == 80 * MIB


def test_the_oldest_are_collected_first():
    ours = allocator(400 * MIB, "per_process_memory_fraction:1.0,garbage_collection_threshold:0.5")
    for name, size in enumerate((60, 70, 80)):
        ours.allocate(name, size * MIB)
    for name in range(2):
        ours.free(name)
        ours.allocate(10 + name, 12 * MIB)  # a search: the first has been free for longer
    ours.allocate(20, 100 * MIB)
    assert ours.retries == 0
    assert 60 * MIB not in [segment.size for segment in ours.segments() if segment.pieces[0].name is None]
