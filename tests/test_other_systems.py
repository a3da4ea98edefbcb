"""What Windows and macOS lack: everything imports and answers without it, and what needs it is refused by name.

Nobody has run this there (the weekly run does): here the libraries are imported as they are, then the names that Python
has on Linux alone are taken away, then ours is imported and used.
"""

import multiprocessing
import os
import subprocess
import sys

import pytest
from odd_inputs import ROOT

from helpers import run_ranks
from helpers.chapters.c6_distributed.ranks import add_up
from virtual_gpu.errors import NotSupported
from virtual_gpu.host import process
from virtual_gpu.language import set_language

# Python's documentation of os and signal, "Availability: Unix", and its modules that are for Unix alone.
WINDOWS_HAS_NOT = """
import datasets, ipywidgets, jupyter_client, multiprocessing.forkserver, peft, torch.distributed.fsdp, transformers, trl
import os, signal, sys
from transformers import AutoModelForCausalLM, Trainer
for module, names in (
    (os, "fork forkpty register_at_fork setpgid killpg getpgrp getpgid setsid getuid geteuid O_NOFOLLOW O_NONBLOCK "
         "posix_spawn waitstatus_to_exitcode WNOHANG uname sysconf getloadavg sched_getaffinity mkfifo chown"),
    (signal, "SIGALRM SIGUSR1 SIGUSR2 SIGKILL SIGHUP SIGCHLD SIGPROF SIGQUIT SIGSTOP SIGCONT pthread_sigmask "
             "pthread_kill setitimer getitimer alarm ITIMER_REAL ITIMER_PROF sigwait pause siginterrupt"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("resource", "fcntl", "termios", "pwd", "grp", "pty", "tty"):
    sys.modules[name] = None
exists, opened = os.path.exists, open
os.path.exists = lambda path: not str(path).startswith("/proc") and exists(path)
"""
USES = """
import importlib, json, pkgutil, sys
from pathlib import Path
import helpers, virtual_gpu
for package in (virtual_gpu, helpers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
folder, data = Path(sys.argv[1]), Path(sys.argv[2])
from virtual_gpu.command import main
model = {"batch_size": 1, "sequence_length": 16}
found = {"predict": virtual_gpu.predict("gpt2", gpu="T4", **model).peak_bytes}
found["experiment"] = helpers.gpu_memory_experiment(model_id="gpt2", gpu="T4", **model).peak_bytes
(folder / "train.py").write_text("import torch\\nx = torch.ones(9, 9, device='cuda', requires_grad=True)\\n"
                                 "(x @ x).sum().backward()\\n")
found["run"] = main(["run", "--save", str(folder / "a.json"), "--snapshot", str(folder / "a.pickle"),
                     str(folder / "train.py")])
found["compare"] = main(["compare", str(folder / "a.json"), str(folder / "a.pickle")])
found["replay"] = main(["replay", str(folder / "a.pickle")])
found["ledger"] = helpers.shard_ledger("gpt2", 2).ranks[0].total
found["plans"] = len(helpers.plan_training("gpt2", "T4", length=16, batch=1))
helpers.plan_training("gpt2", "T4", length=16, batch=1, methods=("lora",)).best.save(folder / "plan")
with virtual_gpu.cuda("T4", host="Colab") as gpu:
    import torch
    torch.ones(3).cuda()
    found["allocated"] = gpu.memory_allocated()
print("FOUND" + json.dumps(found))
"""


def answers(script, tmp_path):
    tmp_path.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(ROOT / "tests" / "data")], cwd=ROOT, capture_output=True,
        text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT), "VIRTUAL_GPU_PROCESSES": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))


@pytest.mark.slow
def test_all_answers_are_the_same_without_what_windows_has_not(tmp_path):
    without = answers(WINDOWS_HAS_NOT + USES, tmp_path / "without")
    assert without == answers(USES, tmp_path / "with")
    assert '"run": 0' in without and '"compare": 0' in without and '"replay": 0' in without


@pytest.mark.parametrize(("language", "words"), [("ko", "rank를 띄울 수 없다"), ("en", "Ranks cannot be started")])
def test_ranks_are_refused_by_name_where_no_process_forks(monkeypatch, language, words):
    set_language(language)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(RuntimeError, match=words) as refused:
        run_ranks(add_up, 2)
    assert "Windows" in str(refused.value) and "WSL" in str(refused.value)


def test_what_a_process_holds_is_refused_by_name_without_proc(monkeypatch):
    set_language("en")

    def no_proc(path, *args, **kwargs):
        assert str(path).startswith("/proc")
        raise FileNotFoundError(path)

    monkeypatch.setattr(process, "open", no_proc, raising=False)
    with pytest.raises(NotSupported, match="only Linux"):
        process.process_memory()
    with pytest.raises(NotSupported, match="only Linux"), process.host_growth():
        raise AssertionError("a block that nobody can measure was begun")
