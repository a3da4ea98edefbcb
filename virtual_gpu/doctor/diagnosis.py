"""From a log to a diagnosis: causes by their evidence, each with how sure it is; nothing is guessed beyond it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..language import tr
from . import foreign, places, sizes, vocabulary, words
from .card import Guess, guess
from .frames import Frame, libraries, models, traceback, users_last
from .message import Message, messages
from .text import Stream, decode, streams

CERTAIN, LIKELY, POSSIBLE = SURE = ("certain", "likely", "possible")
CANNOT_TELL = "cannot_tell"
# Of equally sure causes the one that stands first is said first; moments stand between "outside_pytorch" and the rest.
_ORDER = ("in_handler", "limit", "larger_than_card", "other_process", "outside_pytorch")
_LATE = ("fragmentation", places.ATTENTION, places.BACKWARD, places.GATHERING, places.FORWARD, "freed_since")
_HANDLING = "During handling of the above exception"  # Python, between two tracebacks
# tqdm's bar of a training: without a name before it, as those of maps and downloads have.
_BAR = re.compile(r"^[ \t]{0,8}\d{1,3}%\|[^|\n]{0,120}\| {0,8}(\d{1,9})/(\d{1,9}) \[", re.MULTILINE)
_LOADS = re.compile(r"Loading checkpoint shards|Loading weights|, in from_pretrained\b")
_FIRST_STEPS = 2  # after so many everything that a step makes is there
_ONE_TENSOR = (  # where T is one tensor of many, and what was alive before may matter more
    places.ATTENTION, places.BACKWARD, places.FORWARD, places.LOGITS, places.EVALUATION, places.GENERATION,
)  # fmt: skip
_LITTLE = 0.1  # of what is alive
_OF_TRAINING = (places.BACKWARD, places.FORWARD, places.LOGITS)  # not attention: each layer may hold its own scores
_PROGRAM = re.compile(r"\w[\w./-]{0,200}\.py")  # a relative path, or else a name, that is safe in a command
_ELSEWHERE = (  # frames say nothing of these
    foreign.OTHER, foreign.ELSE, foreign.HOST, foreign.SHARE, foreign.CACHE, foreign.FP16, foreign.BF16,
)  # fmt: skip
_GENERIC = (places.ATTENTION, places.BACKWARD, places.GATHERING, places.FORWARD)  # a place, hardly a cause


@dataclass(frozen=True)
class Finding:
    """One cause: its name, "certain", "likely" or "possible", what that means, and what it was read off."""

    cause: str
    sure: str
    evidence: tuple[str, ...] = ()


@dataclass
class Diagnosis:
    """All that was read off a text. findings: the surest first; ruled_out: causes that the numbers exclude."""

    findings: list[Finding] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    message: Message | None = None
    messages: int = 0
    rank: int | None = None
    other_ranks: tuple[int, ...] = ()
    frames: list[Frame] = field(default_factory=list)
    foreign: foreign.Foreign | None = None
    card: Guess | None = None
    products: list[vocabulary.Product] = field(default_factory=list)
    products_by_chance: float = 0.0

    @property
    def verdict(self) -> str:
        """The cause that is surest, or "cannot_tell"."""
        return self.findings[0].cause if self.findings else CANNOT_TELL

    @property
    def sure(self) -> str | None:
        """How sure the verdict is; None where there is none."""
        return self.findings[0].sure if self.findings else None

    @property
    def little(self) -> float | None:
        """The request's share of what is alive, where it should be the one large tensor and is little; else None."""
        message = self.message
        if not (message and message.tried and message.allocated and self.verdict in _ONE_TENSOR):
            return None
        share = message.tried.bytes / message.allocated.bytes
        return share if share < _LITTLE else None

    @property
    def users_line(self) -> Frame | None:
        """The innermost frame that is the user's own."""
        return users_last(self.frames)

    @property
    def program(self) -> str | None:
        """The user's program, where the traceback names one that a command can run; not a file that it imports."""
        mine = [frame for frame in self.frames if frame.file and frame.library is None]
        if not mine or any(frame.is_cell for frame in mine):
            return None
        file = next((frame for frame in mine if frame.function == "<module>"), mine[-1]).file
        return next((name for name in (file, re.split(r"[/\\]+", file)[-1]) if _PROGRAM.fullmatch(name)), None)

    def run(self, *options: str) -> str | None:
        """The command that runs the program on a virtual card like this one; None where the card is not known."""
        if self.card is None:
            return None
        return " ".join(
            ["virtual-gpu", "run", "--gpu", shlex.quote(self.card.name), *options, self.program or "program.py"]
        )

    @property
    def libraries(self) -> list[str]:
        """Known libraries in the traceback."""
        return libraries(self.frames)


@dataclass(frozen=True)
class _Read:
    stream: Stream
    message: Message
    frames: list[Frame]
    in_handler: bool = False  # raised while the one before it was handled


