"""Running a program again with something changed: what would make room, and the largest value that fits.

Each run is a process of its own, so that nothing is left of the one before.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..allocator_settings import VARIABLES, AllocatorSettings
from ..errors import WrongValue
from ..language import tr
from ..trace.saved import Saved, read
from .changed import MADE, can_change
from .report import FAILED, FITS, OOM, Report
from .trained import Trained
from .watch import EVALUATION, LOADING, SAVING, STEP

# What programs call the samples of one forward pass.
_BATCH_SIZES = (
    "per_device_train_batch_size", "train_batch_size", "batch_size", "micro_batch_size", "batch-size",
    "train-batch-size", "micro-batch-size",
)  # fmt: skip
_OF_TRAINERS = "per_device_train_batch_size"  # who has it has gradient_checkpointing (transformers' TrainingArguments)
_OF_ACTIVATIONS = frozenset(
    ("checkpointing", "block_checkpointing", "fused_head", "smaller_batch", "repeat_kv")
)  # what only they make smaller

_ANOTHER_MODEL = frozenset(("sixteen_bits", "qlora", "lora"))  # fewer bytes for the weights or for what they train


@dataclass(frozen=True)
class Attempt:
    """A run with something changed: in words, the command and environment, and the changes made in the program."""

    change: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """What was changed, and the report of the run, as `Report.json` has it. changes: those made in the program."""

    change: str
    report: dict[str, Any]
    changes: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """What a report keeps of it. card: of several the one that ran out, else the one that `reserved` is of."""
        kept = ("status", "judgement", "allocated", "reserved", "seconds", "error", "growth")
        found = {"change": self.change, "changes": self.changes, **{name: self.report[name] for name in kept}}
        cards = [self.report, *self.report["other_cards"]]
        fullest = max(cards, key=lambda card: card["reserved"])
        ran_out = self.report["oom"] if self.report["status"] == OOM else None
        found |= {"reserved": fullest["reserved"], "card": (ran_out or {}).get("card", fullest["card"])}
        return found

    @property
    def fits(self) -> bool:
        """Whether it ran through."""
        return self.report["status"] == FITS


class Begun:
    """A run of `virtual-gpu run` with these options and this program, while this process does something else.

    What the program prints is dropped.
    """

    def __init__(
        self,
        change: str,
        options: Sequence[str],
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        changes: Sequence[str] = (),
    ):
        self._change, self._command, self._changes = change, command, tuple(changes)
        made = [text for name in changes for text in ("--change", name)]
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._report, self._said = (Path(self._folder.name) / name for name in ("report.json", "stderr"))
        program = [sys.executable, "-m", "virtual_gpu", "run", "--no-advise", "--report", str(self._report)]
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [*program, *made, *options, *command],
                env={**os.environ, "TMPDIR": self._folder.name, **(environment or {})},
                stdout=subprocess.DEVNULL, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def result(self) -> Run:
        """Wait for its end. WrongValue where it left no report."""
        try:
            self._process.wait()
            if not self._report.exists():
                said = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                last = said[-1] if said else tr(ko="보고서를 남기지 않았다.", en="left no report.")
                raise WrongValue(f"{' '.join(self._command)}: {last}")
            return Run(self._change, json.loads(self._report.read_text(encoding="utf-8")), self._changes)
        finally:
            self.stop()

    def stop(self) -> None:
        """End it and what it has begun, if it has not ended, and leave nothing of it."""
        if self._process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def run_again(
    change: str, options: Sequence[str], command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Run:
    """Run `virtual-gpu run` with these options and this program, to its end."""
    return Begun(change, options, command, environment).result()


def saved_without(rule: str, options: Sequence[str], command: Sequence[str]) -> Saved:
    """The program's run on a virtual GPU that leaves out one of CUDA's rules."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        run_again(rule, [f"--without={rule}", "--save", str(path), *options], command)
        return read(path)


def advice(
    options: Sequence[str],
    command: Sequence[str],
    first: Report,
    told: Callable[[str], None],
    most: int = 12,
    at_once: int = 1,
) -> Iterator[Run]:
    """Runs with something changed, the smallest change first, until one fits with certainty: what was tried.

    first: the run that ran out of memory. told: called with each change before it is tried. most: runs at most.
    at_once: runs that go on at a time; the next in the order are begun ahead, and ended where no longer wanted.
    """
    ladder, attempts, ahead = _Ladder(first, most), deque(_attempts(command, first)), {}

    def begin(attempt: Attempt) -> None:
        if attempt.change not in ahead:
            ahead[attempt.change] = Begun(
                attempt.change, options, attempt.command, attempt.environment, attempt.changes
            )  # fmt: skip

    try:
        while attempts:
            attempt = ladder.left_of(attempts.popleft())
            if attempt is None:
                continue
            told(attempt.change)
            ladder.take(attempt)
            wanted = [attempt, *filter(None, map(ladder.left_of, attempts))][:at_once]
            for change in ahead.keys() - {one.change for one in wanted}:
                ahead.pop(change).stop()
            for one in wanted:
                begin(one)
            run = ahead.pop(attempt.change).result()
            if run.report["status"] == FAILED and at_once > 1:  # two may have met at a folder or a port
                while ahead:
                    ahead.popitem()[1].stop()
                begin(attempt)
                run = ahead.pop(attempt.change).result()
            run = ladder.ended(run)
            if ladder.is_news(attempt, run):
                yield run
            if run.report["judgement"] == FITS:  # one that is tight is told, and the next one tried
                return
    finally:
        for going in ahead.values():
            going.stop()


