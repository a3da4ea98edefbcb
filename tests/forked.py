"""Programs in processes of their own, one or the ranks of a launcher, forked from one that has imported all they need.

A launcher and two ranks take ten seconds to import the same again; that a launcher starts them, real launches show.
"""

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from helpers.ranks.launcher import PRELOAD


def run_forked(
    program: Sequence[str],
    ranks: int = 1,
    environment: Mapping[str, str] = os.environ,
    port: str = "0",
    *,
    folder: str | Path = ".",
    timeout: float = 300,
) -> tuple[int, str, str]:
    """(status, stdout, stderr) of `ranks` processes that run the file program[0] in `folder`, the rest as arguments.

    "-m" and a module's name run that, as Python's own command line has it.

    As torchrun does, each finds its rank in the environment, and all end with the first that fails. A single one is
    started plainly. RuntimeError where they take longer than `timeout` seconds, with where each of them then stood.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "accelerate", "transformers.models.llama.modeling_llama"])
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as written:
        processes = []
        for rank in range(ranks):
            own = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            names = str(Path(folder).resolve()), str(Path(written, str(rank)))
            args = list(program), dict(environment) | own, *names, 0.9 * timeout
            processes.append(context.Process(target=_run, args=args, daemon=True))
        try:
            for process in processes:
                process.start()
            while (running := [p for p in processes if p.exitcode is None]) and not any(p.exitcode for p in processes):
                if not connection.wait([process.sentinel for process in running], timeout=timeout):
                    raise RuntimeError(f"{program} took longer than {timeout} s\n{_text(written, 'err')}")
            status = next((process.exitcode for process in processes if process.exitcode), 0)
        finally:
            for process in processes:
                process.kill()
                process.join()
        out, err = (_text(written, name) for name in ("out", "err"))
    return status, out, err


def _text(written: str, name: str) -> str:
    """What all of them have said so far."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(Path(written).glob(f"*.{name}")))


# Below those that the system gives to whoever asks for any: one that is free now would be another's before the ranks
# have come, and they would wait for each other at two doors. Each process begins elsewhere.
_FIRST, _MANY = 20_000, 10_000
_PORTS = map(lambda n: _FIRST + (97 * os.getpid() + n) % _MANY, itertools.count())


def free_port() -> str:
    """A port at which the ranks of one run meet."""
    for port in _PORTS:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)


def _run(program: Sequence[str], environment: Mapping[str, str], folder: str, written: str, late: float) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{written}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    faulthandler.dump_traceback_later(late, file=2)  # seconds: who hangs says where
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if program[0] == "-m":
        sys.argv = list(program[1:])
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        runpy.run_path(program[0], run_name="__main__")
    sys.stdout.flush()