def read(raw: str | bytes, cut: bool = False) -> Diagnosis:
    """The diagnosis of a message, a traceback or a log; `cut`: something stood before what is given.

    Any text is taken; nothing in it is executed, and no error is raised for what it says.
    """
    text = decode(raw) if isinstance(raw, bytes) else raw
    every = streams(text)
    found = [one for stream in every for one in _read(stream)]
    diagnosis = Diagnosis()
    if cut:
        diagnosis.notes.append(words.cut())
    if not found:
        _without_numbers(diagnosis, every, text)
    else:
        chosen = max(found, key=lambda one: (len(one.message.stated), bool(one.frames)))
        distinct = [one for at, one in enumerate(found) if not any(one.message.same_as(o.message) for o in found[:at])]
        diagnosis.message, diagnosis.messages = chosen.message, len(distinct)
        diagnosis.rank, diagnosis.frames = chosen.stream.rank, chosen.frames
        ranks = {one.stream.rank for one in found} - {chosen.stream.rank, None}
        diagnosis.other_ranks = tuple(sorted(rank for rank in ranks if rank is not None))
        diagnosis.card = guess(chosen.message.total, text)
        _by_numbers(diagnosis, chosen.message, text)
        bars = _BAR.findall(text.replace("\r", "\n"))
        if bars and int(bars[-1][0]) > _FIRST_STEPS:
            diagnosis.notes.append(words.late(*bars[-1]))
        if any(one.in_handler for one in found):
            diagnosis.findings.append(Finding("in_handler", CERTAIN, (words.in_handler(),)))
    _by_frames(diagnosis)
    diagnosis.findings.sort(key=_place_in_order)
    if diagnosis.little is not None:
        diagnosis.notes.append(words.little(diagnosis.little, diagnosis.run() if diagnosis.program else None))
    return diagnosis


def _read(stream: Stream) -> Iterator[_Read]:
    """Each message of a stream with the frames that stand before it, or after it where none do."""
    text = "\n".join(stream.lines)
    found = list(messages(text))
    ends = [text.count("\n", 0, one.start) for one in found]
    for at, message in enumerate(found):
        before = stream.lines[ends[at - 1] + 1 if at else 0 : ends[at] + 1]
        frames = traceback(before)
        if not frames:
            frames = traceback(stream.lines[ends[at] : ends[at + 1] if at + 1 < len(found) else None])
        if not frames:  # of a traceback that was cut short the last line of code may be left
            frames = [Frame("", None, "", line.strip()[:300]) for line in before[-3:-1] if line.strip()]
        in_handler = at > 0 and any(line.startswith(_HANDLING) for line in before)
        yield _Read(stream, message, frames, in_handler)


def _without_numbers(diagnosis: Diagnosis, every: Sequence[Stream], text: str) -> None:
    for stream in every:
        seen = foreign.foreign(stream.lines)
        if seen and (diagnosis.foreign is None or foreign.rank(seen) < foreign.rank(diagnosis.foreign)):
            diagnosis.foreign, diagnosis.rank = seen, stream.rank
            diagnosis.frames = traceback(stream.lines)
    if diagnosis.foreign:
        loads = diagnosis.foreign.kind == foreign.HOST and _LOADS.search(text)
        cause = "host_loading" if loads else diagnosis.foreign.kind
        diagnosis.findings.append(Finding(cause, diagnosis.foreign.sure, (diagnosis.foreign.line,)))


def _by_numbers(diagnosis: Diagnosis, message: Message, text: str) -> None:
    if message.platform != "CUDA":
        name = {"HIP": "ROCm"}.get(message.platform, message.platform)
        diagnosis.foreign = foreign.Foreign(foreign.OTHER, name, CERTAIN, f"{message.platform} out of memory")
        diagnosis.findings.append(Finding(foreign.OTHER, CERTAIN, (diagnosis.foreign.line,)))
        return
    diagnosis.findings += _causes(message)
    holes = sizes.holes(message)
    if holes and holes.enough is False:
        diagnosis.ruled_out.append(words.no_fragmentation(holes))
    if sizes.adds_up(message) and not sizes.others(message):
        diagnosis.ruled_out.append(words.nobody_else(message))
    if sizes.spilled(message):
        diagnosis.notes.append(words.spilled())
    if message.private and message.allocated and 2 * message.private.bytes >= message.allocated.bytes:
        diagnosis.notes.append(words.pools(message.private))
    if message.tried:
        known, named = vocabulary.vocabularies(text)
        diagnosis.products, diagnosis.products_by_chance = vocabulary.products(message.tried, known)
        if diagnosis.products and named:
            evidence = tuple(map(words.product, diagnosis.products))
            diagnosis.findings.append(Finding(places.LOGITS, POSSIBLE, evidence))


