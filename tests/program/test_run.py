"""Whole programs, unchanged: what they hold, where they end, how they fail."""

import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from virtual_gpu.cards import CATALOG
from virtual_gpu.command import main as virtual_gpu_command
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.program import again
from virtual_gpu.program.again import Run, advice, value_of, with_value
from virtual_gpu.program.command import main
from virtual_gpu.program.runner import run
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.setting import Setting
from virtual_gpu.trace.compare import compare
from virtual_gpu.trace.saved import read
from virtual_gpu.units import human_bytes

PROGRAMS = Path(__file__).parent / "programs"
MIB = 2**20


def program(name: str, *argv: str, **settings):
    report = run(str(PROGRAMS / name), argv, **settings)
    if report.error is not None and settings.get("gpu", "T4") == "T4":
        raise report.error
    return report


def test_a_loop_fits_and_its_bytes_are_what_they_are():
    report = program("loop.py", "1024")
    parameters = 4 * 1024 * 1024 + 4096 + 4 * 1024 * 10 + 512
    assert (report.status, report.steps) == ("fits", 3)
    assert report.at_peak["parameters"] == parameters
    assert report.at_peak["optimizer"] in (0, 2 * parameters)
    assert {"forward", "backward", "step"} <= report.phases.keys()
    assert any(file.endswith("loop.py") for file, _, _ in report.lines)
    assert max(a for a, _ in report.phases.values()) == report.allocated == sum(report.at_peak.values())


