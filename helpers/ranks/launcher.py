"""Start N processes that train together, and bring their results, or the first one's error, back."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from virtual_gpu import language
from virtual_gpu.language import set_language, tr
from virtual_gpu.units import positive_int

from ..watched import telling

MAX_RANKS = 16  # processes with PyTorch and transformers on one machine: more is a typing mistake
QUIET_S = 1  # a launch that takes no longer says nothing
LATE_S = 10  # so long after its time limit a rank ends by itself, whatever it does
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_S = 0.5  # one rank's failure makes the others fail; wait for those who fail with it, then look who was first
# Imported once, by the server that forks the ranks: from the second launch on, a rank starts in a fraction of a second.
PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "helpers.chapters.c6_distributed.ranks",
    "helpers.chapters.c6_distributed.model_parallel",
]


class RankError(RuntimeError):
    """A rank raised, was killed or did not finish. `rank`: the first of them."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class _Job:
    world_size: int
    folder: str
    backend: str
    language: str
    time_limit: float


def run_ranks(program: Callable[..., Any], world_size: int, *args: Any, time_limit: float = 120.0) -> list[Any]:
    """Run program(*args) in `world_size` processes of one process group; what each returned, by rank.

    gloo on CPUs, nccl where there are as many GPUs as ranks; one thread a rank; what a rank prints is not shown. The
    program is a function of a module, and what it takes and returns can be pickled. time_limit in seconds.
    Whoever watches is told how many have ended (see `watched`).
    ValueError for what cannot be started; RankError with the rank's traceback if it raises, is killed or takes too
    long. No rank and no file is left, also after an error or an interrupt; the server that forks the ranks stays
    until Python ends.
    """
    world_size = _check(program, world_size, args, time_limit)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    backend = "nccl" if torch.cuda.device_count() >= world_size else "gloo"
    with tempfile.TemporaryDirectory(prefix="course-ranks-") as folder:
        job = _Job(world_size, folder, backend, language._current, time_limit)
        _start_server(context)
        ranks = [context.Process(target=_rank, args=(i, job, program, args), daemon=True) for i in range(world_size)]
        try:
            # An interrupt between the birth of a process and its place in our list would lose it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for rank in ranks:
                    rank.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with telling() as told:
                _wait(ranks, job, told)
            return [pickle.loads(_file(folder, i, "result").read_bytes()) for i in range(world_size)]
        finally:
            for rank in (rank for rank in ranks if rank.pid):
                rank.kill()
                rank.join()
                with contextlib.suppress(ProcessLookupError):  # it has left nothing behind
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.close()


def _start_server(context: Any) -> None:
    """Let the server that forks the ranks do its imports, before Ctrl+C has to wait for the ranks' births."""
    from multiprocessing.forkserver import _forkserver as server

    if server._forkserver_pid is None:
        with telling() as told:
            told(
                tr(
                    ko="처음 한 번, rank를 만들 프로세스가 PyTorch를 import한다",
                    en="the process that makes the ranks imports PyTorch, once",
                )
            )
            nothing = context.Process(target=int, daemon=True)
            nothing.start()
            nothing.join()


