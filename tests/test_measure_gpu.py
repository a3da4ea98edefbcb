"""benchmarks/measure_gpu.py where it needs no GPU: rows, errors, skipping, the time limit, the record."""

import inspect
import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from benchmarks import measure_gpu
from benchmarks.children import ROOT, Child, run

SETTING = {"model_id": "openai-community/gpt2", "batch_size": 4}
GPU = {"name": "NVIDIA H200 (SXM)", "capability": "9.0", "bytes": 150_000_000_000, "cuda": "12.8"}


def numbers(allocated, peak, fits=True, reserved=None, phases=(), optimizer=0):
    error = None if fits else "CUDA out of memory."
    return {
        "allocated_bytes": allocated, "peak_bytes": peak, "reserved_bytes": reserved, "fits": fits, "error": error,
        "phases": list(phases), "optimizer_bytes": optimizer,
    }  # fmt: skip


def row(measured, predicted, status="ok", kind="grid", title="a setting"):
    return {
        "kind": kind, "setting": SETTING, "title": title, "measured": measured, "predicted": predicted,
        "status": status, "detail": "",
    }  # fmt: skip


def python(code, seconds=30):
    return run([sys.executable, "-c", code], seconds, told="a test")


def test_errors_are_relative_to_the_measured():
    found = row(numbers(1000, 2000), numbers(1010, 1900))
    assert measure_gpu.error(found, "allocated_bytes") == pytest.approx(0.01)
    assert measure_gpu.error(found, "peak_bytes") == pytest.approx(-0.05)


def test_reserved_is_compared_where_both_sides_have_it():
    found = row(numbers(1, 1, reserved=200), numbers(1, 1, reserved=210))
    assert measure_gpu.error(found, "reserved_bytes") == pytest.approx(0.05)
    assert "+5.00%" in measure_gpu.line(found)
    died = row(numbers(1, 1, reserved=200), numbers(1, 1))  # predicted: the allocator finds no room
    assert measure_gpu.error(died, "reserved_bytes") is None


def test_a_step_that_the_scaler_skipped_is_not_compared():
    skipped = row(numbers(100, 100), numbers(200, 200, optimizer=50))
    assert measure_gpu.error(skipped, "peak_bytes") is None
    assert measure_gpu.error(row(numbers(100, 100), numbers(200, 200)), "peak_bytes") == 1  # no state on either side


def test_phases_are_compared_one_by_one():
    def phase(name, peak, end, reserved):
        return {"phase": name, "peak_bytes": peak, "end_bytes": end, "reserved_bytes": reserved}

    real = [phase("forward 1", 100, 80, 120), phase("backward 1", 200, 0, 240)]
    virtual = [phase("forward 1", 100, 80, 120), phase("backward 1", 190, 0, 252)]
    found = row(numbers(1, 200, phases=real), numbers(1, 200, phases=virtual))
    errors = {(one["phase"], one["number"]): one["error"] for one in measure_gpu.phase_errors(found)}
    assert errors.pop(("backward 1", "peak_bytes")) == pytest.approx(-0.05)
    assert errors.pop(("backward 1", "reserved_bytes")) == pytest.approx(0.05)
    assert set(errors.values()) == {0} and len(errors) == 3  # nothing is divided by the 0 bytes at its end
    assert "of backward 1" in measure_gpu.details(found)[0]
    assert measure_gpu.details(found | {"status": "oom"}) == []


@pytest.mark.parametrize(
    "found",
    [
        row(None, numbers(1, 1)),
        row(numbers(1, 1), None, status="failed"),
        row(numbers(0, 5, fits=False), numbers(1, 1), status="oom"),
        row(numbers(0, 5), numbers(1, 1)),
    ],
)
def test_no_error_without_both_sides(found):
    assert measure_gpu.error(found, "allocated_bytes") is None


def test_summary_takes_mean_and_worst_of_the_absolute_errors():
    rows = [
        row(numbers(1000, 1000), numbers(1010, 1000), title="high"),
        row(numbers(1000, 1000), numbers(970, 1000), title="low"),
        row(numbers(0, 0, fits=False), numbers(1, 1), status="oom", title="died"),
        row(None, None, status="skipped"),
    ]
    summary = measure_gpu.summarize(rows)
    allocated = summary["allocated_bytes"]
    assert (allocated["rows"], allocated["worst_setting"]) == (2, "low")
    assert allocated["mean"] == allocated["median"] == pytest.approx(0.02)
    assert allocated["worst"] == pytest.approx(0.03)
    assert summary["peak_bytes"]["worst"] == 0
    assert summary["statuses"] == {"ok": 2, "oom": 1, "skipped": 1}
    assert summary["t4"] == {"as_predicted": 0, "of": 0}
    assert "mean error 2.00% over 2" in measure_gpu.summary_text(summary)


