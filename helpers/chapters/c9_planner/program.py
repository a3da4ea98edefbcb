"""Chapter 9's last exercise: examples/full.py on a virtual T4, as the page runs it or with one thing changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from virtual_gpu.allocator_settings import VARIABLES
from virtual_gpu.language import tr
from virtual_gpu.program import words
from virtual_gpu.program.runner import run
from virtual_gpu.room import FITS
from virtual_gpu.units import GiB, choose, positive_int

from ...environment import COURSE
from ...self_check import filled, right

PROGRAM = COURSE / "examples" / "full.py"
GIVEN = {"fp16": "True", "per_device_train_batch_size": "1"}
STATES, ACTIVATIONS, FRAGMENTATION, MARGIN = ROWS = 1, 2, 3, 4  # of the table in 9.10
SPARE = 0.05  # the margin that 9.9 asks for, on what the allocator reserved
# What may be changed: the row that it belongs to, and its values.
CHANGES = {
    "optim": (STATES, ("adamw_torch", "adamw_bnb_8bit", "adafactor")),
    "lora": (STATES, ("True",)),
    "length": (ACTIVATIONS, ("128", "256")),
    "gradient_checkpointing": (ACTIVATIONS, ("True",)),
    "expandable_segments": (FRAGMENTATION, ("True",)),
}


@dataclass(frozen=True)
class End:
    """How a run ended. scarce: it fits, but not with `SPARE`. at_peak: category → bytes at the highest moment."""

    fits: bool
    scarce: bool
    verdict: str
    steps: int
    phase: str
    at_peak: Mapping[str, int]

    def told(self) -> str:
        """In words: the verdict; of a run that died, where, and the three largest of what was there."""
        if self.scarce:
            return tr(
                ko=f"{self.verdict}. 들어가지만, 여유 {SPARE:.0%}를 두면 넘친다(9.9절).",
                en=f"{self.verdict}. It fits, but not with a margin of {SPARE:.0%} (9.9).",
            )
        if self.fits:
            return f"{self.verdict}."
        largest = sorted(self.at_peak.items(), key=lambda one: -one[1])[:3]
        there = ", ".join(f"{words.category(name)} {nbytes / GiB:.2f} GiB" for name, nbytes in largest)
        phase = words.phase(self.phase)
        return tr(
            ko=f"{self.verdict}. 마친 스텝 {self.steps}번, 넘친 단계 '{phase}', 그때 {there}.",
            en=f"{self.verdict}: after {self.steps} steps, in {phase}, with {there}.",
        )


@cache
def ran(name: str, value: str) -> End:
    """The program with this one thing changed: an option, or the allocator's setting."""
    options, environment = dict(GIVEN), {}
    if name == "expandable_segments":
        environment = dict.fromkeys(VARIABLES, f"{name}:{value}")
    else:
        options[name] = value
    with TemporaryDirectory() as folder, patch.dict(os.environ, environment):
        options |= {"output_dir": folder, "disable_tqdm": "True"}
        argv = [text for option, given in options.items() for text in (f"--{option}", given)]
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            report = run(str(PROGRAM), argv, gpu="T4")
    phase = report.oom["phase"] if report.oom else report.peak_phase
    fits = report.judgement == FITS
    scarce = fits and report.room.verdict(int(report.reserved * (1 + SPARE))) != FITS
    return End(fits, scarce, report.verdict, report.steps, phase, dict(report.at_peak))


def judge(answer: Any) -> str:
    """Of {"row": 1 to 4, "change": {name: value}}: is the row what overflows, and does the program fit so changed?"""
    answer = filled(answer)
    for name in answer:
        choose(name, ("row", "change"), tr(ko="설정", en="setting"))
    row, change = filled(answer.get("row")), filled(answer.get("change"))
    if positive_int(row, "row") not in ROWS:
        return tr(ko=f"row={row}: 표의 행은 {ROWS}다.", en=f"row={row}: the table's rows are {ROWS}.")
    if not isinstance(change, dict) or len(change) != 1:
        return tr(ko='change에는 {"이름": 값}을 하나만 적는다.', en='change is one thing: {"name": value}.')
    [(name, value)] = change.items()
    name = choose(name, CHANGES, tr(ko="설정", en="setting"))
    its_row, values = CHANGES[name]
    value = choose(value if isinstance(value, str) else repr(filled(value)), values, name)
    end = ran(name, value)
    said = f"{name}={value}: {end.told()}"
    if row != STATES:
        return f"{said} {_why_not(row)}"
    if end.fits:
        return right(said)
    if its_row != row:
        return said + tr(
            ko=f" {name}은(는) 고른 행에서 바꾸는 것이 아니다.", en=f" {name} is not of the row you chose."
        )
    return said + tr(ko=" 행은 맞다. 무엇이 얼마나 줄었는가?", en=" The row is right: what became smaller by this?")


def _why_not(row: int) -> str:
    """What to look at where a row was chosen that it is not."""
    return {
        ACTIVATIONS: tr(
            ko="행을 다시 본다. 넘친 순간에 역전파를 위해 저장한 텐서가 있었는가?",
            en="Not the row: were there tensors saved for backward when it overflowed?",
        ),
        FRAGMENTATION: tr(
            ko="행을 다시 본다. 그 자리가 모두 쓸 수 있는 것이었다면 끝까지 갔을까? 앞으로 더 만들 것까지 더해 본다.",
            en="Not the row: with all of that room, would it have come to its end? Add what is still to be made.",
        ),
        MARGIN: tr(
            ko="행을 다시 본다. 예측에서 이미 넘쳤다.", en="Not the row: it overflowed in the prediction itself."
        ),
    }[row]
