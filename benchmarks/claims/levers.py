"""The programs of docs/levers.md on a card: benchmarks/levers' own, with what stands in for a card taken out again."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.levers.catalogue import BASES, LEVERS
from benchmarks.levers.kernels import triton_launches_nothing
from benchmarks.levers.program import Program

from .side import ON_CARD, built, counters, error_of, free_bytes, keep_trace, path_of, say, settle

STEPS = 3  # the second is the first with the whole optimizer state; one more where the scaler skipped the first
NOT_HERE = {
    "moe-lora": "61 GB of weights: not in a payload of seconds",
}


def run(base: str, wanted: tuple[str, ...], trace: bool = False) -> None:
    """The program without a lever and with each of these, one after another in a process."""
    for name in wanted:
        lever = next((one for one in LEVERS if one.key == name and base in one.bases), None)
        if name != "base" and lever is None:
            say(f"{base} {name}", error="no such lever of this base")
            continue
        if lever and (missing := lever.missing()):
            say(f"{base} {name}", error=f"{missing} not installed")
            continue
        program = lever.of(base) if lever else BASES[base]
        one(base, name, program, trace)


def one(base: str, name: str, program: Program, trace: bool = False) -> None:
    settle()
    row: dict[str, Any] = {}
    started = time.perf_counter()
    stands_in = program.around is triton_launches_nothing
    if base.startswith("8b") and program.load is BASES[base].load:  # 16 GB of files are not written: built on the card
        program = replace(program, load=lambda program: built(program.model_id, program.weights, program.attention))
    around = contextlib.nullcontext if ON_CARD and stands_in else program.around
    program = replace(program, model_id=path_of(program.model_id) if not base.startswith("8b") else program.model_id)
    try:
        with around():
            row |= _train(program, trace, f"{base}-{name}")
    except Exception as error:
        row["error"] = error_of(error)
        error.__traceback__ = None
    say(f"{base} {name}", **row, **counters(), seconds_all=round(time.perf_counter() - started, 2))
    settle()


def _train(program: Program, trace: bool, name: str) -> dict[str, Any]:
    """As benchmarks/levers/program.py trains, with each phase of each step told apart."""
    model = program.load(program)
    if program.adapt is not None:
        model = program.adapt(model)
    model.train()
    program.prepare(model)
    optimizer = program.optimizer(model)
    scaler = torch.amp.GradScaler("cuda", enabled=program.autocast == torch.float16, init_scale=256.0)
    settle()
    found: dict[str, Any] = {"start": torch.cuda.memory_allocated(), "phases": [], "step_seconds": []}
    free, total = free_bytes()
    found["outside_before"] = total - free - torch.cuda.memory_reserved()

    def ended(phase: str) -> None:
        torch.cuda.synchronize()
        found["phases"].append([phase, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(),
                                torch.cuda.max_memory_reserved()])  # fmt: skip
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        batch = {key: tensor.cuda() for key, tensor in program.data(program).items()}
        with program.saving(model), torch.autocast("cuda", program.autocast, enabled=program.autocast is not None):
            loss = program.loss(model, batch)
        ended("forward")
        if hasattr(optimizer, "fused_backward"):
            optimizer.fused_backward(loss, 1e-5)
            ended("backward")
        else:
            # what steps in the backward, or is no optimizer of PyTorch, cannot be stepped by the scaler
            scaled = scaler.is_enabled() and isinstance(optimizer, torch.optim.Optimizer)
            (scaler.scale(loss) if scaled else loss).backward()
            ended("backward")
            scaler.step(optimizer) if scaled else optimizer.step()
            scaler.update() if scaled else None
        optimizer.zero_grad()
        ended("step")

    torch.cuda.reset_peak_memory_stats()
    if trace:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
    for _ in range(STEPS):
        started = time.perf_counter()
        step()
        found["step_seconds"].append(round(time.perf_counter() - started, 4))
    found["scale"] = scaler.get_scale() if scaler.is_enabled() else None
    if trace:
        found["trace"] = keep_trace(name)
    free, total = free_bytes()
    found["outside_after"] = total - free - torch.cuda.memory_reserved()
    found["most"] = max(found["phases"], key=lambda one: one[1])
    return found
