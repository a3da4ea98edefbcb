"""What a run of a program found: the verdict, the peak and what it was made of."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from ..language import tr
from ..room import TIGHT, TOO_MUCH, Room, room_on
from ..units import human_bytes
from .device import ProgramGPU
from .watch import CATEGORIES, Watch, category_of

SCHEMA = 1  # of `Report.json`
FITS, OOM, FAILED = "fits", "oom", "failed"


@dataclass
class Report:
    """A run's findings; sizes in bytes.

    status: "fits", "oom" or "failed". phases: name → (peak allocated, peak reserved). at_peak: category → bytes at the
    moment of the highest peak, modules and lines: largest first. allocated, reserved: their highest values.
    fragmentation: reserved and not allocated, at the end. error: the exception that ended the program.
    """

    program: str
    gpu: str
    capacity: int
    status: str
    steps: int
    seconds: float
    allocated: int
    reserved: int
    fragmentation: int
    peak_phase: str
    phases: dict[str, tuple[int, int]]
    at_peak: dict[str, int]
    modules: list[tuple[str, int]]
    lines: list[tuple[str, int, int]]
    values: list[tuple[str, Any, str, int]]
    notes: list[str]
    rules: list[str]
    versions: dict[str, str]
    room: Room | None = field(default=None, repr=False)
    oom: dict[str, Any] | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = field(default=None, repr=False)
    watch: Watch | None = field(default=None, repr=False)

    def json(self) -> dict[str, Any]:
        """All of it, in JSON's types; "schema" grows when a name changes its meaning."""
        plain = {k: v for k, v in vars(self).items() if k not in ("error", "watch", "room")}
        plain["judgement"] = self.judgement
        plain["room"] = None if self.room is None else self.room.to_dict()
        plain["error"] = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        return {"schema": SCHEMA, **plain}

    @property
    def judgement(self) -> str:
        """ "fits", "tight" or "does not fit", see `room`; "failed" where the program did."""
        if self.status == FAILED or self.room is None:
            return self.status
        return TOO_MUCH if self.status == OOM else self.room.verdict(self.reserved)

    def text(self, rows: int = 8) -> str:
        """A page of text: the verdict first, then what the peak is made of."""
        verdict = {
            FITS: tr(ko="들어간다", en="fits"),
            TIGHT: tr(ko="빠듯하다", en="tight"),
            TOO_MUCH: tr(ko="메모리가 모자란다", en="out of memory"),
            FAILED: f"the program failed: {type(self.error).__name__}: {self.error}",
        }[self.judgement]
        out = [
            f"{self.program} on {self.gpu} ({human_bytes(self.capacity)}): {verdict}"
            + (f". {self.room.line(self.reserved)}" if self.room and self.status == FITS else ""),
            f"  {self.steps} optimizer steps in {self.seconds:.1f} s; peak {human_bytes(self.allocated)} allocated in "
            f"{self.peak_phase}, {human_bytes(self.reserved)} reserved",
        ]
        if self.oom:
            out.append(
                f"  {self.oom['file']}:{self.oom['line']} asked for {human_bytes(self.oom['bytes'])}"
                + (f" in {self.oom['module']}" if self.oom["module"] else "")
                + f" ({self.oom['phase']})"
            )
        if self.tried:
            *others, last = self.tried
            made_room = last["status"] == FITS
            out += [
                tr(
                    ko=f"  다시 실행해 보았다: {one['change']}: 그래도 모자란다",
                    en=f"  run again with {one['change']}: still out of memory",
                )
                for one in (others if made_room else self.tried)
            ]
            if made_room:
                out.append(
                    tr(
                        ko=f"  다시 실행해 보았다: {last['change']}: 들어간다({human_bytes(last['reserved'])} 예약)",
                        en=f"  run again with {last['change']}: fits, {human_bytes(last['reserved'])} reserved",
                    )
                )
        out += ["", "phase               allocated       reserved"]
        out += [f"  {name:<15}{human_bytes(a):>12}   {human_bytes(r):>12}" for name, (a, r) in self.phases.items()]
        out += ["", "at the peak"]
        out += [f"  {name:<24}{human_bytes(n):>12}" for name, n in self.at_peak.items() if n]
        out += ["", "by module"]
        out += [f"  {human_bytes(n):>12}  {name}" for name, n in self.modules[:rows]]
        out += ["", "by line of the program"]
        out += [f"  {human_bytes(n):>12}  {_short(file)}:{line}" for file, line, n in self.lines[:rows]]
        if self.values:
            out += ["", "values that a virtual GPU does not have, answered"]
            out += [f"  {n:>5} × {kind} = {told}  {_short(where)}" for kind, told, where, n in self.values[:rows]]
        out += [*([""] if self.notes else []), *(f"note: {note}" for note in self.notes)]
        return "\n".join(out)


def make_report(
    gpu: ProgramGPU, watch: Watch, *, program: str, status: str, seconds: float, error: BaseException | None = None
) -> Report:
    """Read a report off what was watched."""
    watch.name_everything()
    live, peak, peak_at = 0, 0, -1
    span_peaks = [0] * len(watch.spans)
    bounds = [start for _, start in watch.spans[1:]] + [len(watch.events)]
    span = 0
    for index, event in enumerate(watch.events):
        while index >= bounds[span]:
            span += 1
            span_peaks[span] = live
        block = watch.blocks[abs(event)]
        live += block.held if event > 0 else -block.held
        span_peaks[span] = max(span_peaks[span], live)
        if live > peak:
            peak, peak_at = live, index
    phases: dict[str, tuple[int, int]] = {}
    for (name, _), allocated, reserved in zip(watch.spans, span_peaks, watch.reserved_peaks, strict=True):
        before = phases.get(name, (0, 0))
        phases[name] = max(before[0], allocated), max(before[1], reserved)
    at_peak: Counter = Counter()
    modules: Counter = Counter()
    lines: Counter = Counter()
    phase = "loading"
    for block in watch.blocks.values():
        if block.born <= peak_at and (block.freed is None or block.freed > peak_at):
            at_peak[category_of(block, watch)] += block.held
            modules[block.module.text or f"({watch.spans[block.span][0]})"] += block.held
            lines[block.line] += block.held
    for name, start in watch.spans:
        if start <= peak_at:
            phase = name
    allocator = gpu.meter.allocator
    return Report(
        program=program, gpu=gpu.name, capacity=gpu.capacity_bytes, status=status, steps=watch.steps, seconds=seconds,
        allocated=peak, reserved=max(watch.reserved_peaks), fragmentation=allocator.unused_bytes, peak_phase=phase,
        phases=phases, at_peak={name: at_peak[name] for name in CATEGORIES}, modules=modules.most_common(),
        lines=[(file, line, nbytes) for (file, line), nbytes in lines.most_common()],
        values=[(a.asked, a.answer, a.where, count) for a, count in gpu.answers.most_common()], notes=list(watch.notes),
        rules=[rule.name for rule in gpu.rules.active()], versions={"torch": torch.__version__},
        room=room_on(gpu.spec), oom=gpu.last_oom, error=error, watch=watch,
    )  # fmt: skip


def _short(file: str) -> str:
    if not file:
        return "(no line of the program)"
    near = os.path.relpath(file) if os.path.isabs(file) else file
    return near if not near.startswith("..") else file