def _causes(message: Message) -> Iterator[Finding]:
    if sizes.over_limit(message):
        yield Finding("limit", CERTAIN, (words.limit(message),))
        return
    if sizes.over_any_card(message):
        yield Finding("larger_than_card", CERTAIN, (words.larger(message),))
        return
    tried, free = message.tried, message.free
    missing = tried.bytes - free.bytes - tried.slack - free.slack if tried and free else None
    if others := sizes.others(message):
        enough = missing is not None and 0 < missing <= others.bytes
        sure = POSSIBLE if others.doubtful or not enough else CERTAIN if others.listed else LIKELY
        yield Finding("other_process", sure, (words.others(message, others, enough),))
    outside = sizes.outside_pytorch(message)
    if outside and outside.bytes > sizes.TOO_MUCH:
        enough = missing is not None and 0 < missing <= outside.bytes
        yield Finding("outside_pytorch", LIKELY if enough else POSSIBLE, (words.outside(outside),))
    holes = sizes.holes(message)
    if holes and holes.free_alone:
        yield Finding("freed_since", POSSIBLE, (words.freed_since(holes),))
    elif holes and holes.enough is not False:
        held = message.held.bytes if message.held else 0
        sure = LIKELY if holes.enough and holes.cached >= max(holes.tried, held / 10) else POSSIBLE
        yield Finding("fragmentation", sure, (words.fragmentation(holes),))


def _by_frames(diagnosis: Diagnosis) -> None:
    for place in places.places(diagnosis.frames):
        if diagnosis.foreign and diagnosis.foreign.kind in _ELSEWHERE:
            return
        sure = LIKELY if place.moment in _GENERIC else place.sure
        evidence = [place.frame.shown]
        if place.moment == places.BACKWARD and places.recomputed(diagnosis.frames):
            evidence.append(tr(ko="체크포인팅은 이미 켜져 있다.", en="Gradient checkpointing is on already."))
        if place.moment == places.LOGITS:
            evidence += map(words.product, diagnosis.products)
            diagnosis.findings = [one for one in diagnosis.findings if one.cause != places.LOGITS]
        diagnosis.findings.append(Finding(place.moment, sure, tuple(evidence)))


def _place_in_order(finding: Finding) -> tuple[int, int]:
    if finding.cause in _ORDER:
        order = _ORDER.index(finding.cause)
    elif finding.cause in _LATE:
        order = len(_ORDER) + 1 + _LATE.index(finding.cause)
    else:
        order = len(_ORDER)
    return SURE.index(finding.sure), order


def first_changes(diagnosis: Diagnosis, most: int = 3) -> list[str]:
    """What to try first, second, third: by the causes, the surest first; none that is on or not to be had."""
    from .changes import FIRST, WITHOUT_LIGER

    left_out = {"checkpointing"} if places.recomputed(diagnosis.frames) else set()
    if not left_out or places.offloaded(diagnosis.frames):  # there are no checkpoints, or they are moved already
        left_out.add("offload")
    if any(frame.on_windows for frame in diagnosis.frames):  # they are for Linux
        left_out.add("expandable")
    adapters = "peft" in diagnosis.libraries
    if adapters:
        left_out.add("lora")
    # Two ways to the same thing: Liger's where it has the model's kernels, else TRL's, which needs none of the model's.
    left_out.add("fused_loss" if WITHOUT_LIGER.intersection(models(diagnosis.frames)) else "fused_head")
    # Of a card that is full of something else, logits in tiles free little.
    late = {"fused_loss", "fused_head"} if diagnosis.little is not None else set()
    causes = [
        sorted((key for key in FIRST[finding.cause] if key not in left_out), key=late.__contains__)
        for finding in diagnosis.findings
    ]
    strong = max(1, sum(finding.sure != POSSIBLE for finding in diagnosis.findings))
    # The first of each cause that is more than possible, the second of the surest, what is possible, then the rest.
    order, second = [keys[:1] for keys in causes[:strong]], [keys[:2] for keys in causes[:1]]
    held: list[str] = []
    if diagnosis.little is not None and diagnosis.verdict in _OF_TRAINING and not adapters:
        # What fills the card may be weights, gradients and states: then no batch is small enough.
        held, second = ["eight_bit", "lora"], []
    order += [held[:1], *second, *(keys[:1] for keys in causes), held, *causes]
    of_card = diagnosis.foreign.kind in (foreign.CARD, foreign.LIBRARY) if diagnosis.foreign else diagnosis.message
    if of_card:  # without a message of memory there is nothing to cure
        order.append([key for key in FIRST[CANNOT_TELL] if key not in left_out])
    found = dict.fromkeys(key for keys in order for key in keys)
    return sorted(found, key=late.__contains__)[:most]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as data."""
    line = diagnosis.users_line
    return {
        "verdict": diagnosis.verdict,
        "sure": diagnosis.sure,
        "findings": [
            {"cause": one.cause, "sure": one.sure, "evidence": list(one.evidence)} for one in diagnosis.findings
        ],
        "ruled_out": diagnosis.ruled_out,
        "notes": diagnosis.notes,
        "message": diagnosis.message.json() if diagnosis.message else None,
        "messages": diagnosis.messages,
        "rank": diagnosis.rank,
        "other_ranks": list(diagnosis.other_ranks),
        "foreign": diagnosis.foreign.name if diagnosis.foreign else None,
        "users_line": {"file": line.file, "line": line.line, "function": line.function} if line else None,
        "libraries": diagnosis.libraries,
        "cards": list(diagnosis.card.cards) if diagnosis.card else [],
        "could_be_logits": [
            {"tokens": one.tokens, "vocabulary": one.vocabulary, "width": one.width, "models": list(one.models)}
            for one in diagnosis.products
        ],
    }
