"""Long waits say how far they are and how to stop them, on a terminal and in a notebook, and elsewhere nothing."""

import json
import sys
import time

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from odd_inputs import LLAMA

import tools.notebooks
from benchmarks import children
from helpers import gpu_memory_sweep, run_ranks
from helpers.chapters.c6_distributed.ranks import add_up
from helpers.ranks import launcher
from virtual_gpu.language import set_language


@pytest.fixture
def small(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(tmp_path)


watched_or_not = pytest.mark.parametrize("watched", [True, False], ids=["terminal", "pipe"])


@watched_or_not
def test_a_sweep_tells_a_terminal_how_far_it_is(watched, capsys, monkeypatch, small):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)
    set_language("en")
    table = gpu_memory_sweep(batch_size=[1, 2], model_id=small, sequence_length=[8], gpu="T4")
    out, err = capsys.readouterr()
    lines = ["1/2: batch_size=1 (Ctrl+C stops)", "2/2: batch_size=2"] if watched else []
    assert (len(table), out, err.splitlines()) == (2, "", lines)


@watched_or_not
def test_ranks_tell_a_terminal_how_many_have_ended(watched, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)
    set_language("en")
    monkeypatch.setattr(launcher, "QUIET_S", 0)
    assert len(run_ranks(add_up, 2, time_limit=60)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if "imports PyTorch" not in line]  # the first launch of all
    assert [line for line in lines if "2 ranks have ended; 60 s at most" not in line] == []
    assert ("0 of 2 ranks" in err) is watched and ("(Ctrl+C stops)" in err) is watched


def test_a_short_launch_says_nothing(capsys, monkeypatch):
    run_ranks(add_up, 1)  # from now on the server is there
    monkeypatch.setattr(launcher, "QUIET_S", 60)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run_ranks(add_up, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.kernel
def test_in_a_notebook_one_line_changes_and_goes(small):
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        code = f"from helpers import gpu_memory_sweep\nlen(gpu_memory_sweep(batch_size=[1, 2], model_id={small!r}, "
        seen = []
        reply = client.execute_interactive(
            code + "sequence_length=8, gpu='T4'))", timeout=120, output_hook=lambda message: seen.append(message)
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok"
    kinds = [message["msg_type"] for message in seen]
    told = [message["content"]["data"] for message in seen if message["msg_type"] == "update_display_data"]
    assert kinds.count("display_data") == 1 and "stream" not in kinds
    # what is displayed first is what nbval compares, and what is there last is what is stored: nothing
    assert seen[kinds.index("display_data")]["content"]["data"] == {} and told[-1] == {}
    assert [line["text/plain"] for line in told[:-1]] == [
        f"{n}/2: batch_size={n} (멈추려면 노트북의 ■)" for n in (1, 2)
    ]
    assert all(f'<p role="status">{line["text/plain"]}</p>' == line["text/html"] for line in told[:-1])


def test_a_built_notebook_has_no_output_without_data():
    cell = nbformat.v4.new_code_cell("x", outputs=[
        nbformat.v4.new_output("display_data", {}), nbformat.v4.new_output("stream", text="1"),
    ])  # fmt: skip
    [built] = tools.notebooks.normalise(nbformat.v4.new_notebook(cells=[cell])).cells
    assert [output.output_type for output in built.outputs] == ["stream"]


@watched_or_not
def test_a_child_of_a_bench_is_told_of_while_it_runs(watched, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)
    monkeypatch.setattr(children, "TOLD_S", 0.2)
    code = "import time; print('{\"row\": 1}', flush=True); time.sleep(1); print('{\"row\": 2}')"
    child = children.run([sys.executable, "-c", code], 60, told="two rows")
    assert child.rows == [{"row": 1}, {"row": 2}] and child.returncode == 0
    out, err = capsys.readouterr()
    assert out == "" and bool(err) is watched
    assert not watched or (err.startswith("two rows … Ctrl+C stops\n") and " s, 1 lines" in err)
    began = time.monotonic()
    late = children.run([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"], 2, told="")
    assert late.returncode is None and time.monotonic() - began < 50