def test_a_program_as_its_own_loop_on_the_core():
    """The program's peak is that of the same step made of the core's parts."""
    gpu = VirtualGPU(CATALOG["T4"])
    model = gpu.place(torch.nn.Linear(1024, 1024, bias=False))
    batch = gpu.place(torch.ones(1, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        with gpu:
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = program("ddp.py", gpus=2)
    buckets = 4 * MIB  # DistributedDataParallel's own copy of the gradients
    assert report.allocated == gpu.max_memory_allocated() + buckets


@pytest.mark.parametrize("tuned", [False, True])
def test_convolutions_are_said_to_have_workspaces_that_are_not_counted(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    path = tmp_path / "convolution.py"
    path.write_text(
        f"import torch\ntorch.backends.cudnn.benchmark = {tuned}\n"
        "layers = [torch.nn.Conv2d(3, width, 3, padding=1, bias=False, device='cuda') for width in (8, 4)]\n"
        "for layer in layers:\n    layer(torch.zeros(2, 3, 32, 32, device='cuda')).sum().backward()\n"
    )
    note = next(note for note in run(str(path), gpu="H100").notes if "cuDNN" in note)
    largest = 4 * (2 * 3 * 32 * 32 + 8 * 3 * 9 + 2 * 8 * 32 * 32)
    assert "합성곱 2번" in note and human_bytes(largest) in note
    assert ("benchmark" in note) == tuned
    assert not any("cuDNN" in note for note in program("loop.py", "64").notes)


def test_caught_out_of_memory_goes_on(capfd):
    report = program("smaller.py")
    assert (report.status, report.steps) == ("fits", 1)
    assert "batch 1048576" in capfd.readouterr().out
    assert report.oom["bytes"] >= 2**33


LARGE = "import sys, torch\nlayer = torch.nn.Linear(2**14, 2**13, bias=False, device='cuda')\ntry:\n"


@pytest.mark.parametrize("end", ["sys.exit(1)", "raise RuntimeError('no luck')", "raise ValueError('x') from None"])
def test_out_of_memory_that_the_program_hides_is_out_of_memory(end, tmp_path):
    """Hydra, for one, prints the error and ends with status 1."""
    path = tmp_path / "hides.py"
    path.write_text(f"{LARGE}    layer(torch.ones(2**19, 2**14, device='cuda'))\nexcept Exception:\n    {end}\n")
    report = run(str(path))
    assert report.status == "oom" and report.oom["bytes"] == 4 * 2**33
    assert isinstance(report.error, SystemExit | RuntimeError | ValueError)  # as it ended, with its traceback
    assert not isinstance(report.error, torch.OutOfMemoryError)


@pytest.mark.parametrize("end", ["sys.exit(1)", "raise RuntimeError('no luck')"])
def test_another_error_after_memory_was_enough_is_the_program_s_own(end, tmp_path):
    path = tmp_path / "fails.py"
    steps = "    torch.optim.SGD([layer.weight]).step()\n"
    path.write_text(f"{LARGE}    torch.empty(2**40, device='cuda')\nexcept Exception:\n{steps}{end}\n")
    assert run(str(path)).status == "failed"


@pytest.mark.parametrize(
    "end, told",
    [
        ("raise FileNotFoundError('no data')", "FileNotFoundError: no data (SystemExit: 1)"),  # as Hydra ends
        ("assert False", "AssertionError (SystemExit: 1)"),
        ("sys.exit(1)", "SystemExit: 1"),
        ("sys.exit()", None),
    ],
)
def test_an_exit_that_handles_an_error_tells_of_it(end, told, tmp_path):
    path = tmp_path / "ends.py"
    path.write_text(f"import sys\ntry:\n    {end}\nexcept Exception:\n    sys.exit(1)\n")
    assert run(str(path)).json()["error"] == told


@pytest.mark.parametrize("end", ["", "raise ValueError\n", "sys.exit()\n"])
@pytest.mark.parametrize("made", ["device='cuda'", "bias=True).to('cuda'"])
def test_a_model_that_was_never_called_is_what_is_held(end, made, tmp_path):
    path = tmp_path / "loads.py"
    path.write_text(f"import sys, torch\nmodel = torch.nn.Sequential(torch.nn.Linear(1023, 1024, {made}))\n{end}")
    report = run(str(path))
    assert report.at_peak["parameters"] == report.allocated == 4 * 1024 * 1024
    assert report.modules == [("0", 4 * 1024 * 1024)]


def test_training_and_then_the_end_of_the_program(capfd):
    report = program("loop.py", steps=2, through_evaluation=True)
    assert capfd.readouterr().out.count("evaluated 16") == 2 and "evaluation" in report.phases
    assert report.steps == 2 and any("torch.save" in note for note in report.notes)
    cut = "평가에는 배치 2개까지만"  # of four
    assert any(cut in note for note in report.notes)
    assert not any("평가에는 배치" in note for note in program("loop.py", steps=4, through_evaluation=True).notes)


def test_an_epoch_without_batches_is_said(tmp_path):
    path = tmp_path / "epochs.py"
    path.write_text(
        """
import torch
from torch.utils.data import DataLoader
layer = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
loader = DataLoader(torch.zeros(4, 8))
for epoch in range(2):
    total = count = 0
    for x in loader:
        loss = layer(x.cuda()).sum()
        loss.backward()
        optimizer.step()
        total, count = total + loss.item(), count + 1
    print(total / count)
"""
    )
    for steps, unfed in ((2, 1), (4, 1), (5, 0), (9, 0)):
        report = run(str(path), steps=steps, through_evaluation=True)
        assert report.status == "fits" and sum("배치를 받지 못했다" in note for note in report.notes) == unfed
        assert sum("epochs.py:14, ZeroDivisionError: division by zero" in note for note in report.notes) == unfed
    elsewhere = path.read_text().replace(
        "    print(", "    layer(torch.zeros(1, 8).cuda())\n    if epoch: raise ValueError\n    print("
    )
    path.write_text(elsewhere.replace("/ count", "/ max(count, 1)"))
    report = run(str(path), steps=4, through_evaluation=True)
    assert report.status == "failed" and isinstance(report.error, ValueError)  # it went on before it failed


@pytest.mark.parametrize("ends", ["", "raise ValueError('no')\n", "torch.empty(2**40, device='cuda')\n"])
def test_a_program_leaves_the_environment_as_it_was(ends, tmp_path, monkeypatch):
    """TrainingArguments say to accelerate in there what the next program's would take for its own."""
    monkeypatch.setenv("TAKEN_AWAY", "1")
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    before = dict(os.environ)
    script = tmp_path / "sets.py"
    script.write_text(
        "import os, torch\nos.environ.update(ACCELERATE_USE_FSDP='true', CHANGED='after')\n"
        "del os.environ['TAKEN_AWAY']\n" + ends
    )
    run(str(script), gpu="T4")
    assert dict(os.environ) == before


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="a loader's workers are watched by SIGCHLD")
def test_a_worker_that_dies_after_the_program_is_no_error_of_ours(tmp_path):
    """A loader's handler raises wherever the process is; and the next program's loader sets its own."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import signal, torch
loader = torch.utils.data.DataLoader(torch.arange(64.0).view(64, 1), batch_size=8, num_workers=1)
batches = iter(loader)
next(batches)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.alarm(600)
assert callable(signal.getsignal(signal.SIGCHLD))
torch.empty(2**40, device="cuda")
"""
    )
    numbers = signal.SIGCHLD, signal.SIGALRM
    before = [signal.getsignal(number) for number in numbers]
    for _ in range(2):
        report = run(str(script), gpu="T4")  # its error keeps the loader
        assert report.status == "oom" and not multiprocessing.active_children()
        assert [signal.getsignal(number) for number in numbers] == before and signal.alarm(0) == 0


LEAKS = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept, before, total = [], None, 0.0
for step in range(30):
    out = model(torch.ones(2**14, 1024, device="cuda"))
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    KEEPS
"""


@pytest.mark.parametrize(
    ("keeps", "line"),
    [
        ("kept.append(out)", 7),
        ("kept.append(out.detach()); before = out", 7),
        ("kept.append(torch.ones(2**24, device='cuda'))", 12),
    ],
)
def test_what_each_step_leaves_behind_is_told_with_its_line(keeps, line, tmp_path):
    script = tmp_path / "leaks.py"
    script.write_text(LEAKS.replace("KEEPS", keeps))
    report = run(str(script), gpu="T4", steps=5)
    each = 64 * 2**20
    assert report.status == "fits" and report.growth["bytes"] == each and report.growth["line"] == line
    assert f"leaks.py:{line}" in report.grows[0] and report.grows[0] in report.text()
    card = run(str(script), gpu=f"{(report.reserved + 12 * each) / 2**30:.3f}GiB, 7.5", steps=30)
    assert card.status == "oom" and card.growth["bytes"] == each and card.growth["more_steps"] is None
    assert 0 <= card.steps - 5 - (card.capacity - report.reserved) // each <= 5  # the last segments have room at first


@pytest.mark.parametrize(
    "keeps", ["before = out", "kept.append(loss)", "kept.append(out.cpu())", "before = out.detach(), loss"]
)
def test_what_stays_for_a_step_or_is_little_is_no_growth(keeps, tmp_path):
    script = tmp_path / "stays.py"
    script.write_text(LEAKS.replace("KEEPS", keeps))
    for steps in (2, 3, 8):
        report = run(str(script), gpu="T4", steps=steps)
        assert report.growth is None and not report.grows


EVALUATES = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=100_000, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
)
data = [{"input_ids": [5] * 256, "labels": [5] * 256}] * 64
arguments = TrainingArguments(
    "out", per_device_train_batch_size=1, per_device_eval_batch_size=16, report_to="none", save_strategy="no", ARGUMENTS
)
Trainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=lambda _: {}).train()
"""


def test_an_evaluation_that_was_not_seen_is_told(tmp_path):
    script = tmp_path / "evaluates.py"

    def notes(arguments, **how):
        script.write_text(EVALUATES.replace("ARGUMENTS", arguments))
        return [note for note in run(str(script), gpu="A100-80GB", **how).notes if "--through-evaluation" in note]

    assert len(notes("eval_strategy='steps', eval_steps=50")) == 1
    assert notes("") == notes("eval_strategy='steps', eval_steps=2") == []
    assert notes("eval_strategy='epoch', max_steps=50", through_evaluation=True) == []


def test_an_evaluation_that_runs_out_of_memory_is_told_what_no_run_can_change(tmp_path, capsys):
    script = tmp_path / "evaluates.py"
    script.write_text(EVALUATES.replace("ARGUMENTS", "eval_strategy='steps', eval_steps=1"))
    report = run(str(script), gpu="1.5GiB, 8.6")
    assert report.status == "oom" and report.oom["phase"] == "evaluation"
    assert "Trainer: per_device_eval_batch_size=1" in report.to_write
    assert report.to_write[0] in report.text()


def test_a_notebook_is_refused_with_the_ways_there_are(tmp_path):
    notebook = tmp_path / "train.ipynb"
    notebook.write_text('{"cells": null}')
    with pytest.raises(ValueError, match=r"train\.ipynb.*nbconvert.*%virtual_gpu T4"):
        run(str(notebook))


def test_an_optimizer_of_8_bits_leaves_nothing_to_the_next_program(tmp_path):
    """bitsandbytes keeps by number of parameter what the Trainer asks for its embeddings: 32 bits."""
    program = tmp_path / "train.py"
    program.write_text(
        f"""
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=256, n_head=4, vocab_size=5000, bos_token_id=0, eos_token_id=0))
data = [{{"input_ids": [1] * 32, "labels": [1] * 32}}] * 8
arguments = TrainingArguments({str(tmp_path)!r}, optim="adamw_bnb_8bit", max_steps=2, report_to="none")
Trainer(model, arguments, train_dataset=data).train()
""",
        encoding="utf-8",
    )
    setting = Setting(model_id="gpt2", optimizer="adamw_8bit", batch_size=1, sequence_length=16)
    before = predict_memory(setting, gpu="T4", full=True).optimizer_bytes
    first, second = (run(str(program), [], gpu="T4") for _ in range(2))
    assert first.at_peak == second.at_peak
    assert predict_memory(setting, gpu="T4", full=True).optimizer_bytes == before


def test_4_bit_weights_hold_what_bitsandbytes_holds():
    report = program("pretrained.py")
    weights = 24 * 12 * 2048**2
    blocks = weights // 64
    held = weights // 2 + blocks + blocks // 64  # packed, 8-bit absmax, fp32 of each 256
    kept = 2 * 30080 * 2048 * 4  # embedding and head, which peft casts to fp32
    assert report.status == "fits" and report.steps == 3
    left_over = 2**20  # of a block that is not split, after a whole weight made room for its packed one
    assert held + kept < report.at_peak["parameters"] <= (held + kept) * 1.01 + left_over


@pytest.mark.parametrize("rank", (0, 7))
def test_a_rank_of_data_parallel_holds_buckets(rank):
    report = program("ddp.py", gpus=8, rank=rank)
    assert report.at_peak["parameters"] == 4 * MIB and report.at_peak["gradients"] == 8 * MIB


def test_a_rank_of_fsdp2_holds_its_part():
    alone, rank = (program("fsdp2.py", gpus=ranks) for ranks in (2, 8))
    assert alone.phases["step"][0] > rank.phases["step"][0]
    assert rank.at_peak["parameters"] >= 4 * 4 * MIB // 8


def test_the_command_and_its_exit_status(tmp_path, capsys):
    fails, large = tmp_path / "fails.py", tmp_path / "large.py"
    fails.write_text("1 / 0\n")
    large.write_text("import torch\ntorch.empty(2**35, dtype=torch.uint8, device='cuda')\n")
    assert main([str(fails)]) == 2
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error and "runner.py" not in error
    assert main(["--json", "--no-advise", str(large)]) == 1, capsys.readouterr()
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 2 and report["oom"]["line"] == 2 and report["status"] == "oom"
    assert main([str(tmp_path / "none.py")]) == 2
    assert main(["--gpu", "T5", str(fails)]) == 2


def test_what_is_not_run_again_is_said(tmp_path, capsys, monkeypatch):
    large = tmp_path / "large.py"
    large.write_text("import torch\ntorch.empty(2**35, dtype=torch.uint8, device='cuda')\n")
    monkeypatch.setattr("virtual_gpu.program.command._LONG_SECONDS", 0)
    for asked, told in (([], True), (["--no-advise"], False)):
        assert main([*asked, str(large)]) == 1
        assert ("--advise를 주면" in capsys.readouterr().out) is told
    monkeypatch.setattr("virtual_gpu.program.command.advice", lambda *_, **__: iter(()))
    assert main(["--advise", str(large)]) == 1
    assert "충분히 줄일 것이 없다" in capsys.readouterr().out


def test_pytorchs_viewer_reads_the_snapshot(tmp_path):
    from torch.cuda import _memory_viz

    path, page = tmp_path / "s.pickle", tmp_path / "r.html"
    assert main(["--snapshot", str(path), "--html", str(page), "--gpus", "2", str(PROGRAMS / "ddp.py")]) == 0
    snapshot = pickle.loads(path.read_bytes())
    assert "ddp.py" in str(snapshot["device_traces"][0][0]["frames"])
    assert "<svg" in page.read_text()
    assert _memory_viz.trace_plot(snapshot) and _memory_viz.segsum(snapshot)


def test_report_and_program_say_the_same_bytes(capfd):
    report = program("numbers.py", "--batch", "64")
    assert json.loads(capfd.readouterr().out) == [report.allocated, report.reserved]
    trace = report.watch.saved().trace
    again, allocator = trace.through()
    assert (again.held == trace.held).all()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (report.allocated, report.reserved)


@pytest.mark.parametrize("before", [0, 2])
def test_ctrl_c_ends_the_program_and_not_its_report(before, tmp_path, capsys):
    path, found = tmp_path / "loop.py", tmp_path / "report.json"
    path.write_text(
        "import signal, torch\nlayer = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.SGD(layer.parameters())\n"
        f"for step in range(5):\n    if step == {before}: signal.raise_signal(signal.SIGINT)\n"
        "    layer(torch.ones(8, 1024, device='cuda')).sum().backward()\n    optimizer.step()\n"
    )
    assert main(["--report", str(found), str(path)]) == 130
    report = json.loads(found.read_text())
    assert (report["status"], report["judgement"], report["steps"]) == ("interrupted", "interrupted", before)
    assert report["allocated"] >= 4 * 1024 * 1025 and "중단했다. 거기까지의 최대" in capsys.readouterr().out
    assert not torch.cuda.is_available()  # nothing of the virtual card is left
    with pytest.raises(KeyboardInterrupt):
        run(str(path))


def test_a_mesh_without_a_group_does_not_wait_for_other_ranks():
    report = program("tensor_parallel.py", gpus=4)
    assert report.status == "fits" and report.at_peak["parameters"] == 2 * 4 * 1024 * 4096 // 4


def test_out_of_memory_is_run_again_with_one_thing_changed():
    arguments = ["--batch_size", "200000"]
    first = program("numbers.py", *arguments, gpu="3GiB, 8.0")
    assert first.oom["allocated"] + first.oom["bytes"] > first.capacity  # no setting of the allocator would do
    said = []
    command = [str(PROGRAMS / "numbers.py"), *arguments]
    tried = list(advice(["--gpu", "3GiB, 8.0"], command, first, told=said.append, at_once=2))
    # its model is a row of single layers, which has no blocks to checkpoint: told, not reported as tried
    assert said[0] == "block_checkpointing" and said[1:] == [one.change for one in tried]
    assert [run.report["judgement"] == "fits" for run in tried] == [False] * (len(tried) - 1) + [True]
    assert tried[0].change == "batch_size 100000" and tried[-1].change.startswith("batch_size ")


def test_arguments_are_found_however_they_are_written():
    for command in (["x.py", "--batch", "8"], ["x.py", "--batch=8"], ["x.py", "batch=8"]):
        assert value_of(command, "--batch") == 8 and value_of(with_value(command, "--batch", 9), "batch") == 9
        assert len(with_value(command, "--batch", 9)) == len(command)
    assert with_value(["x.py"], "batch", 9) == ["x.py", "--batch", "9"] and value_of(["x.py", "--b", "a"], "b") is None


@pytest.mark.parametrize("first", (None, 1, 8, 1000))
def test_the_largest_value_of_an_argument(monkeypatch, first):
    def run_again(change, options, command):
        fits = value_of(command, "--batch") <= 37
        return Run(change, {"status": "fits" if fits else "oom"})

    monkeypatch.setattr(again, "run_again", run_again)
    told: list[Run] = []
    command = ["x.py"] if first is None else ["x.py", "--batch", str(first)]
    assert again.largest("--batch", [], command, told=told.append).change == "--batch 37"
    assert len(told) <= 12
    monkeypatch.setattr(again, "run_again", lambda change, *_: Run(change, {"status": "oom"}))
    assert again.largest("--batch", [], command, told=told.append) is None
    failed = Run("x", {"status": "failed", "error": "KeyError"})
    monkeypatch.setattr(again, "run_again", lambda *_: failed)
    with pytest.raises(ValueError, match="KeyError"):
        again.largest("--batch", [], command, told=told.append)


def test_the_largest_batch_of_a_real_program(monkeypatch, capsys, tmp_path):
    """By the command, each run in this process instead of one of its own."""
    tried = {}

    def run_again(change, options, command, environment=None):
        path = tmp_path / "report.json"
        main(["--no-advise", "--force", "--report", str(path), *options, *command])
        report = json.loads(path.read_text())
        tried[change] = report["status"]
        return Run(change, report)

    monkeypatch.setattr(again, "run_again", run_again)
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nlayer = torch.nn.Linear(1024, 1024, device='cuda')\n"
        "layer(torch.empty(4096 * int(sys.argv[2]), 1024, device='cuda')).sum().backward()\n"
    )
    command = [str(script), "--batch", "24"]
    assert virtual_gpu_command(["largest", "--gpu", "2GiB, 8.0", "--argument", "--batch", "--json", *command]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out[printed.out.index('{\n  "schema"') :])["largest"]
    best = int(found["change"].split()[1])
    assert 24 < best < 96 and found["status"] == "fits"
    assert tried[f"--batch {best + 1}"] == "oom"