def test_summary_of_nothing():
    summary = measure_gpu.summarize([])
    assert "allocated_bytes" not in summary
    assert measure_gpu.summary_text(summary)


def test_played_t4_is_judged_by_life_and_death():
    rows = [
        row(numbers(1, 1), numbers(1, 1), kind="t4"),
        row(numbers(1, 1, fits=False), numbers(1, 1, fits=False), status="oom", kind="t4"),
        row(numbers(1, 1), numbers(1, 1, fits=False), kind="t4"),
        row(None, numbers(1, 1), status="timeout", kind="t4"),
    ]
    assert [measure_gpu.verdict(found) for found in rows] == [True, True, False, None]
    assert measure_gpu.summarize(rows)["t4"] == {"as_predicted": 2, "of": 3}
    assert "as predicted (predicted: out of memory)" in measure_gpu.line(rows[1])
    assert "NOT as predicted" in measure_gpu.line(rows[2])


def test_missing_libraries_are_named_for_what_needs_them(monkeypatch):
    monkeypatch.setattr(measure_gpu, "_has", lambda name: name not in ("peft", "bitsandbytes"))
    assert measure_gpu.missing(SETTING) is None
    assert measure_gpu.missing(SETTING | {"peft": "lora"}) == "needs peft"
    assert measure_gpu.missing(SETTING | {"peft": "qlora"}) == "needs peft and bitsandbytes"
    assert measure_gpu.missing(SETTING | {"optimizer": "adamw_8bit"}) == "needs bitsandbytes"


def test_what_lacks_a_library_is_skipped_and_the_rest_runs(monkeypatch):
    monkeypatch.setattr(measure_gpu, "_has", lambda name: name != "bitsandbytes")
    monkeypatch.setattr(
        measure_gpu, "run", lambda *_, told: Child([{"predicted": numbers(1, 1)}, {"measured": numbers(1, 1)}], 0, "")
    )
    plan = [("grid", SETTING | {"peft": "qlora"}), ("grid", SETTING)]
    rows = list(measure_gpu.measure(plan, GPU, 60))
    assert [(found["status"], found["detail"]) for found in rows] == [("skipped", "needs bitsandbytes"), ("ok", "")]


def test_nothing_is_started_when_the_time_is_up(monkeypatch):
    def never(*_):
        raise AssertionError("a child was started")

    monkeypatch.setattr(measure_gpu, "run", never)
    assert [found["status"] for found in measure_gpu.measure([("grid", SETTING)], GPU, 1)] == ["not run"]


def test_how_a_child_ends_is_its_status():
    predicted, measured = {"predicted": numbers(1, 1)}, {"measured": numbers(1, 1)}
    out_of_memory = {"measured": numbers(0, 1, fits=False)}
    assert measure_gpu.outcome(Child([predicted, measured], 0, ""))["status"] == "ok"
    assert measure_gpu.outcome(Child([predicted], 0, ""), dry_run=True)["status"] == "ok"
    assert measure_gpu.outcome(Child([predicted, out_of_memory], 0, ""))["status"] == "oom"
    assert measure_gpu.outcome(Child([predicted], None, ""))["status"] == "timeout"
    crashed = measure_gpu.outcome(Child([predicted], -9, "warning\nRuntimeError: broken\n\n"))
    assert (crashed["status"], crashed["detail"]) == ("failed", "exit code -9: RuntimeError: broken")
    assert crashed["predicted"] == numbers(1, 1)


def test_a_comparison_that_fails_does_not_cost_the_measurement():
    parts = [{"predicted": numbers(1, 1)}, {"measured": numbers(1, 1), "recorded": True}]
    found = measure_gpu.outcome(Child([*parts, {"sequence": {"equal_prefix": 3}}], 0, ""))
    assert (found["status"], found["sequence"]) == ("ok", {"equal_prefix": 3})
    broken = measure_gpu.outcome(Child(parts, 1, "ValueError: the history does not reach back\n"))
    assert (broken["status"], broken["sequence"]) == ("ok", {"error": "ValueError: the history does not reach back"})
    assert "does not reach back" in measure_gpu.details({**row(None, None), **broken})[-1]
    assert measure_gpu.outcome(Child(parts, None, ""))["sequence"] == {"error": "it took too long"}
    assert measure_gpu.outcome(Child([parts[0], {"measured": numbers(1, 1)}], 1, "x"))["status"] == "failed"


