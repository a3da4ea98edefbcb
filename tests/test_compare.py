"""Two runs beside each other: the first difference of their requests, and the rule that explains it."""

import gzip
import json
from pathlib import Path

import pytest

import virtual_gpu
from virtual_gpu.program.again import saved_without
from virtual_gpu.program.command import main, same_again
from virtual_gpu.trace.compare import Entry, explained_by, first_difference
from virtual_gpu.trace.histories import read_histories
from virtual_gpu.trace.saved import read

TRACES = Path(__file__).parent / "data" / "traces"
CARD = TRACES / "cs336_wed_medium_ctx512_trainstep.json.gz"
PROGRAM = """
import torch

x, w = (torch.randn(4096, 4096, device="cuda", requires_grad=True) for _ in range(2))
(x @ w).sum().backward()
"""


def edited(path, change):
    """A card's trace with its events changed, written as a file of its own."""
    with gzip.open(CARD, "rt") as file:
        found = json.load(file)
    change(found, found["devices"][0]["events"])
    path.write_bytes(gzip.compress(json.dumps(found).encode()))
    return path


def test_a_card_s_trace_is_equal_to_itself():
    found = virtual_gpu.compare(CARD, CARD)
    [history] = read_histories(CARD)
    recorded = [event for event in history.events if event[0] in ("alloc", "free_completed")]
    assert found.first_difference is None and found.rules is None and found.growth == 0
    assert found.entries == (len(recorded),) * 2 and len(recorded) > 2500


def test_the_first_request_that_differs_is_told_with_what_asked_for_it(tmp_path):
    """An allocation of 2 MiB more, half way, by a line that the file names."""
    place = {}

    def one_more(found, events):
        place["at"] = at = next(i for i in range(len(events) // 2, len(events)) if events[i][0] == 0)
        place["before"] = sum(event[0] in (0, 2) for event in events[:at])
        found["labels"] = ["softmax | nn_utils.py:7"]
        events.insert(at, [0, 2**40, 2**21 - 3, 0, 0])

    found = virtual_gpu.compare(CARD, edited(tmp_path / "more.json.gz", one_more))
    index, ours, theirs = found.first_difference
    assert theirs == Entry(2**21, "recorded", "softmax | nn_utils.py:7", "")
    assert index == place["before"] and ours != theirs
    assert found.only == ([], [(1, 2**21, "recorded", "softmax | nn_utils.py:7")]) and found.shortest
    assert "2,097,152 bytes  recorded  softmax | nn_utils.py:7" in found.text()


def test_the_order_of_releases_that_follow_each_other_is_no_difference(tmp_path):
    def turned(_, events):
        pairs = enumerate(zip(events, events[2:], strict=False))
        at = next(i for i, (a, b) in pairs if a[0] == b[0] == 2 and a[2] != b[2])
        events[at - 1 : at + 3] = [*events[at + 1 : at + 3], *events[at - 1 : at + 1]]

    assert virtual_gpu.compare(CARD, edited(tmp_path / "turned.json.gz", turned)).first_difference is None


def test_what_goes_furthest_explains_best():
    theirs = [1, 2, 3, 4]
    runs = {"worse": [1, 5], "same": [1, 2, 5], "better": [1, 2, 3], "all": [1, 2, 3, 4]}
    assert first_difference(runs["same"], theirs) == 2 and first_difference(theirs, theirs) is None
    assert first_difference(theirs[:3], theirs) == 3
    assert explained_by(runs.get, runs, theirs, 2) == {"all": None, "better": 3}
    assert explained_by(runs.get, runs, theirs, None) == {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A program as it is, and without two rules: (the program, the run's file, the snapshot of the other)."""
    folder = tmp_path_factory.mktemp("saved")
    program, run, snapshot = (str(folder / name) for name in ("product.py", "run.json", "without.pickle"))
    Path(program).write_text(PROGRAM)
    assert main(["--save", run, program]) == 0
    without = ["--without", "reduction_buffers", "--without", "cublas_workspace"]
    assert main([*without, "--snapshot", snapshot, program]) == 0
    return program, run, snapshot


def test_the_rule_is_named(saved, tmp_path):
    """Of two rules that are missing in the second run the first difference is one's, and the other's comes later."""
    program, *files = saved
    tried = []

    def without(rule):
        tried.append(rule)
        path = str(tmp_path / f"{rule}.json")
        assert main(["--without", rule, "--save", path, program]) == 0
        return read(path)

    found = virtual_gpu.compare(*files, without=without)
    index, ours, theirs = found.first_difference
    assert ours.operation == "mm" and "product.py:5" in ours.place and "product.py:5" in theirs.place
    assert tried == list(read(files[0]).rules) and {"reduction_buffers", "cublas_workspace"} <= set(tried)
    [(rule, later)] = found.rules.items()
    assert rule == "cublas_workspace" and later > index
    assert f"cublas_workspace을(를) 빼면: {later:,}개까지 같다" in found.text()


def test_a_run_without_a_rule_is_a_process_of_its_own(saved):
    options, command = same_again(["--gpu", "T4", "--unlimited", saved[0], "--gpu", "8"])
    assert "--unlimited" in options and command == [saved[0], "--gpu", "8"]
    again = saved_without("cublas_workspace", options, command)
    assert "cublas_workspace" in read(saved[1]).rules and "cublas_workspace" not in again.rules


def test_a_rule_that_there_is_not(saved, capsys):
    assert main(["--without", "cublas_workspaces", saved[0]]) == 2
    assert "cublas_workspace" in capsys.readouterr().err


def test_what_is_no_function_is_refused():
    with pytest.raises(virtual_gpu.WrongValue, match="cublas"):
        virtual_gpu.compare(CARD, CARD, without="cublas_workspace")
