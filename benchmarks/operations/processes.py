"""Child processes that share the cases; each is started anew behind a case that ended it or took too long."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

import torch

from benchmarks.children import ROOT
from virtual_gpu.terminal import tell

from .cases import PARTS
from .cases.run import Case
from .recorders import Card, Virtual, record_case
from .verdicts import judge, read

SECONDS_TO_START = 120.0

_STACKS = 10_000_000  # added to the number of a case that is recorded once more with stacks


def _warm() -> None:
    """The workspaces of matrix products, in this thread and in autograd's."""
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()


def child(args: argparse.Namespace) -> None:
    """Run a share of the cases and print their rows; those from `--start` on, counted over all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.disable()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not a row

    def emit(row: dict[str, Any]) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    with contextlib.ExitStack() as stack:
        if args.gpu:
            from virtual_gpu import cuda

            gpu = stack.enter_context(cuda(args.gpu))
        elif args.fraction is not None:
            torch.cuda.set_per_process_memory_fraction(args.fraction)
        recorder = Virtual(gpu) if args.gpu and not args.as_card else Card()
        differing = _share(args, recorder, emit)
        if differing:
            recorder = Card(stacks=True)
        for number, case in differing:
            emit({"begin": number + _STACKS, "case": case[0]})
            _warm()
            row = record_case(case, recorder)
            emit({**row, "case": f"{case[0]} [stacks]", "number": number + _STACKS})
    emit({"done": args.index})


def _cases(args: argparse.Namespace) -> Iterator[tuple[int, Case]]:
    chosen = itertools.chain.from_iterable(PARTS[part]() for part in args.parts)
    wanted = (case for case in chosen if args.only is None or args.only in case[0])
    return itertools.islice(enumerate(wanted), args.index, None, args.of)


def _share(args: argparse.Namespace, recorder: Virtual | Card, emit: Any) -> list[tuple[int, Case]]:
    """Run and tell this child's cases; those that differ from the record in `--against`."""
    virtual = read(args.against) if args.against else {}
    differing = []
    for number, case in _cases(args):
        if number < args.start:
            continue
        emit({"begin": number, "case": case[0]})
        _warm()
        row = record_case(case, recorder)
        emit({**row, "number": number})
        if not args.gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # nothing works any more in this process
                emit({"lost": number})
                os._exit(3)
        if case[0] in virtual and judge(virtual[case[0]], row)[0] not in ("equal", "both raised", "card raised"):
            differing.append((number, case))
        if number // args.of % 40 == 0:
            gc.collect()
    return differing


class Supervisor:
    """Children that share the cases; each is started anew behind a case that ended it."""

    def __init__(self, args: argparse.Namespace, file: TextIO):
        self.args, self.file, self.lock = args, file, threading.Lock()
        self.end = time.monotonic() + args.seconds
        self.rows = Counter()

    def run(self) -> None:
        """All of it, until the end or the time is over."""
        threads = [
            threading.Thread(target=self._shard, args=(index,), daemon=True) for index in range(self.args.shards)
        ]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        tell(f"{self.args.shards} processes share the cases … Ctrl+C stops")
        while any(thread.is_alive() for thread in threads):
            time.sleep(1)
            if int(time.monotonic() - started) % 20 == 0:
                print(f"{time.monotonic() - started:.0f} s: {dict(self.rows)}", flush=True)
                with self.lock:
                    self.file.flush()
        self.write({"ended": round(time.monotonic() - started, 1), "rows": dict(self.rows)})

    def write(self, row: dict[str, Any]) -> None:
        """A line of the record."""
        with self.lock:
            self.file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def _shard(self, index: int) -> None:
        start, failures = 0, 0
        while time.monotonic() < self.end and failures < 60:
            last, why = self._process(index, start)
            if why is None:
                return
            failures += 1
            if last is None:  # it did not even begin
                self.write({"failed": index, "error": why})
                if failures > 3:
                    return
                continue
            start = last + 1

    def _process(self, index: int, start: int) -> tuple[int | None, str | None]:
        """(the case in which it ended, why); (None, None) where all is done."""
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                self._command(index, start),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=_environment(bool(self.args.gpu)),
            )
            last, name, why = self._read(process)
            if why is None:
                return None, None
            errors.seek(0)
            said = errors.read()[-500:]
        if name:
            self.write({"case": name, "number": last, "error": why, "stderr": said[-300:]})
            self.rows["ended their process"] += 1
        return last, why if last is not None else f"{why}: {said}"

    def _command(self, index: int, start: int) -> list[str]:
        args = self.args
        numbers = {"--index": index, "--of": args.shards, "--start": start}
        told = {"--gpu": args.gpu, "--only": args.only, "--against": args.against, "--fraction": args.fraction}
        command = [sys.executable, "-m", "benchmarks.operations", "child", "--parts", *args.parts]
        for option, value in (numbers | told).items():
            command += [] if value is None else [option, str(value)]
        return [*command, "--as-card"] if args.as_card else command

    def _read(self, process: subprocess.Popen) -> tuple[int | None, str, str | None]:
        """(the last case that it began, its name where it did not end, why the process ended; None: all is done)."""
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True).start()
        last, name, patience = None, "", SECONDS_TO_START
        while True:
            try:
                line = lines.get(timeout=max(0.1, min(patience, self.end - time.monotonic())))
            except queue.Empty:
                late = time.monotonic() >= self.end
                process.kill()
                process.wait()
                return last, name, "the whole run was out of time" if late else f"no end after {patience:.0f} s"
            patience = self.args.seconds_a_case
            if line is None:
                process.wait()
                return last, name, f"its process ended with {process.returncode}"
            row = json.loads(line)
            if "done" in row:
                process.wait()
                return last, "", None
            if "begin" in row:
                last, name = row["begin"], row["case"]
            elif "lost" in row:
                self.write({"lost": row["lost"]})
            else:
                self.rows["with an error" if "error" in row else "rows"] += 1
                self.write(row)
                name = ""


def _environment(virtual: bool) -> dict[str, str]:
    added = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
    added |= {"CUDA_VISIBLE_DEVICES": ""} if virtual else {"TORCH_SYMBOLIZE_MODE": "dladdr"}
    return {**os.environ, **added}


def _pass_on(pipe: Any, lines: queue.Queue) -> None:
    for line in pipe:
        if line.startswith("{"):
            lines.put(line)
    lines.put(None)
