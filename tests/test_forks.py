"""Forks that work ahead: what comes out is what this process alone finds, and nothing of them is left."""

import multiprocessing
import os
import sys
import time

import pytest
import torch
from transformers import GPT2Config

from helpers import plan_training
from virtual_gpu import remembered
from virtual_gpu.cores import MOST, VARIABLE, free_ram_bytes
from virtual_gpu.errors import WrongValue
from virtual_gpu.models.depth import forget_shallow_runs
from virtual_gpu.plan.forks import Forks, processes
from virtual_gpu.plan.request import Request
from virtual_gpu.step import predict
from virtual_gpu.step.predict import predict_need

DEEP = GPT2Config(n_layer=8, n_embd=256, n_head=4, vocab_size=4096)
WIDE = GPT2Config(n_layer=8, n_embd=768, n_head=4, vocab_size=32768)
linux = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="there are forks on Linux only")


def open_files():
    return len(os.listdir("/proc/self/fd"))


@linux
@pytest.mark.parametrize("forks", [0, 1, 3, 9])
def test_every_result_is_there_and_no_process_and_no_file_is_left(forks):
    before, here = open_files(), os.getpid()
    with Forks(lambda key: (time.sleep(0.05), os.getpid(), key * key)[1:], range(5), forks) as ahead:
        found = [ahead(key) for key in range(5)]
        assert [ahead(key) for key in range(5)] == found  # once and for all
    assert [value for _, value in found] == [0, 1, 4, 9, 16]
    where = {pid for pid, _ in found}
    assert here in where and len(where) <= 1 + forks and (forks == 0) == (where == {here})
    assert found[0][0] == here  # who asks begins with the first, which it asks for first
    assert not multiprocessing.active_children()
    assert open_files() <= before  # fewer where what another test has dropped is closed meanwhile


@linux
def test_what_fails_in_a_fork_is_raised_where_it_is_asked_for():
    def run(key):
        if key == 1:
            raise KeyError(os.getpid())
        return key

    with Forks(run, range(4), 2) as ahead:
        assert ahead(0) == 0 and ahead(2) == 2  # that another one failed says nothing of these
        with pytest.raises(KeyError) as raised:
            ahead(1)
        assert raised.value.args == (os.getpid(),)
        assert ahead(3) == 3


@linux
def test_a_fork_that_dies_is_stood_in_for():
    here = os.getpid()

    def run(key):
        if os.getpid() != here:
            os._exit(9)  # as where the machine has no memory left
        time.sleep(0.1)
        return key

    with Forks(run, range(4), 2) as ahead:
        assert [ahead(key) for key in range(4)] == [0, 1, 2, 3]


@linux
def test_where_no_process_can_be_made_this_one_does_it_all(monkeypatch):
    def none(*_):
        raise BlockingIOError("fork: Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", none)
    with Forks(str, range(3), 2) as forks:
        assert [forks(key) for key in range(3)] == ["0", "1", "2"]


@linux
def test_results_larger_than_a_pipe_hold_nobody_up():
    with Forks(lambda key: bytes(2**20) if key else key, range(6), 1) as ahead:
        time.sleep(0.5)  # the fork could not have written the second if it had waited for a reader of the first
        taken = ahead._next()
        assert ahead(0) == 0 and taken is None and len(ahead(5)) == 2**20


