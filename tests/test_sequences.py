"""benchmarks/sequences.py: allocation histories in PyTorch's documented format, made here, beside virtual traces."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from torch._C._profiler import gather_traceback, symbolize_tracebacks
from versions import keeps_workspaces

from benchmarks import measure_gpu, sequences
from benchmarks.children import ROOT, Child
from benchmarks.sequences import RealTrace, align, compare, read_history
from helpers.experiment import predict_memory
from virtual_gpu import language
from virtual_gpu.allocator import MIB, CachingAllocator
from virtual_gpu.cards import CATALOG
from virtual_gpu.rules.cublas import cublas_workspace_bytes
from virtual_gpu.trace.trace import Trace

MODULE = {"filename": "/x/lib/python3.11/site-packages/torch/nn/modules/module.py", "line": 1, "name": "_call_impl"}


def frame(name, line=7):
    return {"filename": "/home/kim/lib/python3.11/site-packages/some/model.py", "line": line, "name": name}


def alloc(address, size, name="forward"):
    return {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": [frame(name), MODULE]}


def free(address, size=0):
    requested = {"action": "free_requested", "addr": address, "size": size, "stream": 0, "frames": []}
    return [requested, requested | {"action": "free_completed"}]


def snapshot(events=(), live=(), device=0):
    """live: (size, requested size, state) of the blocks of one segment at 0x1000000."""
    blocks = [{"size": size, "requested_size": asked, "state": state} for size, asked, state in live]
    segment = {"address": 0x1000000, "total_size": sum(b["size"] for b in blocks), "device": 0, "blocks": blocks}
    return {"segments": [segment], "device_traces": [[]] * device + [list(events)]}


def trace(*entries, spans=None, names=("forward", "backward")):
    """Entries: a size allocates, ("free", i) releases what entry i allocated."""
    born = [entry[1] if isinstance(entry, tuple) else i for i, entry in enumerate(entries)]
    sizes = [entries[i] for i in born]
    spans = [1] * len(entries) if spans is None else spans
    return Trace(np.array(born), np.array(sizes), np.zeros(len(born), dtype=np.int64), np.array(spans), names)


def as_history(virtual):
    """What a real GPU that allocates as the trace says would have recorded: (before, after)."""
    allocator = CachingAllocator()
    before, events, live, entry_of = [], [], {}, {}
    for entry, (born, nbytes, span) in enumerate(zip(virtual.born, virtual.nbytes, virtual.span, strict=True)):
        nbytes = int(nbytes)
        if born != entry:
            allocator.free(int(born))
            events += free(live.pop(int(born)), nbytes)
            continue
        allocator.allocate(entry, nbytes)
        block = allocator._used[entry][0]
        live[entry] = entry_of[entry] = block.address
        asked = nbytes - 4  # what was asked for, before it is rounded
        if span:
            events.append({"action": "segment_alloc", "addr": block.address, "size": block.size, "frames": []})
            events.append(alloc(block.address, asked, f"line {entry}"))
        else:
            blocks = [{"size": nbytes, "requested_size": asked, "address": block.address, "state": "active_allocated"}]
            before.append({"address": block.address, "total_size": nbytes, "device": 0, "blocks": blocks})
    return {"segments": before, "device_traces": [[]]}, {"segments": [], "device_traces": [events]}


def without(virtual, entry):
    """The trace without an allocation and its release."""
    keep = np.flatnonzero(virtual.born != entry)
    place = np.zeros(len(virtual), dtype=np.int64)
    place[keep] = np.arange(len(keep))
    columns = {name: getattr(virtual, name)[keep] for name in ("nbytes", "category", "span")}
    return replace(virtual, born=place[virtual.born[keep]], **columns)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_history_becomes_a_trace():
    before = snapshot(live=[(1024, 1000, "active_allocated"), (512, 512, "inactive"), (2048, 2048, "active_allocated")])
    events = [
        alloc(10, 700, "first"),
        {"action": "segment_alloc", "addr": 0, "size": 2**21, "frames": []},
        alloc(20, 512, "second"),
        *free(20),
        *free(10),
        {"action": "snapshot", "addr": 0, "size": 0, "frames": []},
        alloc(10, 1, "third"),  # the address comes again
        *free(0x1000000 + 1536),  # the third block of the segment
        *free(10),
    ]
    real = read_history(before, snapshot(events))
    assert real.trace.nbytes.tolist() == [1024, 2048, 1024, 512, 1024, 512, 512, 2048, 512]
    assert real.trace.born.tolist() == [0, 1, 2, 3, 2, 3, 6, 1, 6]  # releases as their blocks were born
    assert real.trace.span.tolist() == [0, 0, *[1] * 7]
    assert real.trace.peak_bytes == 1024 + 2048 + 1024 + 512
    assert [f[0]["name"] if f else None for f in real.frames] == [
        None, None, "first", "second", "first", "second", "third", None, "third",
    ]  # fmt: skip


def test_a_block_is_released_where_its_release_was_asked_for():
    """Another stream may still use it: "free_completed" then comes after other allocations."""
    requested, completed = free(1)
    real = read_history(snapshot(), snapshot([alloc(1, 512), requested, alloc(2, 1024), completed]))
    assert real.trace.nbytes.tolist() == [512, 512, 1024] and real.trace.peak_bytes == 1024


def test_another_device_is_another_history():
    two = {"segments": [], "device_traces": [[alloc(1, 512)], [alloc(1, 2048)]]}
    before = snapshot(live=[(512, 512, "active_allocated")])
    assert read_history(before, two, device=1).trace.nbytes.tolist() == [2048]


@pytest.mark.parametrize("events", [[*free(5)], [alloc(1, 512), alloc(1, 512)]])
def test_a_history_with_holes_is_refused(events):
    with pytest.raises(ValueError, match="history"):
        read_history(snapshot(), snapshot(events))


def test_frames_are_those_that_torch_makes():
    """Innermost first, with the names that a snapshot has: here from torch's own collector, without a GPU."""

    def innermost():
        return gather_traceback(python=True, script=False, cpp=False)

    [frames] = symbolize_tracebacks([innermost()])
    told = sequences.operation(frames).split(" < ")
    assert told[0].startswith("tests/test_sequences.py:") and told[0].endswith(" innermost")
    assert told[1].endswith(" test_frames_are_those_that_torch_makes")
    assert len(told) == sequences.FRAMES