def rank_device() -> torch.device:
    """Where this rank computes: its own GPU under nccl, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _check(program: Callable[..., Any], world_size: int, args: Sequence[Any], time_limit: float) -> int:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(
            tr(
                ko="이 운영체제(Windows)에서는 rank를 띄울 수 없다. WSL이나 Colab에서 실행한다.",
                en="Ranks cannot be started on this system (Windows). Use WSL or Colab.",
            )
        )
    world_size = positive_int(world_size, tr(ko="rank 수", en="number of ranks"))
    if world_size > MAX_RANKS:
        raise ValueError(
            tr(
                ko=f"rank 수={world_size}: 한 컴퓨터에서 실제로 띄우는 것은 {MAX_RANKS}개까지다. 더 많은 rank는 "
                "shard_ledger로 센다.",
                en=f"number of ranks={world_size}: at most {MAX_RANKS} are really started on one machine. "
                "shard_ledger counts for more.",
            )
        )
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not 0 < time_limit < 86400:
        raise ValueError(
            tr(
                ko=f"time_limit={time_limit!r}: 0보다 큰 초여야 한다(하루 미만).",
                en=f"time_limit={time_limit!r}: seconds, more than 0 and less than a day.",
            )
        )
    name = getattr(program, "__qualname__", "")
    if not callable(program) or "<" in name or getattr(program, "__module__", None) == "__main__":
        raise ValueError(
            tr(
                ko=f"{name or program!r}: 다른 프로세스로 보낼 수 없다. 노트북 칸이나 함수 안에서 만든 함수는 pickle로 "
                "보내지지 않는다. 함수를 .py 파일에 두고 import해서 넘긴다.",
                en=f"{name or program!r} cannot be sent to another process: pickle does not send a function made in a "
                "notebook cell or in a function. Put it in a .py file and import it.",
            )
        )
    try:
        pickle.dumps((program, args))
    except Exception as error:  # whatever pickle, or the object's own code, raises
        raise ValueError(
            tr(
                ko=f"{name}에 넘기는 값을 다른 프로세스로 보낼 수 없다: {error}",
                en=f"What {name} is given cannot be sent to another process: {error}",
            )
        ) from error
    return world_size


# -- in the rank ---------------------------------------------------------------------------------------------------


def _rank(rank: int, job: _Job, program: Callable[..., Any], args: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends its ranks
    log = os.open(_file(job.folder, rank, "log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.setpgid(0, 0)  # what the rank starts belongs to its group, and ends with it
    _end_with_the_server()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # where a rank hangs
    # For a rank that never gives its interpreter away while nobody is left to end it; this one takes no interpreter.
    faulthandler.dump_traceback_later(job.time_limit + LATE_S, exit=True, file=2)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        set_language(job.language)
        torch.set_num_threads(1)
        if job.backend == "nccl":
            torch.cuda.set_device(rank)
        store = f"file://{job.folder}/store"
        patience = timedelta(seconds=job.time_limit)
        dist.init_process_group(job.backend, init_method=store, rank=rank, world_size=job.world_size, timeout=patience)
        result = pickle.dumps(program(*args))
        _file(job.folder, rank, "result").write_bytes(result)
        dist.barrier()  # who leaves first takes the connections away from the others
        dist.destroy_process_group()
    except BaseException as error:  # also SystemExit: whatever ended the program is what the parent reports
        tail = error.__traceback__.tb_next or error.__traceback__
        text = "".join(traceback.format_exception(type(error), error, tail))
        unfinished = _file(job.folder, rank, "error.part")
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        unfinished.rename(_file(job.folder, rank, "error"))
        os._exit(1)
    # All is written. Now and then a thread of PyTorch's aborts the interpreter at its exit ("terminate called without
    # an active exception"), after destroy_process_group too.
    os._exit(0)


def _leave_with_parent() -> None:
    """A notebook's kernel that is killed cannot end its ranks."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def _end_with_the_server() -> None:
    """On Linux the kernel ends this process with the server that forked it, which ends with the notebook's kernel.

    Unlike our thread that waits for that, it needs no interpreter, and ends a process that is stopped as well.
    """
    if sys.platform == "linux":
        import ctypes
        from multiprocessing.forkserver import _forkserver as server

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The server ends when nobody can ask it for a process any more. Python lets each process that it makes ask too:
        # ranks that hold the interpreter would keep the server, and themselves.
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = None


# -- in the parent -------------------------------------------------------------------------------------------------


