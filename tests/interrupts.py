"""Ctrl+C at random moments in every public function: no process ends, the state is right, the next answer is equal.

    python tests/interrupts.py --count 1000 --seed 0

Each interrupt has a fork of its own, which has everything imported and has answered once. It comes from outside, at a
moment of the call that is drawn at random; then the fork looks at all of its process (`process_state`) and asks again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import odd_inputs as odd
import torch
from process_state import code_state, differences, gpus_alive, process_state, stand_ins

import helpers
import virtual_gpu
from virtual_gpu.command import main
from virtual_gpu.doctor import diagnose, text
from virtual_gpu.models.configs import load_config
from virtual_gpu.program.runner import run as run_program
from virtual_gpu.step.flops import flops_of_config
from virtual_gpu.terminal import tell

RIGHT, BEFORE, WRONG = "right", "had answered before", "wrong"
LONGEST_S = 240  # no fork takes longer
LATE_S = 40  # an interrupt that comes later does not come
PROGRAM = """
import torch
with torch.random.fork_rng(devices=[]):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(4, 64).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def entries(folder: Path) -> dict[str, Callable[[], Any]]:
    """name → a public function with arguments, whose answer can be compared."""
    small = folder / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(odd.LLAMA), encoding="utf-8")
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    model = {"model_id": str(small), "sequence_length": 16}
    log = ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.74 GiB of which 1.06 GiB "
           "is free.\n" * 2000).encode()  # fmt: skip

    def bytes_of(report: Any) -> tuple:
        return report.peak_bytes, report.reserved_bytes, report.parameters_bytes, report.fits

    def in_a_block() -> int:
        with torch.random.fork_rng(devices=[]), virtual_gpu.cuda("T4") as device:
            layer = torch.nn.Linear(64, 64).cuda()
            for _ in range(30):
                layer(torch.ones(8, 64, device="cuda")).sum().backward()
            return device.max_memory_allocated()

    def out_of_memory() -> str:
        with virtual_gpu.cuda("1GiB, 8.6"):
            held = []
            try:
                while True:
                    held.append(torch.ones(2**22, device="cuda"))
            except torch.OutOfMemoryError as error:
                return str(error)

    def command(*words: str) -> tuple[int, str]:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
            status = main(words)
        if status == 130:  # what a shell expects of an interrupted program
            raise KeyboardInterrupt
        return status, out.getvalue()

    return {
        "predict": lambda: bytes_of(virtual_gpu.predict(str(small), gpu="T4", sequence_length=16)),
        "predict, LoRA, checkpointing": lambda: bytes_of(
            helpers.predict_memory(batch_size=1, peft="lora", gradient_checkpointing=True, gpu="T4", full=True, **model)
        ),
        "activation_budget": lambda: repr(virtual_gpu.activation_budget(str(small), gpu="L4", sequence_length=16)),
        "predict, QLoRA": lambda: bytes_of(
            helpers.predict_memory(batch_size=1, peft="qlora", gpu="T4", full=True, **model)
        ),
        "gpu_memory_experiment": lambda: bytes_of(helpers.gpu_memory_experiment(2, gpu="T4", **model)),
        "gpu_memory_sweep": lambda: [bytes_of(one) for one in
                                     helpers.gpu_memory_sweep(batch_size=[1, 2], gpu="T4", **model)],
        "flops": lambda: flops_of_config(load_config(str(small)), 1, 16, True),
        "largest_fitting": lambda: helpers.largest_fitting("sequence_length", multiple=64, gpu="T4", batch_size=1,
                                                           model_id=str(small)),
        "plan_training": lambda: repr(virtual_gpu.plan_training(str(small), length=16, batch=2, methods=("lora",))),
        "files of a plan": lambda: virtual_gpu.plan_training(str(small), length=16, batch=2,
                                                             methods=("lora",)).best.files(),
        "shard_ledger": lambda: repr(helpers.shard_ledger(str(small), 4)),
        "rank_step": lambda: repr(helpers.rank_step(str(small), 4, sequence_length=16)),
        "cuda": in_a_block,
        "cuda, out of memory": out_of_memory,
        "run_program": lambda: run_program(str(program), gpu="T4").allocated,
        "virtual-gpu run": lambda: command("run", "--gpu", "T4", str(program))[0],
        "virtual-gpu shards": lambda: command("shards", "--model", str(small), "--gpus", "2", "--length", "16"),
        "replay": lambda: [one.text() for one in
                           virtual_gpu.replay(sorted((odd.DATA / "traces").glob("*.json.gz"))[0])],
        "doctor": lambda: text(diagnose(log, False)),
        "load_model_and_tokenizer": lambda: helpers.count_parameters(
            helpers.load_model_and_tokenizer(str(small), "lora", gpu="T4")[0]
        ),
    }  # fmt: skip


def forget() -> None:
    """What is remembered of earlier predictions goes, so that each call does its work."""
    from virtual_gpu.shards import ledger, rank_step
    from virtual_gpu.step import flops, largest, predict

    for module in (ledger, rank_step, flops, largest, predict):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@dataclass
