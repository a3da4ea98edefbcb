"""Real ranks: what they compute equals one process, what they hold and send is counted, and nothing is left behind."""

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import real_ranks
import torch

from helpers import run_ranks, set_language
from helpers.chapters.c6_distributed.drawings import draw_data_parallel
from helpers.chapters.c6_distributed.ranks import add_up, data_parallel, fsdp2, zero
from helpers.ranks import launcher
from helpers.ranks.launcher import MAX_RANKS, RankError
from helpers.ranks.training import one_process, tiny_model
from virtual_gpu.shards.layout import Layout
from virtual_gpu.shards.ledger import paper_bytes


def ranks_alive():
    """The processes that the fork server has started and that still live."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    return psutil.Process(server).children() if server else []


def is_alive(number):
    """Whether the process runs; one that only waits to be asked how it ended does not."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("ranks")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    handler = signal.getsignal(signal.SIGINT)
    yield
    deadline = time.monotonic() + 5  # the fork server reaps a dead rank a moment after we have seen its end
    while ranks_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks_alive() == []
    assert [path.name for path in folder.glob("course-ranks-*")] == []
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


# -- the launcher --------------------------------------------------------------------------------------------------


def test_results_come_back_by_rank_and_nothing_is_printed(capfd):
    assert run_ranks(real_ranks.who, 3, 7) == [(rank, 3, 1, 7) for rank in range(3)]
    assert run_ranks(add_up, 4) == [(rank, 4, 10) for rank in range(4)]
    assert run_ranks(add_up, 1) == [(0, 1, 1)]
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_raises_shows_its_traceback():
    with pytest.raises(RankError, match="rank 3개 가운데 rank 1에서 오류가 났다: ZeroDivisionError") as caught:
        run_ranks(real_ranks.raise_on, 3, 1)
    assert caught.value.rank == 1
    assert "real_ranks.py" in str(caught.value) and "return rank / 0" in str(caught.value)
    assert "launcher.py" not in str(caught.value)
    with pytest.raises(RankError, match=r"half a character: \\ud800"):
        run_ranks(real_ranks.raise_half_a_character, 1)


def test_the_reader_s_language_reaches_the_ranks():
    set_language("en")
    try:
        with pytest.raises(RankError, match="raised ValueError: 64 rows do not divide by 3 ranks"):
            run_ranks(data_parallel, 3)
    finally:
        set_language("ko")


def test_a_rank_that_is_killed_may_have_wanted_memory():
    with pytest.raises(RankError, match=r"rank 1을\(를\) 시스템이 끝냈다\(SIGKILL\). 메모리가 모자랐을") as caught:
        run_ranks(real_ranks.kill_on, 2, 1)
    assert caught.value.rank == 1
    with pytest.raises(RankError, match=r"rank 0이\(가\) 신호 SIGTERM로"):
        run_ranks(real_ranks.kill_on, 2, 0, signal.SIGTERM)


def test_a_rank_that_leaves():
    for code in (3, 0):
        with pytest.raises(RankError, match=rf"rank 1이\(가\) 결과를 남기지 않고 코드 {code}로"):
            run_ranks(real_ranks.leave_on, 2, 1, code)
    with pytest.raises(RankError, match="rank 0에서 오류가 났다: SystemExit: enough"):
        run_ranks(real_ranks.exit_on, 2, 0)
    with pytest.raises(RankError, match="pickle"):
        run_ranks(real_ranks.not_picklable, 2)


def test_a_hang_ends_at_the_time_limit_and_says_where():
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0, 1, 2이\(가\) 4초 안에 끝나지 않아") as caught:
        run_ranks(real_ranks.wait_alone, 3, 1, time_limit=4)
    assert time.monotonic() - begin < 30
    assert str(caught.value).count("in wait_alone") == 3 and "in barrier" in str(caught.value)


def test_an_interrupt_ends_all_ranks(tmp_path):
    run_ranks(add_up, 2)  # the fork server is up

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    waiter = threading.Thread(target=interrupt)
    waiter.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(real_ranks.start_another_and_wait, 2, str(tmp_path))
    waiter.join()
    started = list(tmp_path.iterdir())
    assert len(started) == 2
    deadline = time.monotonic() + 10
    while lives := [path.name for path in started if is_alive(int(path.name))]:
        assert time.monotonic() < deadline, lives
        time.sleep(0.05)