def test_an_operation_names_the_library_and_nobody():
    assert sequences.operation([frame("forward"), MODULE, frame("outer", 9)]) == (
        "some/model.py:7 forward < some/model.py:9 outer"
    )
    assert sequences.operation([{"filename": "C:\\Users\\kim\\a.py", "line": 1, "name": "f"}]) == "a.py:1 f"
    helper = {"filename": str(ROOT / "helpers" / "training.py"), "line": 3, "name": "train_model"}
    assert sequences.operation([helper]) == "helpers/training.py:3 train_model"
    assert sequences.operation([]) == sequences.NO_FRAMES


# -- comparing -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predicted():
    """A real prediction: every allocation of two steps of gpt2."""
    return predict_memory(model_id="openai-community/gpt2", batch_size=1, sequence_length=64, gpu="T4").timeline.trace


def test_the_same_allocations_are_found_equal(predicted):
    real = read_history(*as_history(predicted))
    found = compare(predicted, real)
    assert found["first_difference"] is None
    assert found["equal_prefix"] == found["virtual_entries"] == found["real_entries"] > 1000
    assert found["differing_allocations"] == {"virtual_only": 0, "real_only": 0, "shortest": True}
    assert found["released_elsewhere"] == 0 and found["real_only"] == found["virtual_only"] == []
    assert found["at_start"]["virtual_bytes"] == found["at_start"]["real_bytes"] > 0
    assert found["at_peak"]["real_bytes"] == predicted.peak_bytes and found["at_peak"]["difference"] == 0
    assert found["replayed_reserved_bytes"] == pytest.approx(predicted.reserved_peak(), rel=0.01)
    assert "all" in sequences.text(found)


def test_a_child_says_measured_first_and_then_the_comparison_as_json(monkeypatch):
    """From the prediction to the line for the parent; the card's part is played by a history made of the prediction."""
    setting = {"model_id": "openai-community/gpt2", "batch_size": 1, "sequence_length": 64}
    task = {"kind": "grid", "setting": setting, "gpu": {"capability": "7.5"}, "dry_run": False, "record": True}
    told = []
    side = measure_gpu._predicted(task)
    entry = int(side.trace.born[side.trace.span > 0][5])
    before, after = as_history(without(side.trace, entry))
    measured = measure_gpu._Side(side.numbers, snapshots=[before, after])
    monkeypatch.setattr(measure_gpu, "_measured", lambda task: measured)
    monkeypatch.setattr(language, "_current", "ko")  # a child speaks English: taken back at the end
    monkeypatch.setattr(measure_gpu, "emit", lambda row: told.append(json.loads(json.dumps(row))))
    measure_gpu.child(task)
    assert [list(part) for part in told] == [["predicted"], ["measured", "recorded"], ["sequence"]]
    found = measure_gpu.outcome(Child(told, 0, ""))
    assert found["status"] == "ok" and "recorded" not in found
    assert found["sequence"]["differing_allocations"] == {"virtual_only": 1, "real_only": 0, "shortest": True}
    phases = found["predicted"]["phases"]
    assert [phase["phase"] for phase in phases] == [f"{name} {i}" for i in (1, 2) for name in side.trace.names[:3]]
    assert max(phase["peak_bytes"] for phase in phases) == found["predicted"]["peak_bytes"]
    assert max(phase["reserved_bytes"] for phase in phases) == found["predicted"]["reserved_bytes"]


