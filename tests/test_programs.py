"""benchmarks/programs where it needs neither a card nor the programs: a record of a small one, links, the commands."""

import gzip
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from forked import run_forked

import virtual_gpu
from benchmarks.children import ROOT
from benchmarks.programs import __main__ as bench
from benchmarks.programs import record, stand_ins, table
from benchmarks.programs.catalogue import PROGRAMS
from benchmarks.programs.weights import MODELS
from virtual_gpu.trace.histories import ACTIONS

PROGRAM = """import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(64, 8, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
torch.zeros(2**26, device="cuda")
for x in DataLoader(torch.zeros(64, 64), batch_size=4):
    model(x.cuda()).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    optimizer.zero_grad()
    if "stop" in __import__("sys").argv:
        raise SystemExit("told to stop")
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def virtual(*arguments):
    """(status, stdout, stderr) of virtual-gpu run with these arguments, in a process of its own."""
    command = ["-m", "virtual_gpu", "--language", "en", "run", "--gpu", "H100", "--no-advise"]
    return run_forked([*command, *map(str, arguments)], folder=ROOT)


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def recorded(out, *command):
    """What record.py keeps of a program, on a virtual card that would let it run on."""
    _, _, err = virtual("--steps", "9", ROOT / "benchmarks" / "programs" / "record.py", out, *command)
    assert out.exists(), err
    return read(out)


def test_a_record_is_what_the_program_asked_for(program, tmp_path):
    """The recorder asks for nothing itself, ends where `virtual-gpu run` ends, and knows of peaks that were reset."""
    trace, report, out = tmp_path / "trace.json", tmp_path / "report.json", tmp_path / "record.json.gz"
    virtual("--save", trace, "--report", report, program)
    found = recorded(out, program)["measured"]
    both = virtual_gpu.compare(trace, out)
    assert both.first_difference is None and both.entries[0] == both.entries[1] > 50
    assert (found["error"], found["steps"]) == (None, 3)
    assert found["batches"] == ["float32 [4, 64]"] * 3
    workspaces = 2 * 32 * 2**20  # a thread's and autograd's
    last = found["rows"][-1]
    assert workspaces < last["allocated"] < 2**28 < found["peak"] == json.loads(report.read_text())["allocated"]
    assert last["peaks"][0] < found["peak"]  # reset before each step; 256 MiB were the most


def test_a_program_that_ends_itself_is_recorded_with_its_words(program, tmp_path):
    found = recorded(tmp_path / "record.json.gz", program, "stop")["measured"]
    assert (found["error"], found["steps"], found["command"]) == ("exit told to stop", 1, [str(program), "stop"])


def test_events_and_segments_are_reduced():
    assert record.ACTIONS == ACTIONS

    def event(action, line=None, **more):
        stack = [{"filename": "a/torch/nn/modules/module.py", "line": 1, "name": "_call_impl"}]
        stack += [{"filename": f"a\\{name}.py", "line": line, "name": name} for name in "uvwxyz"]
        stack += [{"filename": "main.cpp", "line": 1, "name": "main"}]
        return {"action": action, "size": 512, "stream": 7, **({"frames": stack} if line else {}), **more}

    trace = [
        event("segment_alloc", addr=4096), event("alloc", 5, addr=4096), event("alloc", 6, addr=4608),
        event("alloc", 5, addr=5120), event("user_defined", addr=1), event("free_requested", addr=4096),
    ]  # fmt: skip
    blocks = [{"size": 512, "requested_size": 4, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}]
    segment = {"address": 4096, "total_size": 1536, "stream": 7, "segment_type": "small", "blocks": blocks}
    labels = {}
    found = record.reduced({"device_traces": [trace], "segments": [segment, segment | {"device": 1}]}, labels)
    assert found["events"] == [
        [3, 4096, 512, 7], [0, 4096, 512, 7, 0], [0, 4608, 512, 7, 1], [0, 5120, 512, 7, 0], [1, 4096, 512, 7],
    ]  # fmt: skip
    assert list(labels) == [" < ".join(f"{name}.py:{line} {name}" for name in "uvwx") for line in (5, 6)]
    assert found["final_segments"] == [
        [4096, 1536, 7, "small", [[4096, 512, 4, "active_allocated"], [4608, 1024, 1024, "inactive"]]]
    ]


def test_steps_are_counted_in_events():
    trace = [{"action": action, "time_us": at} for action, at in (("alloc", 1), ("other", 2), ("alloc", 3))]
    rows = [{"time_us": at} for at in (0, 1, 2, 9)]
    assert record.step_times({"device_traces": [trace]}, rows) == [0, 1, 1, 2]


def test_a_record_needs_a_program():
    command = [sys.executable, str(ROOT / "benchmarks" / "programs" / "record.py"), "out.json.gz", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "name a program" in done.stderr


def test_links_of_a_folder_that_was_moved(tmp_path):
    work, to = tmp_path / "work", tmp_path / "to"
    (work / "data").mkdir(parents=True)
    to.mkdir()
    os.symlink(tmp_path / "gone", to / "data")
    for _ in range(2):
        stand_ins._links(work, to, ("data",))
        assert (to / "data").resolve() == work / "data"


def test_the_catalogue():
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names)
    assert {model for program in PROGRAMS for model in program.models} <= set(MODELS)
    assert len({bench._record_of(program, ROOT) for program in PROGRAMS}) == len(names)


def test_recording_without_a_card_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["programs", str(tmp_path), "--record"])
    monkeypatch.setattr(stand_ins, "make", lambda folder: None)
    with pytest.raises(SystemExit):
        bench.main()
    assert "--record needs a card" in capsys.readouterr().err


def test_the_table_is_made_of_the_file_beside_it():
    """And says what was measured of every program that was recorded; what is off is not left out."""
    rows = json.loads(table.PREDICTED.read_text(encoding="utf-8"))
    assert f"<!-- programs:begin -->\n{table.block(rows)}<!-- programs:end -->" in table.PAGE.read_text(
        encoding="utf-8"
    )
    with tarfile.open(ROOT / "benchmarks" / "records" / "h100-2026-11-23" / "programs.tar.gz") as records:
        names = {Path(member.name).name for member in records if member.name.endswith(".json.gz")}
    measured = {row["program"] for row in rows if "measured" in row}
    assert {bench._record_of(program, ROOT).name for program in PROGRAMS if program.name in measured} == names


def test_rows_of_the_table():
    def row(program, allocated, **more):
        beside = {"peak": 2**30, "reserved": 2**31, "equal": 5, "requests": 1000}
        return {
            "program": program,
            "status": "fits",
            "allocated": allocated,
            "reserved": 2**31,
            "measured": beside,
        } | more

    rows = [row("good", 2**30), row("bad", 2**29), row("failed", 7, status="failed", error="Error: a | b\nmore")]
    _, _, *made, empty, told = table.block(rows).splitlines()
    assert made == [
        "| bad | 512.0 | 1,024.0 | -50.00 | 2,048.0 | 2,048.0 | +0.00 | 5 of 1,000 |",
        "| good | 1,024.0 | 1,024.0 | +0.00 | 2,048.0 | 2,048.0 | +0.00 | 5 of 1,000 |",
        "| failed | not predicted: Error: a \\| b | 1,024.0 | | | | | |",
    ]
    assert not empty and told == (
        "MiB, 2 programs. Off by, peak: median 25.00 %, worst 50.00 %; reserved: median 0.00 %, worst 0.00 %."
    )


def test_rows_that_are_kept(tmp_path):
    path = tmp_path / "rows.json"
    for name, status in (("a", "hangs"), ("b", "fits"), ("a", "missing")):
        bench.keep({"program": name, "status": status}, path)
    assert json.loads(path.read_text()) == [{"program": "a", "status": "missing"}, {"program": "b", "status": "fits"}]
    assert bench.cells({"program": "a", "card": "T4", "status": "missing"}) == ["a", "T4", "missing", *[""] * 10]