class _Ladder:
    """What the runs so far say of those to come: what found no place, or fails, is left out of them."""

    def __init__(self, first: Report, most: int):
        self._most = most
        self._without = {name for name in MADE if name in first.changed or not can_change(name)}
        self._taken: set[str] = set()
        self._told: set[str] = set()
        self._activations_would_do = True

    def left_of(self, attempt: Attempt) -> Attempt | None:
        """The attempt as it would be made now; None where it is not to be made."""
        if not attempt.changes:
            return None if len(self._taken) == self._most else attempt
        changes = tuple(name for name in attempt.changes if name not in self._without)
        left = replace(attempt, change=", ".join(changes), changes=changes)
        left_of_it, of_it = ({*some} - {"repeat_kv"} for some in (changes, attempt.changes))
        alone = len(left_of_it) < min(2, len(of_it))  # what is left of a set was tried before
        useless = not self._activations_would_do and _OF_ACTIVATIONS.issuperset(changes)
        return None if alone or useless or left.change in self._taken or len(self._taken) == self._most else left

    def take(self, attempt: Attempt) -> None:
        """It is not tried again."""
        self._taken.add(attempt.change)

    def ended(self, run: Run) -> Run:
        """Learn from a run; it without the changes that found no place."""
        report, changes = run.report, run.changes
        nowhere = [name for name in changes if not report["changed"][name]]
        self._without.update(nowhere)
        if report["status"] == FAILED and len(changes) == 1:
            self._without.update(changes)
        oom = report["oom"]
        if changes and _OF_ACTIVATIONS.issuperset(changes) and oom and oom["phase"] in (LOADING, STEP):
            # the activations are gone by then: fewer of them would not have helped
            self._activations_would_do = False
        made = tuple(name for name in changes if name not in nowhere)
        return Run(", ".join(made), report, made) if nowhere else run

    def is_news(self, attempt: Attempt, run: Run) -> bool:
        """Whether it changed something that no run before did: what is left of a set may have been one of them."""
        if (attempt.changes and not run.changes) or run.change in self._told:
            return False
        self._told.add(run.change)
        return True


def _attempts(command: Sequence[str], first: Report) -> Iterator[Attempt]:
    """What to try, in this order: first what leaves the results as they are, last what trains something else.

    Repeated heads cost nothing but what they take: they stay in all that is tried after them.
    """
    heads = ("repeat_kv",) if first.trained.grouped else ()
    if heads:
        yield Attempt("repeat_kv", tuple(command), changes=heads)
    capacity = first.capacity * (1 + len(first.other_cards))
    room_for_all = first.trained.least() <= capacity
    holes = not first.oom or first.oom["allocated"] + first.oom["bytes"] <= first.capacity  # else none would help
    if room_for_all and holes and not AllocatorSettings.from_environment().expandable_segments:
        before = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
        setting = ",".join(filter(None, [before, "expandable_segments:True"]))
        yield Attempt(f"{VARIABLES[0]}={setting}", tuple(command), dict.fromkeys(VARIABLES, setting))
    names = {word.lstrip("-").partition("=")[0] for word in command[1:]}
    is_trainers = _OF_TRAINERS in names and "gradient_checkpointing" not in names
    phase = first.oom["phase"] if first.oom else None
    if is_trainers and room_for_all and phase not in (LOADING, STEP, EVALUATION, SAVING):
        words = ["--gradient_checkpointing", "True"]
        yield Attempt(" ".join(words), (*command, *words))
    # also as a part of something, as `--train.micro_batch_size` of jsonargparse and `data.batch_size=8` of Hydra
    ends = {name.rpartition(".")[2]: name for name in sorted(names, key=lambda name: (-name.count("."), name))}
    batch = next((ends[name] for name in _BATCH_SIZES if name in ends), None)
    size = None if batch is None else value_of(command, batch)
    for changes in _ladder(phase, first.trained):
        least = first.trained.least(eight_bit="eight_bit" in changes)
        if least > capacity and not _ANOTHER_MODEL.intersection(changes):
            continue
        if is_trainers and changes == ("checkpointing",) and not heads:
            continue  # its argument was tried
        if changes == ("smaller_batch",) and size is not None:
            while size > 1:
                size //= 2
                yield Attempt(f"{batch} {size}", tuple(with_value(command, batch, size)))
        else:
            changes = (*heads, *changes)
            yield Attempt(", ".join(changes), tuple(command), changes=changes)


def _ladder(phase: str | None, trained: Trained) -> Iterator[tuple[str, ...]]:
    """Sets of changes, by the phase in which the memory ran out."""
    if phase in (EVALUATION, SAVING):  # nothing of what training holds is in the way by itself
        yield ("smaller_batch",)
        return
    lora = ("lora",) if trained.causal and not trained.adapters else ()
    four = ("qlora", *lora) if trained.causal and not trained.quantized else ()  # nobody trains weights of 4 bits
    if phase == LOADING:
        wider = () if trained.sixteen_bits or trained.quantized or trained.own else ("sixteen_bits",)
        ladder = [wider, ("sixteen_bits", "eight_bit") if wider else (), (*wider, *lora) if lora else ()]
    elif phase == STEP:
        ladder = [("fused",), ("eight_bit",), lora]
    else:
        head = ("fused_head",) if trained.causal else ()
        activations = ("block_checkpointing",) if trained.own else ("checkpointing", *head)
        ladder = [*((name,) for name in activations), activations, ("smaller_batch",), (*activations, "smaller_batch")]
        ladder += [("eight_bit",), (activations[0], "eight_bit"), (*activations, "eight_bit")]
        ladder += [(*activations, "smaller_batch", "eight_bit")]
        ladder += [lora, (*activations, *lora)] if lora else []
    if four:  # it may put adapters on the model after it is loaded
        ladder += [four, (*four, "fused_head"), *([("qlora",)] if phase == LOADING and lora else [])]
    yield from filter(None, ladder)


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