@keeps_workspaces
def test_an_allocation_that_only_the_gpu_makes_is_named_by_its_line(predicted):
    """The virtual side forgets one that is held at the peak."""
    live = np.where(predicted.allocates, predicted.nbytes, -predicted.nbytes).cumsum()
    released = set(predicted.born[: live.argmax()][~predicted.allocates[: live.argmax()]].tolist())
    entry = next(
        i
        for i in np.flatnonzero(predicted.allocates & (predicted.span > 0)).tolist()
        if i not in released and predicted.nbytes[i] != predicted.nbytes[i + 1] and i < live.argmax()
    )
    nbytes = int(predicted.nbytes[entry])
    found = compare(without(predicted, entry), read_history(*as_history(predicted)))
    start = int((predicted.span == 0).sum())
    first = found["first_difference"]
    assert (first["index"], first["real_bytes"], first["kind"]) == (entry - start, nbytes, "real has one more")
    assert first["operation"] == f"some/model.py:7 line {entry}"
    assert found["differing_allocations"] == {"virtual_only": 0, "real_only": 1, "shortest": True}
    [group] = found["real_only"]
    assert (group["bytes"], group["count"], group["operation"]) == (nbytes, 1, first["operation"])
    assert found["at_peak"]["difference"] == found["at_peak"]["explained"] == nbytes
    assert f"line {entry}" in sequences.text(found)


def test_an_allocation_that_only_the_virtual_gpu_makes_is_found_between_its_neighbours():
    virtual = trace(512, 1024, 4096, 2048, ("free", 2), spans=[1, 1, 3, 3, 3])
    real = read_history(snapshot(), snapshot([alloc(1, 512, "a"), alloc(2, 1000, "b"), alloc(3, 2048, "c")]))
    found = compare(virtual, real)
    first = found["first_difference"]
    assert (first["index"], first["phase"], first["kind"]) == (2, "backward 1", "virtual has one more")
    assert (first["virtual_bytes"], first["real_bytes"]) == (4096, 2048)
    assert first["virtual_around"] == [512, 1024, 4096, 2048, -4096] and first["real_around"] == [512, 1024, 2048]
    assert first["operation_before"].endswith(" b") and first["operation_after"].endswith(" c")
    assert found["virtual_only"] == [{"phase": "backward 1", "bytes": 4096, "count": 1}]
    assert found["at_peak"] == {
        "virtual_bytes": 7680, "real_bytes": 3584, "difference": -4096, "real_only": 0, "virtual_only": 4096,
        "explained": -4096,
    }  # fmt: skip
    text = sequences.text(found)
    assert "between some/model.py:7 b and some/model.py:7 c" in text and "1 virtual only, 0 real only" in text


def test_a_block_of_another_size_is_named_by_its_line():
    virtual = trace(512, 8192, 1024)
    real = read_history(snapshot(), snapshot([alloc(1, 512), alloc(2, 9000, "sdpa"), alloc(3, 1024)]))
    found = compare(virtual, real)
    assert found["first_difference"]["kind"] == "another size"
    assert found["first_difference"]["operation"] == "some/model.py:7 sdpa"
    assert found["differing_allocations"] == {"virtual_only": 1, "real_only": 1, "shortest": True}
    assert found["real_only"][0]["phase"] == "forward 1"
    assert found["at_peak"]["explained"] == found["at_peak"]["difference"] == 9216 - 8192


def test_a_block_that_is_held_longer_is_not_an_allocation_more():
    virtual = trace(512, ("free", 0), 1024, 2048)
    real = read_history(snapshot(), snapshot([alloc(1, 512), alloc(2, 1024, "next"), *free(1), alloc(3, 2048)]))
    found = compare(virtual, real)
    assert found["differing_allocations"] == {"virtual_only": 0, "real_only": 0, "shortest": True}
    assert found["released_elsewhere"] == 1
    first = found["first_difference"]
    assert (first["virtual_bytes"], first["real_bytes"], first["kind"]) == (-512, 1024, "released at another place")
    assert found["at_peak"]["difference"] == 0 and found["at_peak"]["explained"] == 0
    longer = compare(trace(512, ("free", 0), 1024), read_history(snapshot(), snapshot([alloc(1, 512), alloc(2, 1024)])))
    assert longer["at_peak"]["difference"] == 512 and longer["at_peak"]["explained"] == 0  # not of an allocation more