@pytest.mark.parametrize("number, program", [(signal.SIGINT, "wait"), (signal.SIGKILL, "hold")])
def test_ranks_do_not_outlive_their_parent(tmp_path, number, program):
    """Ctrl-C in a terminal reaches parent, fork server and ranks; a kernel that is killed can end nothing itself.

    Nor can a rank's own thread, where another one holds the interpreter.
    """
    if program == "hold" and sys.platform != "linux":
        program = "wait"
    code = (
        "import sys, real_ranks\nfrom helpers import run_ranks\n"
        f"run_ranks(real_ranks.write_pid_and_{program}, 2, sys.argv[1])"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path.parent)}
    (tmp_path / "ranks").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "ranks")]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(pids := list((tmp_path / "ranks").iterdir())) < 2:
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        ranks = [psutil.Process(int(path.name)) for path in pids]
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)
        else:
            parent.kill()
        errors = parent.communicate(timeout=30)[1].decode()
    finally:
        if parent.poll() is None:
            parent.kill()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    "program, world_size, args, options, words",
    [
        (add_up, 0, (), {}, "1 이상의 정수"),
        (add_up, -1, (), {}, "1 이상의 정수"),
        (add_up, 3.5, (), {}, "1 이상의 정수"),
        (add_up, True, (), {}, "1 이상의 정수"),
        (add_up, "2", (), {}, "1 이상의 정수"),
        (add_up, MAX_RANKS + 1, (), {}, "16개까지"),
        (lambda: 1, 2, (), {}, "노트북 칸이나 함수 안에서 만든"),
        ("add_up", 2, (), {}, "노트북 칸이나 함수 안에서 만든"),
        (real_ranks.who, 2, (lambda: 1,), {}, "넘기는 값을 다른 프로세스로"),
        (add_up, 2, (), {"time_limit": 0}, "0보다 큰 초"),
        (add_up, 2, (), {"time_limit": True}, "0보다 큰 초"),
        (add_up, 2, (), {"time_limit": float("nan")}, "0보다 큰 초"),
    ],
)
def test_what_cannot_be_started_is_said_before_anything_starts(program, world_size, args, options, words, monkeypatch):
    monkeypatch.setattr(launcher, "_Job", None)
    with pytest.raises(ValueError, match=words):
        run_ranks(program, world_size, *args, **options)


def test_a_function_of_a_notebook_cell_is_refused():
    names = {"__name__": "__main__"}
    exec("def cell():\n    return 1", names)
    with pytest.raises(ValueError, match=r"\.py 파일에 두고 import"):
        run_ranks(names["cell"], 2)


# -- data parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_data_parallel_equals_one_process(n):
    alone, runs = one_process(3), run_ranks(data_parallel, n, 3)
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=1e-12)
        assert torch.allclose(run.gradients, alone.gradients, rtol=0, atol=1e-12)
        assert run.held == alone.held and run.rows == 64 // n
        assert run.sent == ({"allreduce": len(alone.gradients)})
    assert alone.losses[-1] < alone.losses[0]
    assert f"{n} × {64 // n}" in draw_data_parallel(runs).alt


def test_unequal_shares_are_refused():
    with pytest.raises(RankError, match="64행을 rank 3개가 똑같이 나눌 수 없다"):
        run_ranks(data_parallel, 3)
    with pytest.raises(RankError, match="steps=0"):
        run_ranks(data_parallel, 2, 0)


# -- ZeRO ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    """The losses of one process with all rows."""
    return run_ranks(zero, 1, 0)[0]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("n", [2, 4])
def test_zero(n, stage, reference):
    runs = run_ranks(zero, n, stage)
    psi = sum(p.numel() for p in tiny_model(torch.float64).parameters())
    paper = paper_bytes(psi, Layout(n, stage))
    for run in runs:
        assert run.parameters == psi and run.flops == reference.flops // n
        assert run.losses == pytest.approx(reference.losses, rel=1e-9)
        assert torch.allclose(run.gradients, reference.gradients, rtol=0, atol=1e-9)
        assert run.travelled == (2, 3, 2, 3)[stage] * psi
        if stage in (0, 3):
            assert run.total == paper
        elif stage == 2:
            assert run.total == paper + 2 * psi // n and run.held["gathered"] == 2 * psi
    if stage == 1:
        assert sum(run.held["optimizer"] for run in runs) == 12 * psi
        assert all(run.held["parameters"] == run.held["gradients"] == 2 * psi for run in runs)
        assert max(run.total for run in runs) >= paper


def test_bad_stages():
    with pytest.raises(RankError, match="stage=4: 0, 1, 2, 3"):
        run_ranks(zero, 2, 4)
    with pytest.raises(RankError, match="8행을 rank 3개가"):
        run_ranks(zero, 3, 3)


# -- FSDP2 as one writes it ----------------------------------------------------------------------------------------


def tiny_parameters() -> int:
    return sum(p.numel() for p in tiny_model(torch.float32).parameters())


@pytest.mark.parametrize("replicas, shards", [(1, 4), (2, 2)])
def test_fsdp2_holds_fp32_shards(replicas, shards):
    psi = tiny_parameters()
    for run in run_ranks(fsdp2, 4, replicas):
        assert run.held == {
            "parameters": 4 * psi // shards,
            "gradients": 4 * psi // shards,
            "optimizer": 8 * psi // shards,
        }
        # What is wrapped last (embeddings and head) stays gathered until the backward, which begins with it.
        assert psi < run.sent["allgather_base"] < 2 * psi and run.sent["reduce_scatter_base"] == psi
        assert run.sent["allreduce"] == (psi // shards if replicas > 1 else 0)  # between the replicas: a shard each


def test_replicas_of_shards_are_the_same_training():
    losses = {replicas: run_ranks(fsdp2, 4, replicas)[0].loss for replicas in (1, 2, 4)}
    assert losses[2] == pytest.approx(losses[1], rel=1e-6) and losses[4] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_gradients_that_wait_are_whole_however_many_ranks(n):
    psi = tiny_parameters()
    waiting, sent = {}, {}
    for sync_each in (True, False):
        run = run_ranks(fsdp2, n, 1, 4, sync_each)[0]
        waiting[sync_each], sent[sync_each] = run.unsharded, run.sent["reduce_scatter_base"]
    assert waiting == {True: 0, False: 4 * psi}  # in fp32, as they are reduced
    assert sent == {True: 4 * psi, False: psi}


# -- pictures ------------------------------------------------------------------------------------------------------


def test_a_picture_of_what_is_split():
    assert "문장 16개" in draw_data_parallel(run_ranks(data_parallel, 4)).svg()