def _wait(ranks: Sequence[Any], job: _Job, told: Callable[[str], None]) -> None:
    began = time.monotonic()
    deadline, quiet_until = began + job.time_limit, began + QUIET_S
    while running := [rank for rank in ranks if rank.exitcode is None]:
        if (now := time.monotonic()) >= quiet_until:
            ended, n = len(ranks) - len(running), len(ranks)
            told(
                tr(
                    ko=f"rank {n}개 가운데 {ended}개가 끝났다. 길어야 {job.time_limit:g}초",
                    en=f"{ended} of {n} ranks have ended; {job.time_limit:g} s at most",
                )
            )
        until = quiet_until if now < quiet_until < deadline else deadline
        ready = connection.wait([rank.sentinel for rank in running], timeout=max(until - now, 0))
        if not ready and until == deadline:
            raise _too_late(ranks, job)
        if any(rank.exitcode for rank in ranks):
            end = time.monotonic() + GRACE_S
            while (left := end - time.monotonic()) > 0 and any(rank.exitcode is None for rank in ranks):
                connection.wait([rank.sentinel for rank in ranks if rank.exitcode is None], timeout=left)
            break
    if any(rank.exitcode or not _file(job.folder, i, "result").exists() for i, rank in enumerate(ranks)):
        raise _failure(ranks, job)


def _failure(ranks: Sequence[Any], job: _Job) -> RankError:
    of = tr(ko=f"rank {job.world_size}개 가운데", en=f"of {job.world_size} ranks,")
    for i, rank in enumerate(ranks):
        if (rank.exitcode or 0) < 0:
            name = signal.Signals(-rank.exitcode).name
            reason = tr(ko=f"{of} rank {i}이(가) 신호 {name}로 끝났다.", en=f"{of} rank {i} was ended by {name}.")
            if name == "SIGKILL":
                reason = tr(
                    ko=f"{of} rank {i}을(를) 시스템이 끝냈다({name}). 메모리가 모자랐을 수 있다. "
                    "rank 수나 모델을 줄인다.",
                    en=f"{of} rank {i} was ended by the system ({name}): perhaps there was not enough memory. "
                    "Use fewer ranks or a smaller model.",
                )
            return RankError(_with(reason, _tail(job, i)), i)
    for i, rank in enumerate(ranks):  # the others' errors, if any, say that this one was gone
        if rank.exitcode is not None and not any(_file(job.folder, i, kind).exists() for kind in ("result", "error")):
            code = rank.exitcode
            reason = tr(
                ko=f"{of} rank {i}이(가) 결과를 남기지 않고 코드 {code}로 끝났다.",
                en=f"{of} rank {i} left with code {code} and no result.",
            )
            return RankError(_with(reason, _tail(job, i)), i)
    errors = [(i, _file(job.folder, i, "error")) for i, rank in enumerate(ranks)]
    _, i, path = min((path.stat().st_mtime_ns, i, path) for i, path in errors if path.exists())
    text = path.read_text(encoding="utf-8").rstrip()
    last = text.splitlines()[-1]
    reason = tr(ko=f"{of} rank {i}에서 오류가 났다: {last}", en=f"{of} rank {i} raised {last}")
    return RankError(_with(reason, text), i)


def _too_late(ranks: Sequence[Any], job: _Job) -> RankError:
    late = [i for i, rank in enumerate(ranks) if rank.exitcode is None]
    for i in late:
        os.kill(ranks[i].pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    names = ", ".join(map(str, late))
    reason = tr(
        ko=f"rank {names}이(가) {job.time_limit:g}초 안에 끝나지 않아 모두 끝냈다. 한 rank만 집합 통신을 부르면 "
        "나머지를 끝없이 기다린다. rank마다 멈춘 곳:",
        en=f"rank {names} did not finish in {job.time_limit:g} s, so all were ended. A rank that alone calls a "
        "collective waits for the others for ever. Where each stood:",
    )
    places = [f"rank {i}:\n" + "\n".join(_tail(job, i).splitlines()[-12:][:6]) for i in late]
    return RankError(_with(reason, "\n".join(places)), late[0])


def _tail(job: _Job, rank: int, lines: int = 12) -> str:
    log = _file(job.folder, rank, "log")
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def _with(reason: str, more: str) -> str:
    return f"{reason}\n\n{more}" if more else reason


def _file(folder: str, rank: int, kind: str) -> Path:
    return Path(folder, f"{rank}.{kind}")