def test_where_one_side_ends_first():
    virtual = trace(512)
    real = read_history(snapshot(), snapshot([alloc(1, 512), alloc(2, 1024, "late")]))
    first = compare(virtual, real)["first_difference"]
    assert (first["index"], first["phase"], first["virtual_bytes"]) == (1, "after backward 1", None)
    assert first["operation"].endswith(" late")
    longer = compare(trace(512, 1024), read_history(snapshot(), snapshot([alloc(1, 512)])))["first_difference"]
    assert (longer["virtual_bytes"], longer["real_bytes"], longer["operation"]) == (1024, None, None)
    assert longer["kind"] == "virtual has one more" and longer["operation_after"] == sequences.NO_FRAMES


def test_releases_across_the_edge_of_a_phase_are_no_difference():
    """The virtual trace sorts releases phase by phase; the real one knows no phases."""
    virtual = trace(512, 1024, ("free", 1), ("free", 0), spans=[1, 1, 1, 3])
    real = read_history(snapshot(), snapshot([alloc(1, 512), alloc(2, 1024), *free(2), *free(1)]))
    assert compare(virtual, real)["first_difference"] is None


def test_nothing_recorded_is_all_of_it_different():
    found = compare(trace(512, 1024), read_history(snapshot(), snapshot()))
    assert found["equal_prefix"] == 0 and found["differing_allocations"]["virtual_only"] == 2
    assert sequences.text(found)


# -- aligning --------------------------------------------------------------------------------------------------------


def longest(a, b):
    """Length of the longest common subsequence, by the textbook's table."""
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
    return table[-1, -1]


@pytest.mark.parametrize("seed", range(30))
def test_an_alignment_is_in_order_equal_and_as_long_as_can_be(seed):
    random = np.random.default_rng(seed)
    a, b = (random.integers(0, 4, random.integers(0, 40)).tolist() for _ in range(2))
    pairs, shortest = align(a, b)
    assert shortest and len(pairs) == longest(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))


def test_beyond_the_limit_the_alignment_says_that_it_is_rough():
    pairs, shortest = align([1, 2, 3, 9, 4, 5], [1, 6, 7, 9, 8, 5], most=2)
    assert not shortest and pairs == [(0, 0), (3, 3), (5, 5)]


@keeps_workspaces
def test_two_gpus_of_the_catalogue_differ_by_their_kernels():
    """An H100 in the place of the real GPU, a T4 as the virtual one: another cuBLAS workspace, another attention."""
    setting = {"model_id": "openai-community/gpt2", "batch_size": 1, "sequence_length": 64, "precision": "fp16"}
    t4, h100 = (predict_memory(**setting, gpu=name).timeline.trace for name in ("T4", "H100"))
    found = compare(t4, RealTrace(h100, [[]] * len(h100)))
    first = found["first_difference"]
    assert (first["phase"], first["kind"]) == ("forward 1", "another size")
    sizes = [cublas_workspace_bytes(CATALOG[name].compute_capability) for name in ("T4", "H100")]
    assert [first["virtual_bytes"], first["real_bytes"]] == sizes
    peak = found["at_peak"]
    assert peak["difference"] == h100.peak_bytes - t4.peak_bytes > 0
    assert peak["explained"] >= 2 * (sizes[1] - sizes[0])  # forward's workspace, and that of backward's thread


def test_reserved_by_phase_rises_to_what_the_whole_run_reserves(predicted):
    most = sequences.reserved_by_phase(predicted)
    assert len(most) == len(predicted.names) and max(most) == predicted.reserved_peak()
    assert most == sorted(most)  # without a limit nothing goes back to the driver


def test_reserved_by_phase_falls_where_segments_went_back():
    names = ("forward", "backward", "step", "forward")
    large, small = 14 * MIB, 512
    shrinks = trace(large, ("free", 0), small, small, spans=[1, 1, 3, 5], names=names)
    # Backward starts with 14 MiB reserved, which go back to make room; the last phase does nothing.
    assert sequences.reserved_by_phase(shrinks, large) == [large, large, 2 * MIB, 2 * MIB]
    assert sequences.reserved_by_phase(shrinks) == [large, large + 2 * MIB, large + 2 * MIB, large + 2 * MIB]
    with pytest.raises(MemoryError):
        sequences.reserved_by_phase(shrinks, large - 1)
