"""Running a program again with one thing changed: what would make room, and the largest value that fits.

Each run is a process of its own, so that nothing is left of the one before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..allocator_settings import VARIABLES, AllocatorSettings
from ..errors import WrongValue
from ..language import tr
from ..trace.saved import Saved, read
from .report import FAILED, FITS

# What programs call the samples of one forward pass.
_BATCH_SIZES = (
    "per_device_train_batch_size", "train_batch_size", "batch_size", "micro_batch_size", "batch-size",
    "train-batch-size", "micro-batch-size",
)  # fmt: skip
_OF_TRAINERS = "per_device_train_batch_size"  # who has it has gradient_checkpointing (transformers' TrainingArguments)


@dataclass(frozen=True)
class Run:
    """What was changed, and the report of the run, as `Report.json` has it."""

    change: str
    report: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """What a report keeps of it."""
        kept = ("status", "judgement", "allocated", "reserved", "seconds")
        return {"change": self.change, **{name: self.report[name] for name in kept}}

    @property
    def fits(self) -> bool:
        """Whether it ran through."""
        return self.report["status"] == FITS


def run_again(
    change: str, options: Sequence[str], command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Run:
    """Run `virtual-gpu run` with these options and this program; what the program prints is dropped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        program = [sys.executable, "-m", "virtual_gpu", "run", "--no-advise", "--report", str(path), *options]
        done = subprocess.run(
            [*program, *command], env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False,
        )  # fmt: skip
        if not path.exists():
            said = done.stderr.strip().splitlines() or [tr(ko="보고서를 남기지 않았다.", en="left no report.")]
            raise WrongValue(f"{' '.join(command)}: {said[-1]}")
        return Run(change, json.loads(path.read_text(encoding="utf-8")))


def saved_without(rule: str, options: Sequence[str], command: Sequence[str]) -> Saved:
    """The program's run on a virtual GPU that leaves out one of CUDA's rules."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        run_again(rule, [f"--without={rule}", "--save", str(path), *options], command)
        return read(path)


def advice(options: Sequence[str], command: Sequence[str], told: Callable[[str], None]) -> list[Run]:
    """Runs with one thing changed, the smallest change first, until one fits: what was tried, the last one last.

    told: called with each change before it is tried.
    """
    tried = []
    for change, changed, environment in _changes(command):
        told(change)
        tried.append(run_again(change, options, changed, environment))
        if tried[-1].fits:
            break
    return tried


def _changes(command: Sequence[str]) -> list[tuple[str, list[str], dict[str, str]]]:
    """(in words, the command, the environment) of what can be changed from outside, results as they were first."""
    changes: list[tuple[str, list[str], dict[str, str]]] = []
    if not AllocatorSettings.from_environment().expandable_segments:
        before = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
        setting = ",".join(filter(None, [before, "expandable_segments:True"]))
        changes.append((f"{VARIABLES[0]}={setting}", list(command), dict.fromkeys(VARIABLES, setting)))
    names = {word.lstrip("-").partition("=")[0] for word in command[1:]}
    if _OF_TRAINERS in names and "gradient_checkpointing" not in names:
        words = ["--gradient_checkpointing", "True"]
        changes.append((" ".join(words), [*command, *words], {}))
    name = next((name for name in _BATCH_SIZES if name in names), None)
    size = None if name is None else value_of(command, name)
    while size is not None and size > 1:
        size //= 2
        changes.append((f"{name} {size}", with_value(command, name, size), {}))
    return changes


def value_of(command: Sequence[str], argument: str) -> int | None:
    """The whole number that a program's argument has; None where it has none, or something else."""
    place, text = _find(command, argument)
    return int(text) if place is not None and text.isdigit() else None


def with_value(command: Sequence[str], argument: str, value: int) -> list[str]:
    """The command with another value of an argument, written as it was; appended where it was not there."""
    changed, (place, _) = list(command), _find(command, argument)
    if place is None:
        dashes = "" if argument.startswith("-") else "--"
        return [*changed, f"{dashes}{argument}", str(value)]
    head, equals, _ = changed[place].partition("=")
    changed[place if equals else place + 1] = f"{head}={value}" if equals else str(value)
    return changed


def _find(command: Sequence[str], argument: str) -> tuple[int | None, str]:
    for place, word in enumerate(command[1:], 1):
        name, equals, value = word.partition("=")
        if name.lstrip("-") == argument.lstrip("-"):
            return place, value if equals else (command[place + 1] if place + 1 < len(command) else "")
    return None, ""


def largest(
    argument: str, options: Sequence[str], command: Sequence[str], *, most: int = 2**20, told: Callable[[Run], None]
) -> Run | None:
    """The run with the largest value of one of the program's own arguments that fits; None where not even 1 does.

    From its value in the command (or 1) by doubling and then by halving the interval. told: called after each run.
    WrongValue where the program fails by itself.
    """

    def tried(value: int) -> Run:
        run = run_again(f"{argument} {value}", options, with_value(command, argument, value))
        told(run)
        if run.report["status"] == FAILED:
            raise WrongValue(
                tr(
                    ko=f"{run.change}: 프로그램이 스스로 실패했다: {run.report['error']}",
                    en=f"{run.change}: the program failed by itself: {run.report['error']}",
                )
            )
        return run

    value, best, low, high = value_of(command, argument) or 1, None, 0, None
    while high is None and value <= most:
        run = tried(value)
        if run.fits:
            best, low = run, value
            value *= 2
        else:
            high = value
    while high is not None and high - low > 1:
        middle = (low + high) // 2
        run = tried(middle)
        if run.fits:
            best, low = run, middle
        else:
            high = middle
    return best