class Trial:
    """What came of the interrupts: entry → kinds of ends; and each wrong end once."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0


class Interrupts:
    """The trial: measures how long each entry takes, then interrupts it in forks."""

    def __init__(self, folder: Path, only: tuple[str, ...] = (), tells: bool = False):
        self.tells = tells
        self.entries = {name: call for name, call in entries(folder).items() if not only or name in only}
        self.answers, self.seconds, self.trial = {}, {}, Trial()
        for name, call in self.entries.items():
            self.answers[name] = self._quietly(call)
        for name, call in self.entries.items():
            forget()
            started = time.perf_counter()
            if self._quietly(call) != self.answers[name]:
                raise AssertionError(f"{name} answers otherwise the second time")
            self.seconds[name] = time.perf_counter() - started
        self.code = code_state()
        gc.collect()
        gc.freeze()  # a fork looks through what it has made itself

    @staticmethod
    def _quietly(call: Callable[[], Any]) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return call()

    def interrupt(self, name: str, share: float) -> str:
        """One interrupt, after this share of the time that the entry takes; how it ended."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            self._child(name, writer)  # never returns
        os.close(writer)
        try:
            os.read(reader, 1)  # it begins
            time.sleep(share * self.seconds[name])
            sent = time.perf_counter()
            os.kill(child, signal.SIGINT)
            ready, _, _ = select.select([reader], [], [], LONGEST_S)
            said = os.read(reader, 1) if ready else b""  # K: interrupted; A: it had answered; else the pickle begins
            if said == b"K":  # the interrupt has arrived where the caller hears of it
                self.trial.longest_s = max(self.trial.longest_s, time.perf_counter() - sent)
            rest = b"" if said in (b"K", b"A") else said
            while select.select([reader], [], [], LONGEST_S)[0] and (part := os.read(reader, 65536)):
                rest += part
        finally:
            with contextlib.suppress(ProcessLookupError):
                if not select.select([reader], [], [], 0)[0]:
                    os.kill(child, signal.SIGKILL)
            os.close(reader)
            _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) or not rest:
            how = f"the process ended: {signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status}"
            lines = [how]
        else:
            lines = pickle.loads(rest)
        end = WRONG if lines else RIGHT if said == b"K" else BEFORE
        self.trial.counts[name, end] += 1
        for line in lines:
            if f"{name}: {line}" not in self.trial.wrong and self.tells:
                print(f"WRONG {name} after {share:.3f} of {self.seconds[name]:.2f} s: {line}", flush=True)
            self.trial.wrong[f"{name}: {line}"] = self.trial.wrong.get(f"{name}: {line}", 0) + 1
        return end

    def _child(self, name: str, writer: int) -> None:
        """In the fork: begin, be interrupted, look, ask again, say what was wrong."""
        lines: list[str] = []
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        call = self.entries[name]
        forget()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before = process_state()
        try:
            answered = False
            try:
                os.write(writer, b"B")  # from here on the interrupt may come
                self._quietly(call)
                answered = True
                time.sleep(LATE_S)  # it was quicker: the interrupt comes here
                lines.append("the interrupt was lost")
            except KeyboardInterrupt:
                os.write(writer, b"A" if answered else b"K")
            virtual = [one.memory_allocated() for one in gpus_alive()]
            lines += [f"changed: {line}" for line in differences(before, process_state())]
            lines += [f"replaced: {line}" for line in differences(self.code, code_state())]
            lines += [f"a stand-in is left: {one}" for one in stand_ins()]
            lines += [f"bytes are left: {one}" for one in virtual if one]
            forget()
            answer = self._quietly(call)
            if answer != self.answers[name]:
                lines.append(f"the next answer: {answer!r:.200}")
        except BaseException as error:
            lines.append(f"raised {type(error).__name__}: {str(error)[:200]}")
        os.write(writer, pickle.dumps(lines))
        os._exit(0)


def run(count: int, seed: int = 0, only: tuple[str, ...] = (), told: Callable[[Trial], None] | None = None) -> Trial:
    """So many interrupts, one entry after the other in turn, at moments that the seed draws."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="interrupts-") as name:
        tempfile.tempdir = str(Path(name, "tmp"))
        os.mkdir(tempfile.tempdir)
        try:
            trial, chance = Interrupts(Path(name), only, told is not None), random.Random(seed)
            names = list(trial.entries)
            with contextlib.suppress(KeyboardInterrupt):  # of the trial itself: what it has found so far is told
                for number in range(count):
                    trial.interrupt(names[number % len(names)], chance.random())
                    if told is not None:
                        told(trial.trial)
        finally:
            tempfile.tempdir = before
    return trial.trial


def program() -> int:
    """The command; 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=())
    args = parser.parse_args()
    started = time.perf_counter()

    def told(trial: Trial) -> None:
        if (done := trial.counts.total()) % 20 == 0:
            print(f"{done}: {len(trial.wrong)} wrong, {time.perf_counter() - started:.0f} s", flush=True)
        else:
            tell(f"{done} of {args.count}")

    tell("each call is made twice, then interrupts come … Ctrl+C stops")
    trial = run(args.count, args.seed, tuple(args.only), told)
    for (name, end), count in sorted(trial.counts.items()):
        print(f"{count:5} {name}: {end}")
    print(f"{trial.counts.total()} interrupts; the longest wait {trial.longest_s:.2f} s")
    for line, count in trial.wrong.items():
        print(f"WRONG {count}× {line}")
    return 1 if trial.wrong else 0


if __name__ == "__main__":
    sys.exit(program())