@linux
def test_an_interrupt_ends_the_forks():
    def run(key):
        if key == 0:
            raise KeyboardInterrupt
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Forks(run, range(3), 2) as ahead:
        workers = [worker.pid for worker in multiprocessing.active_children()]
        ahead(0)
    assert workers and not multiprocessing.active_children() and time.monotonic() - start < 30


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_number_of_processes_that_is_none(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(WrongValue, match=f"{VARIABLE}={value}.*1 이상"):
        plan_training(DEEP, "T4")


def test_where_a_fork_is_not_safe_there_is_none(monkeypatch):
    monkeypatch.setenv(VARIABLE, "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert processes() == 3
    monkeypatch.delenv(VARIABLE)
    assert processes() == MOST
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert processes() == 1
    with monkeypatch.context() as patch:
        patch.delattr(os, "sched_getaffinity")  # macOS and Windows
        assert processes() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert processes() == 1


def test_what_nobody_asks_for_is_kept_for_a_while(monkeypatch):
    monkeypatch.setattr(remembered, "_learned", {})
    square = remembered.remembered(lambda x: x * x)
    with remembered.noting() as noted:
        assert [square(n) for n in range(300)] == [n * n for n in range(300)]
    square.cache_clear()
    wrong = {key: -1 for key in noted}  # whence it comes shows in what it says
    remembered.learn(wrong)
    assert len(remembered._learned) == 256 and square(0) == 0 and square(299) == -1
    square.cache_clear()
    assert square(298) == 298**2  # nothing of it is left


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """A file with the process of each run so far."""
    file, real = tmp_path / "runs", predict.virtual_run

    def run(*arguments):
        with file.open("a") as told:
            print(os.getpid(), file=told)
        return real(*arguments)

    monkeypatch.setattr(predict, "virtual_run", run)
    return file


def in_one_and_in_three(ask, runs, monkeypatch):
    """What comes of it in this process and with two forks, and in which processes each of its runs was."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    found, where = [], []
    for number in ("1", "3"):
        monkeypatch.setenv(VARIABLE, number)
        forget_shallow_runs()
        predict_need.cache_clear()
        found.append(ask())
        where.append(runs.read_text().split())
        runs.unlink()
    return found, where


@linux
def test_a_search_in_forks_is_the_search_in_one_process(monkeypatch, runs):
    def ask():
        return plan_training(DEEP, "1GiB, 7.5", batch=256, length=256, methods=("lora",)).to_dict()

    monkeypatch.setattr(Request, "can_fuse_head", False)  # its tiles are not the same for every micro-batch
    found, where = in_one_and_in_three(ask, runs, monkeypatch)
    assert found[0] == found[1] and len(found[0]["plans"]) > 1
    assert {*where[0]} == {str(os.getpid())} and len({*where[1]}) == 2  # there are two ways
    # What the forks found is known here: nothing of it is run again.
    ask()
    assert not runs.exists()
    # And what their shallow runs have shown: of the two micro-batches of each way the first took two runs, now one.
    plan_training(DEEP, "1GiB, 7.5", batch=256, length=192, methods=("lora",))
    assert (len(where[0]), len(runs.read_text().split())) == (2 * (2 + 1), 2 * (1 + 1))


@linux
def test_what_else_would_fit_is_looked_for_in_forks_too(monkeypatch, runs):
    def ask():
        plans = plan_training(WIDE, "1GiB, 7.5", batch=2, length=128, methods=("full",))
        assert not plans.plans
        return plans.closest, [(change.what, str(change)) for change in plans.changes]

    found, where = in_one_and_in_three(ask, runs, monkeypatch)
    assert found[0] == found[1] and {what for what, _ in found[0][1]} >= {"methods", "gpu"}
    assert {*where[0]} == {str(os.getpid())} and len({*where[1]}) > 1
    assert not multiprocessing.active_children()


GROUP_2 = {"sys/fs/cgroup/memory.max": "{limit}", "sys/fs/cgroup/memory.current": "{used}",
           "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file {cache}\n"}  # fmt: skip
GROUP_1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "{limit}", "sys/fs/cgroup/memory/memory.usage_in_bytes": "{used}",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file {cache}\n",
}  # fmt: skip


@pytest.mark.parametrize("group", [GROUP_2, GROUP_1], ids=["version 2", "version 1"])
@pytest.mark.parametrize(
    "limit, free",
    [(3000 * 2**10, 1800 * 2**10), (2**63 - 4096, 8000 * 2**10), (900 * 2**10, 0), ("max", 8000 * 2**10)],
    ids=["of a container", "of the machine", "nothing", "no limit"],
)
def test_free_ram_is_a_container_s_where_that_is_less(group, limit, free, tmp_path):
    """Beside what is used, but for the file cache that gives way."""
    if limit == "max" and group is GROUP_1:
        pytest.skip("version 1 has a number")
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"} | group
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(limit=limit, used=1300 * 2**10, cache=100 * 2**10) + "\n", encoding="utf-8")
    assert free_ram_bytes(tmp_path) == free


def test_free_ram_is_known_on_linux_alone(tmp_path):
    assert free_ram_bytes(tmp_path) is None
    assert sys.platform != "linux" or free_ram_bytes() > 0