def test_the_page_shows_scale_phases_and_whole_names(tmp_path):
    page = tmp_path / "r.html"
    assert main(["--html", str(page), str(PROGRAMS / "loop.py"), "1024"]) == 0
    text = page.read_text()
    ticks = re.findall(r'<span style="bottom:([\d.]+)%">([\d.]+) MiB</span>', text)
    assert len(ticks) >= 2 and float(ticks[-1][0]) > 60  # its own scale, not that of a card of 14 GiB
    assert "14.64 GiB</b>" not in text and "순전파</span>" in text and "loop.py:18" in text
    large = tmp_path / "large.py"
    large.write_text("import torch\nx = torch.empty(2**30, device='cuda')\n" * 2 + "y = x.clone()\n" * 9)
    assert main(["--no-advise", "--force", "--html", str(page), str(large)]) == 0
    assert "14.64 GiB</b>" in page.read_text()


def test_saved_runs_are_compared(tmp_path, capsys):
    paths = [str(tmp_path / f"{batch}.json") for batch in (64, 4096)]
    for path, batch in zip(paths, ("64", "4096"), strict=True):
        assert main(["--save", path, str(PROGRAMS / "numbers.py"), "--batch", batch]) == 0
    same, other = (compare(read(paths[0]), read(path)) for path in paths)
    assert same.first_difference is None and same.growth == 0
    _, ours, theirs = other.first_difference
    assert (ours[0], theirs[0]) == (64 * 4000, 4096 * 4000) and "numbers.py:12" in ours[2]
    assert other.at_peak["parameters"] == (4 * (4_000_256 + 4096),) * 2
    capsys.readouterr()
    assert virtual_gpu_command(["compare", *paths, "--fail-if-peak-grew", "2%"]) == 1
    assert virtual_gpu_command(["compare", paths[0], paths[0], "--fail-if-peak-grew", "2%"]) == 0
    snapshots = [str(tmp_path / f"{batch}.pickle") for batch in (64, 4096)]
    for path, batch in zip(snapshots, ("64", "4096"), strict=True):
        assert main(["--snapshot", path, str(PROGRAMS / "numbers.py"), "--batch", batch]) == 0
    pickled = compare(read(snapshots[0]), read(snapshots[1]))
    assert pickled.peaks == other.peaks
    assert [entry[0] for entry in pickled.first_difference[1:]] == [ours[0], theirs[0]]
    card = str(Path(__file__).parent.parent / "data" / "traces" / "attention_from_empty_silmont.json.gz")
    assert virtual_gpu_command(["compare", card, card, "--fail-if-peak-grew", "0"]) == 0
    (tmp_path / "class.pickle").write_bytes(pickle.dumps(Path(".")))
    assert virtual_gpu_command(["compare", snapshots[0], str(tmp_path / "class.pickle")]) == 2
    (tmp_path / "bad.json").write_text('{"trace": {"schema": 1, "born": [3]}}')
    assert virtual_gpu_command(["compare", paths[0], str(tmp_path / "bad.json")]) == 2


