"""What a run of a program found: the verdict, the peak and what it was made of."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..cards import Range
from ..changes import BLOCK, CHANGES, what
from ..counting.convolutions import Convolutions
from ..doctor.answer import diagnose
from ..doctor.diagnosis import first_changes
from ..host.meter import HostOutOfMemory
from ..host.report import HostReport
from ..language import tr
from ..room import TIGHT, TOO_MUCH, Room, room_on
from ..shards.nccl import of_groups
from ..units import MiB, human_bytes
from . import words
from .changed import not_found
from .device import ProgramGPU
from .growth import growth_label, growth_of
from .trained import Trained, trained
from .watch import BACKWARD, CATEGORIES, EVALUATION, Watch, category_of

SCHEMA = 2  # of `Report.json`
FITS, OOM, FAILED, INTERRUPTED = "fits", "oom", "failed", "interrupted"


@dataclass
class Report:
    """A run's findings; sizes in bytes.

    status: "fits", "oom", "failed" or "interrupted". phases: name → (peak allocated, peak reserved).
    at_peak: category → bytes at the moment of the highest peak, modules and lines: largest first. allocated, reserved:
    their highest values. fragmentation: reserved and not allocated, at the end. rules: of CUDA in force → the versions
    they hold for. versions: of the libraries that the program loaded. changed: what was made other in the program →
    how often its place was found; tried: what it was run again with. error: the exception that ended the program.
    host: of the machine's RAM. card, other_cards: where one process has several cards, which one all this is of, and of
    each other one what was allocated and reserved at most. enough: what it would have been enough to reserve; None of
    several cards, and of a program that did not get through. growth: what each step leaves (see `growth`), if anything.
    trained: what a step must hold, where the memory ran out.
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
    rules: dict[str, str]
    versions: dict[str, str]
    room: Room | None = field(default=None, repr=False)
    oom: dict[str, Any] | None = None
    changed: dict[str, int] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = field(default=None, repr=False)
    watch: Watch | None = field(default=None, repr=False)
    trained: Trained = field(default_factory=Trained)
    host: HostReport | None = None
    card: int = 0
    other_cards: list[dict[str, int]] = field(default_factory=list)
    enough: int | None = None
    growth: dict[str, Any] | None = None

    def json(self) -> dict[str, Any]:
        """All of it, in JSON's types; "schema" grows when a name changes its meaning."""
        plain = {k: v for k, v in vars(self).items() if k not in ("error", "watch", "room", "host", "trained")}
        plain["judgement"] = self.judgement
        plain["room"] = None if self.room is None else self.room.to_dict()
        plain["host"] = None if self.host is None else self.host.to_dict()
        plain["error"] = None if self.error is None else error_line(self.error)
        return {"schema": SCHEMA, **plain}

    def categories(self) -> dict[int, int]:
        """Block → the place of its category in CATEGORIES."""
        places = {name: place for place, name in enumerate(CATEGORIES)}
        return {number: places[category_of(block, self.watch)] for number, block in self.watch.blocks.items()}

    @property
    def judgement(self) -> str:
        """ "fits", "tight" or "does not fit", see `room`; "failed" or "interrupted" where the program was."""
        if self.status in (FAILED, INTERRUPTED) or self.room is None:
            return self.status
        return TOO_MUCH if self.status == OOM else self.room.verdict(self.fullest["reserved"])

    @property
    def fullest(self) -> dict[str, int]:
        """The card that reserved most."""
        own = {"card": self.card, "allocated": self.allocated, "reserved": self.reserved}
        return max([own, *self.other_cards], key=lambda card: card["reserved"])

    @property
    def in_question(self) -> int:
        """The card that a reader asks about: the one that ran out, else the fullest."""
        return self.oom.get("card", self.card) if self.oom else self.fullest["card"]

    @property
    def verdict(self) -> str:
        """The verdict as a sentence: does it fit, and what is needed of what there is."""
        if self.host is not None and self.host.killed:
            return tr(ko="호스트 RAM이 모자란다", en="out of host RAM")
        if self.judgement == FAILED:
            error = error_line(self.error)
            return tr(ko=f"프로그램이 스스로 실패했다: {error}", en=f"the program failed: {error}")
        told = {
            INTERRUPTED: tr(ko="중단했다. 거기까지의 최대", en="interrupted; the peak until then"),
            FITS: tr(ko="들어간다", en="fits"),
            TIGHT: tr(ko="빠듯하다", en="tight"),
            TOO_MUCH: tr(ko="메모리가 모자란다", en="out of memory"),
        }[self.judgement]
        fullest = self.fullest
        name = f"cuda:{fullest['card']}: " if self.other_cards else ""
        if self.other_cards and self.status == OOM:
            return tr(ko=f"cuda:{self.in_question}의 {told}", en=f"{told} on cuda:{self.in_question}")
        return told + (f". {name}{self.room.line(fullest['reserved'])}" if self.room and self.status != OOM else "")

    @property
    def summary(self) -> str:
        """Steps, seconds, and the peak."""
        allocated, reserved = human_bytes(self.allocated), human_bytes(self.reserved)
        phase = words.phase(self.peak_phase)
        said = tr(
            ko=f"옵티마이저 스텝 {self.steps}번, {self.seconds:.1f}초. 최대 할당 {allocated}({phase}), 예약 {reserved}",
            en=f"{self.steps} optimizer steps in {self.seconds:.1f} s; peak {allocated} allocated in {phase}, "
            f"{reserved} reserved",
        )
        if not self.other_cards:
            return said
        others = (
            tr(
                ko=f"cuda:{card['card']} 할당 {human_bytes(card['allocated'])}, 예약 {human_bytes(card['reserved'])}",
                en=f"cuda:{card['card']} {human_bytes(card['allocated'])} allocated, "
                f"{human_bytes(card['reserved'])} reserved",
            )
            for card in self.other_cards
        )
        return f"{said} (cuda:{self.card}); {'; '.join(others)}"

    @property
    def grows(self) -> list[str]:
        """That every step leaves something behind."""
        if self.growth is None:
            return []
        return [growth_label(self.growth, line_of(self.growth["file"], self.growth["line"]))]

    @property
    def on_a_smaller_card(self) -> list[str]:
        """In how much it still gets through, where it reserved clearly more than that."""
        if self.enough is None or self.room is None or self.reserved - self.enough <= self.reserved // 32:
            return []
        needed = self.room.taken(self.enough)
        return [
            tr(
                ko=f"더 작은 카드라면 할당자가 쓰지 않는 조각을 돌려준다. {needed}에서도 끝까지 간다",
                en=f"on a smaller card the allocator gives unused pieces back: it gets through in {needed}",
            )
        ]

    @property
    def which_card(self) -> list[str]:
        """Of which card the report is, and how to see the one in question, where that is another."""
        wanted = self.in_question
        if wanted == self.card:
            return []
        return [
            tr(
                ko=f"아래의 단계, 모듈, 줄, 그림은 cuda:{self.card}의 것이다. cuda:{wanted}의 것은 "
                f"--rank {wanted}로 본다",
                en=f"phases, modules, lines and pictures are those of cuda:{self.card}: --rank {wanted} shows "
                f"cuda:{wanted}",
            )
        ]

    @property
    def advice(self) -> list[str]:
        """Where the memory ran out, and what was tried to make room."""
        out = []
        if self.oom:
            place, asked = line_of(self.oom["file"], self.oom["line"]), human_bytes(self.oom["bytes"])
            on = f"cuda:{self.oom['card']}" if "card" in self.oom else ""
            within = ", ".join(filter(None, (on, self.oom["module"], words.phase(self.oom["phase"]))))
            out.append(tr(ko=f"{place}에서 {asked} 요청({within})", en=f"{place} asked for {asked} ({within})"))
            if (least := self.trained.least()) > self.capacity * (1 + len(self.other_cards)):
                out.append(
                    tr(
                        ko=f"가중치, 학습하는 파라미터의 그레이디언트와 옵티마이저 상태만으로 {human_bytes(least)}다. "
                        "순전파 상태를 줄여서는 들어가지 않는다",
                        en=f"weights, and gradients and optimizer states of what is trained, are {human_bytes(least)} "
                        "alone: fewer activations would not do",
                    )
                )
        for one in self.tried:
            change, on = one["change"], f"cuda:{one['card']}" if self.other_cards else ""
            reserved = f"{on} {human_bytes(one['reserved'])}".lstrip()
            if one["judgement"] == TIGHT:
                result = tr(ko=f"빠듯하다({reserved} 예약)", en=f"tight, {reserved} reserved")
            elif one["status"] == FITS:
                result = tr(ko=f"들어간다({reserved} 예약)", en=f"fits, {reserved} reserved")
            elif one["status"] == FAILED:
                result = tr(ko=f"프로그램이 실패한다({one['error']})", en=f"the program fails ({one['error']})")
            else:
                result = tr(ko="그래도 모자란다", en="still out of memory") + (f" ({on})" if on else "")
            if one.get("growth") and one["status"] == FITS:
                more = human_bytes(one["growth"]["bytes"])
                result += tr(ko=f". 그러나 스텝마다 {more}씩 는다", en=f", but it grows by {more} a step")
            out.append(tr(ko=f"다시 실행: {change} → {result}", en=f"run again with {change}: {result}"))
        if self.of_the_doctor:
            out.append(tr(ko="실행해 보지 않은 것 가운데 먼저 해 볼 것:", en="not run, and to be tried first:"))
        return out

    @property
    def changes_made(self) -> list[str]:
        """What was other than the program says, one line each."""
        return [
            tr(ko=f"바꾼 것: {name}({times}곳)", en=f"changed: {name}, {times} time{'' if times == 1 else 's'}")
            for name, times in self.changed.items()
            if times
        ]

    @property
    def of_the_doctor(self) -> list[str]:
        """Changes that no run can make in a program: what the doctor says of an evaluation that nothing made fit."""
        in_evaluation = self.oom is not None and self.oom["phase"] == EVALUATION and self.error is not None
        if not in_evaluation or any(one["status"] == FITS for one in self.tried):
            return []
        return first_changes(diagnose(self.error))

    @property
    def to_write(self) -> list[str]:
        """Of the changes that made it fit, what to write into the program; else of those that the doctor names."""
        fits = [one["changes"] for one in self.tried if one["status"] == FITS][-1:]  # the roomiest: it is the last one
        fits.append(self.of_the_doctor)
        named = {"checkpointing": "diffusers_checkpointing"} if self.trained.diffusers else {}
        keys = [named.get(name, name) for changes in fits for name in changes]
        lines = [line for key in keys for line in (f"# {what(key)}", *CHANGES[key].lines)]
        blocks = self.trained.blocks or BLOCK
        return [line.replace(BLOCK, f"({blocks})" if "," in blocks else blocks) for line in lines]

    def on_host(self) -> list[tuple[str, int]]:
        """(category, bytes) at the peak of the host's RAM."""
        return [] if self.host is None else list(self.host.at_peak.items())

    def text(self, rows: int = 8) -> str:
        """A page of text: the verdict first, then what the peak is made of."""
        sections = (
            (
                tr(ko="단계별 최대: 할당, 예약", en="peak of each phase: allocated, reserved"),
                [f"{human_bytes(r):>12}  {words.phase(name)}" for name, (_, r) in self.phases.items()],
                [human_bytes(a) for a, _ in self.phases.values()],
            ),
            (
                tr(ko="최대일 때", en="at the peak"),
                [words.category(name) for name, n in self.at_peak.items() if n],
                [human_bytes(n) for n in self.at_peak.values() if n],
            ),
            (
                tr(ko="호스트 RAM이 최대일 때", en="at the peak of the host's RAM"),
                [words.category(name) for name, n in self.on_host() if n],
                [human_bytes(n) for _, n in self.on_host() if n],
            ),
            (
                tr(ko="모듈별", en="by module"),
                [words.module(name) for name, _ in self.modules[:rows]],
                [human_bytes(n) for _, n in self.modules[:rows]],
            ),
            (
                tr(ko="프로그램의 줄별", en="by line of the program"),
                [line_of(file, line) for file, line, _ in self.lines[:rows]],
                [human_bytes(n) for *_, n in self.lines[:rows]],
            ),
            (
                tr(ko="가상 GPU에 없는 값을 물은 곳과 답", en="values that a virtual GPU does not have, answered"),
                [f"{words.question(kind)} = {told}  {_short(where)}" for kind, told, where, _ in self.values[:rows]],
                [f"{n} ×" for *_, n in self.values[:rows]],
            ),
        )
        out = [f"{self.program}, {self.gpu} ({human_bytes(self.capacity)}): {self.verdict}"]
        out += [f"  {line}" for line in (*self.which_card, self.summary, *self.grows, *self.on_a_smaller_card)]
        out += [f"  {self.host.line}"] if self.host is not None else []
        out += [f"  {line}" for line in self.changes_made]
        out += [f"  {line}" for line in self.advice]
        out += [f"    {line}" for line in self.to_write]
        for head, names, numbers in sections:
            if names:
                out += ["", head, *(f"{n:>14}  {name}" for n, name in zip(numbers, names, strict=True))]
        out += [*([""] if self.notes else []), *(tr(ko=f"참고: {note}", en=f"note: {note}") for note in self.notes)]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        rules = ", ".join(self.rules)
        out += ["", tr(ko=f"버전: {versions}", en=f"versions: {versions}")]
        return "\n".join([*out, tr(ko=f"규칙: {rules}", en=f"rules: {rules}")])


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
    notes = [*watch.notes, *not_found(gpu.changes), *_seen_nothing(watch, status, _of_all(gpu, peak))]
    held = trained(watch) if gpu.last_oom else Trained()
    notes += _not_seen(watch, status)
    if status == FITS and gpu.rules.math_for_groups:
        notes.append(
            tr(
                ko=f"{gpu.name}에서는 sdpa가 그룹 쿼리에 math 커널을 써서 길이 × 길이 행렬을 만든다. "
                "--change repeat_kv로 실행하면 그러지 않을 때의 메모리가 나온다",
                en=f"on this {gpu.name} sdpa takes its math kernel for grouped heads, which makes matrices of length × "
                "length: --change repeat_kv shows the memory without them",
            )
        )
    if gpu.host.unfilled_bytes:
        unfilled = human_bytes(gpu.host.unfilled_bytes)
        notes.append(
            tr(
                ko=f"CPU에 있는 난수 가중치 {unfilled}는 뽑지 않았다. 값은 쓰이지 않고, 메모리를 채우는 시간만 든다",
                en=f"random weights of {unfilled} on the CPU were not drawn: nobody reads them, and it takes its time",
            )
        )
    if gpu.managed_peak_bytes:
        managed = human_bytes(gpu.managed_peak_bytes)
        notes.append(
            tr(
                ko=f"페이지 옵티마이저의 상태 {managed}는 CUDA의 관리 메모리에 있어 위의 숫자에 없다. 카드에 자리가 "
                "있으면 카드에, 없으면 RAM에 있고, 그러면 스텝마다 PCIe를 오간다",
                en=f"states of a paged optimizer, {managed}, are in CUDA's managed memory and not in these numbers: "
                "on the card while it has room, else in the RAM and over PCIe in every step",
            )
        )
    if gpu.convolutions.count:
        notes.append(_convolutions(gpu.convolutions))
    allocator = gpu.meter.allocator
    kinds = [name for name in CATEGORIES if name != "engine" or at_peak[name]]  # which few programs have
    return Report(
        program=program, gpu=gpu.name, capacity=gpu.capacity_bytes, status=status, steps=watch.steps, seconds=seconds,
        allocated=peak, reserved=max(watch.reserved_peaks), fragmentation=allocator.unused_bytes, peak_phase=phase,
        phases=phases, at_peak={name: at_peak[name] for name in kinds}, modules=modules.most_common(),
        lines=[(file, line, nbytes) for (file, line), nbytes in lines.most_common()],
        values=[(a.asked, a.answer, a.where, count) for a, count in gpu.answers.most_common()], notes=notes,
        rules={rule.name: rule.versions for rule in gpu.rules.active()}, versions=_versions(),
        room=room_on(gpu.spec, _nccl(gpu)), oom=gpu.last_oom, changed=dict(gpu.changes), error=error, watch=watch,
        trained=held,
        host=gpu.host.report(killed=isinstance(error, HostOutOfMemory)),
        enough=_enough(gpu, status, peak, max(watch.reserved_peaks)),
        card=gpu.looked_at if gpu.several else 0,
        other_cards=gpu.several.others() if gpu.several else [],
        growth=growth_of(watch, None if status == OOM else max(gpu.capacity_bytes - max(watch.reserved_peaks), 0)),
    )  # fmt: skip