@pytest.mark.parametrize(
    ("recorded", "expected"), [("few", [True, False, False]), ("all", [True, True, False]), ("none", [False] * 3)]
)
def test_which_settings_are_compared_one_by_one(monkeypatch, recorded, expected):
    tasks = []

    def answer(command, *_, **__):
        tasks.append(json.loads(command[-1]))
        return Child([], 1, "")

    monkeypatch.setattr(measure_gpu, "run", answer)
    monkeypatch.setattr(measure_gpu, "_has", lambda name: True)
    plan = [("grid", measure_gpu.GRID[0]), ("grid", measure_gpu.GRID[5]), ("t4", measure_gpu.GRID[0])]
    list(measure_gpu.measure(plan, GPU, 60, recorded=recorded))
    assert [task["record"] for task in tasks] == expected


def test_the_history_is_kept_around_the_training(monkeypatch):
    """The order of the calls, and that torch would take them; that CUDA answers as it says needs a card."""
    said = []
    history = inspect.signature(torch.cuda.memory._record_memory_history)

    class Card:
        @contextmanager
        def record(self, model, optimizer):
            said.append("training")
            yield (model, optimizer)

    def record_memory_history(*args, **kwargs):
        history.bind(*args, **kwargs)
        said.append(args[0] if args else kwargs["stacks"])

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record_memory_history)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: said.append("snapshot") or {"number": len(said)})
    card = Card()
    snapshots = measure_gpu._record_history(card)
    with card.record("model", "optimizer") as phases:
        assert phases == ("model", "optimizer")
    assert said == ["python", "snapshot", "training", "snapshot", None]
    assert snapshots == [{"number": 2}, {"number": 4}]
    with pytest.raises(MemoryError), card.record("model", "optimizer"):
        raise MemoryError
    assert said[-1] is None  # switched off after an error too


def test_record_holds_versions_rows_and_whether_it_is_complete(tmp_path):
    rows = [row(numbers(1000, 1000), numbers(1000, 1000)), row(None, None, status="skipped")]
    path = measure_gpu.write_record(tmp_path / "records", GPU, rows, planned=2)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == f"nvidia-h200-sxm-{record['date']}.json"
    assert record["complete"] and record["settings_run"] == 1
    assert record["version"] == measure_gpu.VERSION
    assert record["rows"] == rows
    assert {"python", "torch", "transformers", "cuda", "driver"} <= set(record["versions"])
    assert record["versions"]["torch"]
    assert record["summary"]["peak_bytes"]["mean"] == 0


@pytest.mark.parametrize(
    ("rows", "planned", "interrupted"),
    [([], 1, False), ([row(None, None, status="not run")], 1, False), ([row(None, None)], 1, True)],
)
def test_record_of_a_part_says_so(tmp_path, rows, planned, interrupted):
    path = measure_gpu.write_record(tmp_path, GPU, rows, planned=planned, interrupted=interrupted)
    assert json.loads(path.read_text(encoding="utf-8"))["complete"] is False


def test_children_print_rows_crash_and_run_out_of_time():
    child = python("print('noise'); print('{\"a\": 1}'); print('[2]'); print(3)")
    assert (child.rows, child.returncode) == ([{"a": 1}], 0)
    child = python("import os; print('{\"a\": 1}', flush=True); os.kill(os.getpid(), 9)")
    assert (child.rows, child.returncode) == ([{"a": 1}], -9)
    child = python("import time; print('{\"a\": 1}', flush=True); time.sleep(60)", seconds=3)
    assert (child.rows, child.returncode) == ([{"a": 1}], None)
    assert python("raise ValueError('why')").last_words == "ValueError: why"


def test_every_setting_is_one_that_the_experiment_accepts():
    from virtual_gpu.models.configs import architectures, load_config
    from virtual_gpu.step.setting import Setting

    titles = [measure_gpu.title(setting, kind) for kind, setting in measure_gpu.PLAN]
    assert len(titles) == len(set(titles)) == len(measure_gpu.GRID) + len(measure_gpu.T4_GRID)
    for _, setting in measure_gpu.PLAN:
        assert setting["model_id"] in architectures()
        Setting(**setting).check_length(load_config(setting["model_id"]))


def test_list_prints_every_setting(capsys):
    assert measure_gpu.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(measure_gpu.PLAN)


def test_without_cuda_one_line_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert measure_gpu.main([]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_dry_run_predicts_in_a_child():
    command = [
        sys.executable,
        "benchmarks/measure_gpu.py",
        "--dry-run",
        "--only",
        "as a T4: polyglot-ko-1.3b, batch 16, ",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "(predicted: out of memory)" in done.stdout  # without checkpointing
    assert "(predicted: fits)" in done.stdout  # with it
    assert "Rows: 2 ok" in done.stdout