def test_what_a_module_binds_by_name_during_a_run_writes_afterwards(tmp_path, monkeypatch):
    (tmp_path / "binds_by_name.py").write_text("from safetensors.torch import save_file\nfrom torch import save\n")
    (tmp_path / "saves.py").write_text(
        "import torch, binds_by_name\nbinds_by_name.save_file({'a': torch.ones(2, device='cuda')}, '/nowhere/a')\n"
        "binds_by_name.save(torch.ones(2, device='cuda'), '/nowhere/b')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    report = run(str(tmp_path / "saves.py"))
    assert report.error is None and sum("save" in note for note in report.notes) == 2
    import binds_by_name
    import safetensors.torch

    monkeypatch.delitem(sys.modules, "binds_by_name")
    assert (binds_by_name.save_file, binds_by_name.save) == (safetensors.torch.save_file, torch.save)
    binds_by_name.save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]


def test_optimizer_states_of_several_tensors_are_found(tmp_path):
    """torchao's low-bit states are tensors that hold others: codes and scales."""
    script = tmp_path / "two.py"
    script.write_text(
        "import torch\n"
        "from torch.testing._internal.two_tensor import TwoTensor\n"
        "class Two(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        super().step()\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            self.state[p].setdefault('both', TwoTensor(torch.zeros_like(p.data), torch.zeros_like(p.data)))\n"
        "layer = torch.nn.Linear(1024, 1024, bias=False).cuda()\n"
        "optimizer = Two(layer.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        "    layer(torch.ones(1, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    report = run(str(script), (), gpu="T4")
    assert report.error is None and report.at_peak["optimizer"] == 2 * 4 * 2**20


IN_PIECES = """
import sys
import torch

if len(sys.argv) > 1:
    torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / torch.cuda.get_device_properties(0).total_memory)
layer = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    for size in (100, 140, 190, 250, 320):  # ever other sizes: each a segment that nothing else takes
        kept = torch.empty((size + 3 * step) * 2**20, dtype=torch.uint8, device="cuda")
    layer(torch.ones(1, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_run_in_pieces_says_in_how_much_it_gets_through(tmp_path):
    """What the allocator keeps where there is room, it gives back where there is none: that much is really enough."""
    script = tmp_path / "pieces.py"
    script.write_text(IN_PIECES)
    report = run(str(script), gpu="T4")
    assert report.status == "fits" and report.allocated < report.enough < 0.7 * report.reserved
    assert report.room.taken(report.enough) in report.text() and report.json()["enough"] == report.enough
    step = max(report.allocated // 128, 2 * 2**20)
    for nbytes, status in ((report.enough, "fits"), (report.enough - 2 * step, "oom")):
        assert run(str(script), [str(nbytes + 1)], gpu="T4").status == status
    whole = tmp_path / "whole.py"
    whole.write_text(IN_PIECES.replace("3 * step", "0 * step").replace("(100, 140, 190, 250, 320)", "(320,) * 5"))
    report = run(str(whole), gpu="T4")
    assert report.enough == report.reserved and not report.on_a_smaller_card


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("untied")
    LlamaConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        tie_word_embeddings=False, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


@pytest.mark.parametrize("modules", ["", "embed_tokens,lm_head"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_rank_of_adapters_under_fsdp2_is_rank_steps(untied, tmp_path, method, modules):
    """What accelerate makes of them: of a copy that is trained fp32, but beside 4-bit weights, which go at once."""
    from virtual_gpu.shards.rank_step import rank_step

    report = program("fsdp2_trainer.py", untied, str(tmp_path), method, modules, "bfloat16", gpus=2, gpu="A100-80GB")
    foretold = rank_step(
        untied, 2, 3, peft=method, modules_to_save=[name for name in modules.split(",") if name], gpu="A100-80GB",
        sequence_length=128, gradient_checkpointing=True, as_accelerate=True,
    )  # fmt: skip
    memory = foretold.memory
    assert abs(report.at_peak["parameters"] - memory.parameters) < 0.01 * memory.parameters
    assert abs(report.at_peak["optimizer"] - memory.momentum - memory.variance) < 0.01 * memory.parameters
    # The workspace of backward's thread is beside it. 4-bit weights as they were loaded would be a tenth more.
    allocated = report.allocated - report.at_peak["workspaces"] // 2
    apart = abs(allocated - foretold.trace.peak_bytes) / allocated
    assert apart < (0.05 if modules else 0.001)


def test_4_bit_weights_in_bytes_are_whole_on_each_rank(untied, tmp_path):
    """accelerate leaves them out of FSDP2 where it knows them by their class."""
    whole, split = (
        program("fsdp2_trainer.py", untied, str(tmp_path), "qlora", "", storage, gpus=2, gpu="A100-80GB")
        for storage in ("uint8", "bfloat16")
    )
    packed = 4 * (4 * 512 * 512 + 3 * 512 * 1024) // 2
    assert abs(whole.at_peak["parameters"] - split.at_peak["parameters"] - packed // 2) < 0.01 * packed


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_what_cudnn_keeps_of_recurrent_layers_is_said_to_be_missing(kind, tmp_path):
    path = tmp_path / "recurrent.py"
    text = f"import torch\nlayer = torch.nn.{kind}(8, 8).cuda()\nout, _ = layer(torch.ones(4, 2, 8, device='cuda'))\n"
    path.write_text(f"{text}out.sum().backward()\n")
    notes = run(str(path)).notes
    assert sum(note.startswith(f"{kind}: cuDNN") for note in notes) == 1
    path.write_text(f"import torch\ntorch.set_grad_enabled(False)\n{text}")
    assert not any("cuDNN" in note for note in run(str(path)).notes)
