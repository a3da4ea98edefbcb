"""Histories that real GPUs recorded, replayed; and traces written as PyTorch's snapshots and read again."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from odd_inputs import HOSTILE_PICKLES

from benchmarks.children import ROOT
from benchmarks.sequences import keep
from virtual_gpu.allocator import MIB
from virtual_gpu.allocator_blocks import Falling
from virtual_gpu.allocator_settings import AllocatorSettings
from virtual_gpu.trace.histories import read_histories
from virtual_gpu.trace.replay import replay, replayed
from virtual_gpu.trace.snapshot import save, snapshot
from virtual_gpu.trace.trace import Trace

RECORDED = sorted((Path(__file__).parent / "data" / "traces").glob("*.json.gz"))
OURS = sorted((ROOT / "benchmarks" / "records" / "traces").glob("*/*.json.gz"))  # what `make measure-gpu` recorded


@pytest.mark.parametrize("path", RECORDED + OURS, ids=lambda path: path.name.split(".")[0])
def test_every_block_lies_where_it_lay_on_the_card(path):
    whole = replay(path)
    [found] = whole
    assert (whole.requests, whole.equal, whole.end) == (found.requests, found.equal, found.end)
    assert whole.exact and whole.same_end and whole.segments == found.segments
    assert found.exact, found.first_difference
    assert found.equal == found.requests > 0
    assert found.driver_calls == found.equal_driver_calls
    assert found.end == found.card_end


def test_segments_fall_on_linux():
    """Each below the one before in the snapshot that begins with an empty card, as `Falling` puts them."""
    [path] = (path for path in RECORDED if "from_empty" in path.name)
    with gzip.open(path, "rt") as file:
        events = json.load(file)["devices"][0]["events"]
    sizes = [event[2] for event in events if event[0] == 3]
    card = [event[1] for event in events if event[0] == 3]
    falling = Falling()
    ours = [falling(nbytes) for nbytes in sizes]
    assert len(card) > 5 and card == sorted(card, reverse=True)
    assert ours == sorted(ours, reverse=True)
    assert all(above - below >= nbytes for above, below, nbytes in zip(ours, ours[1:], sizes[1:], strict=False))


def test_there_is_something_to_replay():
    assert len(RECORDED) == 7


@pytest.mark.parametrize("event, change", [("alloc", 512), ("segment_alloc", 2 * MIB), ("free_completed", None)])
def test_a_history_that_differs_is_not_equal(event, change):
    [history] = read_histories(RECORDED[0])
    index = next(i for i, one in enumerate(history.events) if one[0] == event)
    action, address, nbytes, stream = history.events[index]
    if change is None:
        del history.events[index]
    else:
        history.events[index] = (action, address, nbytes + change, stream)
    assert not replayed(history).exact


def test_a_recorded_trace_is_what_was_held():
    [history] = read_histories(RECORDED[0])
    trace = history.trace()
    _, allocator = trace.through()
    assert allocator.allocated_bytes == replayed(history).end[0]
    assert (trace.nbytes % 512 == 0).all()


def made(streams=1, blocks=60, seed=0):
    """A trace of random requests, half of which are given back."""
    chance = np.random.default_rng(seed)
    sizes = (chance.choice([512, 40_000, MIB, 3 * MIB, 12 * MIB, 25 * MIB], blocks) // 512 * 512).tolist()
    born, nbytes, stream = list(range(blocks)), sizes, chance.integers(0, streams, blocks).tolist()
    for block in chance.permutation(blocks)[: blocks // 2].tolist():
        born.append(block)
        nbytes.append(sizes[block])
        stream.append(stream[block])
    rows = [np.array(column) for column in (born + list(range(len(born), len(born) + 5)), nbytes + [2 * MIB] * 5)]
    stream = np.array([*stream, *range(5)]) % streams
    zeros = np.zeros(len(rows[0]), dtype=np.int64)
    return Trace(*rows, zeros + 3, zeros + 1, ("forward",), stream=stream)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:20"])
def test_what_is_written_is_read_again(tmp_path, streams, settings):
    trace = made(streams)
    save(trace, tmp_path / "snapshot.pickle", settings=AllocatorSettings.parse(settings))
    [history] = read_histories(tmp_path / "snapshot.pickle")
    found = replayed(history)
    assert found.exact, found.first_difference
    again = history.trace()
    for name in ("born", "nbytes", "stream"):
        assert np.array_equal(getattr(again, name), getattr(trace, name)), name


def test_a_history_that_begins_later_is_led_back():
    """The events before the middle are forgotten: what lay there then follows from the end."""
    full = snapshot(made(2))
    events = full["device_traces"][0]
    full["device_traces"] = [events[len(events) // 2 :]]
    path_like = pickle.dumps(full)
    import io

    from virtual_gpu.trace.histories import Plain, _snapshot

    [history] = _snapshot(Plain(io.BytesIO(path_like)).load())
    assert history.before and replayed(history).exact


def test_pytorch_s_own_tool_reads_what_is_written(tmp_path):
    from torch.cuda import _memory_viz

    trace = made(2)
    written = snapshot(trace)
    assert f"{len(written['device_traces'][0])} entries" in _memory_viz.trace(written)
    assert _memory_viz.segsum(written)
    assert sum(segment["total_size"] for segment in written["segments"]) == trace.through()[1].reserved_bytes


WITHOUT_A_FORM = {"no segments": pickle.dumps({"segments": []}), "cut": b"\x80\x04no", "empty": b"", "JSON, cut": b"{",
                  "a device without anything": b'{"devices": [{}]}', "a list": b"[1]"}  # fmt: skip


@pytest.mark.parametrize("name", [*WITHOUT_A_FORM, *HOSTILE_PICKLES])
def test_what_is_no_history_is_refused(tmp_path, capfd, name):
    path = tmp_path / "some file"
    path.write_bytes((WITHOUT_A_FORM | HOSTILE_PICKLES)[name])
    with pytest.raises(ValueError, match=r"^메모리 기록(?!.*메모리 기록)"):
        replay(path)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    from virtual_gpu.trace import histories as module

    monkeypatch.setattr(module, "LARGEST_FILE", 1000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(json.dumps([0] * 10_000).encode()))
    with pytest.raises(ValueError, match="메모리 기록"):
        replay(tmp_path / "bomb.gz")


def test_parts_that_gzip_has_appended_are_read_and_a_torn_one_is_refused(tmp_path):
    text = json.dumps({"devices": []}).encode()
    packed = gzip.compress(text[:4]) + gzip.compress(text[4:]) + b"\0" * 9
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed)
    assert read_histories(path) == []
    for torn in (packed[:-20], packed[:10]):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match="메모리 기록"):
            read_histories(path)


def test_what_is_kept_of_a_card_is_what_it_recorded(tmp_path):
    """Two snapshots in PyTorch's form, reduced and read again: the same requests, before, events and after."""

    def found(blocks, events):
        segment = {"address": 0x1000000, "total_size": 2 * MIB, "stream": 0, "segment_type": "small", "device": 0}
        return {"segments": [segment | {"blocks": blocks}], "device_traces": [events]}

    def block(size, state):
        return {"size": size, "requested_size": size, "state": state}

    frames = [{"filename": "/x/site-packages/some/model.py", "line": 7, "name": "forward"}]
    event = {"action": "alloc", "addr": 0x1000000 + 512, "size": 1000, "stream": 0, "frames": frames}
    before = found([block(512, "active_allocated"), block(2 * MIB - 512, "inactive")], [])
    rest = 2 * MIB - 512 - 1024
    after = found([block(512, "active_allocated"), block(1024, "active_allocated"), block(rest, "inactive")], [event])
    keep(tmp_path / "new" / "kept.json.gz", before, after)
    [history] = read_histories(tmp_path / "new" / "kept.json.gz")
    assert history.events == [("alloc", 0x1000000 + 512, 1000, 0)]
    assert history.frames == ["some/model.py:7 forward"]
    again = replay(tmp_path / "new" / "kept.json.gz")
    assert (again.requests, again.equal, again.end) == (1, 1, (1536, 2 * MIB)) and again.same_end