def _enough(gpu: ProgramGPU, status: str, peak: int, reserved: int) -> int | None:
    """Bytes in which the allocator gets through with the same requests, to a 128th of the peak.

    Between requests it gives nothing back but for want of room: what a program empties itself counts as kept.
    """
    if status != FITS or gpu.several:
        return None
    step = max(peak // 128, 2 * MiB)
    if reserved - peak < max(2 * step, 64 * MiB):
        return reserved
    trace, settings = gpu.watch.saved().trace, gpu.meter.allocator.settings
    return min(reserved, trace.smallest_capacity(step, settings=settings, reserved=reserved))


def _of_all(gpu: ProgramGPU, peak: int) -> int:
    """The highest peak of all cards of the process."""
    return max([peak, *(card["allocated"] for card in gpu.several.others())]) if gpu.several else peak


def _seen_nothing(watch: Watch, status: str, peak: int) -> list[str]:
    """What a reader would take for more than it is: a run that used no GPU, and one without an optimizer's steps."""
    if status != FITS:
        return []
    if not peak:
        return [tr(ko="프로그램은 GPU를 쓰지 않았다", en="the program used no GPU")]
    backwards = sum(name == BACKWARD for name, _ in watch.spans)
    if watch.steps or backwards <= _MANY_BACKWARDS:
        return []
    return [
        tr(
            ko=f"역전파를 {backwards:,}번 하는 동안 옵티마이저의 step이 없었다. --steps는 이런 실행을 끝내지 않는다",
            en=f"{backwards:,} backward passes and no optimizer's step: --steps does not end such a run",
        )
    ]


def _not_seen(watch: Watch, status: str) -> list[str]:
    """That a Trainer's evaluation comes after what was run."""
    if status != FITS or not watch.will_evaluate or any(name == EVALUATION for name, _ in watch.spans):
        return []
    return [
        tr(
            ko="Trainer에 평가가 켜져 있지만 이 실행은 그 앞에서 끝났다. 평가의 메모리는 --through-evaluation으로 본다",
            en="the Trainer is to evaluate, and this run ended before it did: --through-evaluation goes on to that",
        )
    ]


_MANY_BACKWARDS = 3  # `run` ends after so many steps by default


def _convolutions(seen: Convolutions) -> str:
    """That cuDNN's workspaces are not counted. What an H100 took of them stands in benchmarks/README.md."""
    each, most = f"{seen.count:,}", human_bytes(seen.largest_bytes)
    note = tr(
        ko=f"합성곱 {each}번에 cuDNN이 쓰는 작업 공간은 세지 않았다. cuDNN이 정하고, 크기를 적어 둔 소스가 없다. "
        f"H100에서 잰 순전파의 것은 입력, 가중치, 출력을 더한 값의 0~1.3배였다. 여기서 더한 값은 {most}까지다",
        en=f"cuDNN's workspaces of {each} convolutions are not counted: its heuristics choose them, no source states "
        "them. Forward, an H100's were 0 to 1.3 times what input, weight and output take together; the most of that "
        f"here is {most}",
    )
    if not seen.tuned:
        return note
    return note + tr(
        ko=". torch.backends.cudnn.benchmark가 켜져 있어 여러 알고리즘을 한 번씩 해 본다. 그때는 몇 GiB 더 들 수 있다",
        en=". torch.backends.cudnn.benchmark is on, which tries many algorithms once: that may take gigabytes more",
    )


_LIBRARIES = (
    "transformers", "peft", "accelerate", "bitsandbytes", "trl", "lightning", "timm", "diffusers", "deepspeed",
    "torchvision", "flash_attn", "datasets",
)  # fmt: skip


def _versions() -> dict[str, str]:
    found = {"virtual-gpu": sys.modules[__name__.partition(".")[0]].__version__, "torch": torch.__version__}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def _nccl(gpu: ProgramGPU) -> Range | None:
    """What NCCL takes for the groups that this rank is in, each set of ranks once."""
    if gpu.uses_nccl:  # within this process
        return of_groups([gpu.count])
    if gpu.ranks == 1 or not dist.is_initialized():
        return None
    groups = {tuple(sorted(ranks)) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()}
    taken = of_groups(len(ranks) for ranks in groups if gpu.rank in ranks)
    return Range(taken.low, taken.high)


def error_line(error: BaseException) -> str:
    """As a traceback ends; of an exit that handles another error, as Hydra's does, that error before it."""
    name, text = type(error).__name__, str(error)
    said = f"{name}: {text}" if text else name
    behind = error.__cause__ or error.__context__
    if not isinstance(error, SystemExit) or behind is None:
        return said
    return f"{error_line(behind)} ({said})"


def line_of(file: str, line: int) -> str:
    """A line of the program, as a person reads it."""
    return f"{_short(file)}:{line}" if file else tr(ko="(프로그램의 줄이 아님)", en="(no line of the program)")


def _short(file: str) -> str:
    near = os.path.relpath(file) if os.path.isabs(file) else file
    return near if not near.startswith("..") else file
