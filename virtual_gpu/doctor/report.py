"""A diagnosis as lines for a terminal: numbers, verdict, the user's line, what to try and with which command."""

from __future__ import annotations

from ..changes import CHANGES, Change, expandable, what
from ..language import tr
from ..units import human_bytes as size
from . import foreign, places, words
from .diagnosis import CANNOT_TELL, Diagnosis, first_changes
from .sizes import others, own


def text(diagnosis: Diagnosis) -> str:
    """The whole report."""
    blocks = [_numbers(diagnosis), _verdict(diagnosis), where(diagnosis), hints(diagnosis), _try(diagnosis)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def change_of(diagnosis: Diagnosis, key: str) -> Change:
    """The change, by the name of the variable that the message gives."""
    if key == "expandable" and diagnosis.message and diagnosis.message.variable:
        return expandable(diagnosis.message.variable)
    return CHANGES[key]


def command(diagnosis: Diagnosis, key: str) -> str | None:
    """The command that tries a change on a virtual card; None where a virtual card cannot show it."""
    change = change_of(diagnosis, key)
    run = None if change.options is None else diagnosis.run(*change.options)
    return run and " ".join(filter(None, [change.environment, run]))


def numbers(diagnosis: Diagnosis) -> tuple[str, list[tuple[str, str, str]]]:
    """(whose they are, the message's numbers as (letter, size, meaning)); no rows where it has none."""
    message = diagnosis.message
    if message is None:
        return "", []
    rank = "" if diagnosis.rank is None else f"rank {diagnosis.rank}, "
    device = "" if message.device is None else f"GPU {message.device}"
    cards = diagnosis.card.cards if diagnosis.card else ()
    guessed = tr(ko=f" ({', '.join(cards)}의 용량)", en=f" (the capacity of: {', '.join(cards)})") if cards else ""
    title = f"{rank}{device}{guessed}".strip() or "GPU"
    mine, rest = own(message), others(message)
    rows = [
        ("T", tr(ko="요청", en="tried to allocate"), message.tried),
        ("F", tr(ko="남음", en="free"), message.free),
        ("R", tr(ko="예약했지만 비어 있음", en="reserved but unallocated"), message.cached),
        ("", tr(ko="텐서", en="allocated"), message.allocated),
        ("", tr(ko="그 가운데 CUDA 그래프의 풀", en="of that, in private pools (CUDA graphs)"), message.private),
        ("", tr(ko="이 프로세스 전체", en="this process in all"), mine),
        ("", tr(ko="다른 프로세스", en="others"), rest),
        ("", tr(ko="한도", en="allowed"), message.allowed),
        ("", tr(ko="카드 전체", en="capacity"), message.total),
    ]
    return title, [(letter, size(one.bytes), name) for letter, name, one in rows if one]


def _numbers(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.message is None:
        return []
    title, rows = numbers(diagnosis)
    lines = [title, *(f"  {letter:1} {number:>11}  {name}" for letter, number, name in rows)]
    if diagnosis.messages > 1:
        ranks = ", ".join(map(str, diagnosis.other_ranks))
        also = tr(ko=f" (rank {ranks}에도)", en=f" (ranks {ranks} too)") if ranks else ""
        more = diagnosis.messages - 1
        lines.append(tr(ko=f"  서로 다른 메시지가 {more}개 더 있다{also}.", en=f"  {more} other messages{also}."))
    return lines


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in a line: a cause, or the place where it died, which need not be what filled the card."""
    head = tr(ko="진단", en="Verdict")
    if diagnosis.findings:
        if diagnosis.verdict in places.MOMENTS:
            head = tr(ko="죽은 자리", en="Died in")
        return f"{head}: {words.cause(diagnosis.verdict)} ({words.sure(diagnosis.sure)})"
    if diagnosis.message is None:
        return f"{head}: " + tr(ko="메모리 부족 메시지를 찾지 못했다.", en="No out-of-memory message was found.")
    return f"{head}: {words.cause(CANNOT_TELL)}"


def _verdict(diagnosis: Diagnosis) -> list[str]:
    lines = [headline(diagnosis)]
    if diagnosis.findings:
        first, *more = diagnosis.findings
        lines += [f"  {line}" for line in first.evidence]
        for one in more:
            lines.append(f"- {words.cause(one.cause)} ({words.sure(one.sure)})")
            lines += [f"  {line}" for line in one.evidence]
    if diagnosis.foreign:
        lines.append(f"  {foreign.says(diagnosis.foreign)}")
    return lines + [f"- {line}" for line in [*diagnosis.ruled_out, *diagnosis.notes]]


def where(diagnosis: Diagnosis) -> list[str]:
    """The user's last line, and the libraries that it went through."""
    line, lines = diagnosis.users_line, []
    if line:
        lines.append(tr(ko=f"내 마지막 줄: {line.shown}", en=f"Your last line: {line.shown}"))
    if diagnosis.libraries:
        through = ", ".join(diagnosis.libraries)
        lines.append(tr(ko=f"거쳐 간 라이브러리: {through}", en=f"Through: {through}"))
    return lines


def hints(diagnosis: Diagnosis) -> list[str]:
    """What the size of the request could be a product of, where the verdict does not say so already."""
    if not diagnosis.products or any(one.cause == places.LOGITS for one in diagnosis.findings):
        return []
    tried = size(diagnosis.message.tried.bytes) if diagnosis.message and diagnosis.message.tried else ""
    return [f"{tried}: {words.products(diagnosis.products_by_chance)}", *(
        f"  {words.product(one)}" for one in diagnosis.products
    )]  # fmt: skip


def _how_to_run() -> str:
    return tr(
        ko="virtual-gpu run은 그렇게 바꾼 프로그램이 가상 카드에 들어가는지 센다.\n"
        "명령에 --change나 환경 변수가 있으면 프로그램을 그대로 두고, 없으면 먼저 고치고 실행한다.\n"
        "프로그램에 주던 인자는 명령 끝에 붙인다.",
        en="virtual-gpu run counts whether the program, so changed, fits on a virtual card.\n"
        "Where the command has --change or a variable, leave the program as it is; else make the change first.\n"
        "The program's own arguments go at the end of the command.",
    )


def _try(diagnosis: Diagnosis) -> list[str]:
    lines: list[str] = []
    keys = first_changes(diagnosis)
    for number, key in enumerate(keys, 1):
        lines += [f"{number}. {what(key)}", *(f"   {line}" for line in change_of(diagnosis, key).lines)]
        if tried := command(diagnosis, key):
            lines.append(f"   $ {tried}")
    if any(command(diagnosis, key) for key in keys):
        lines += ["", *_how_to_run().splitlines()]
    head = tr(ko="해 볼 것, 이 순서로:", en="Try, in this order:")
    if diagnosis.foreign and diagnosis.foreign.kind == foreign.HOST:
        counts = tr(
            ko="무엇이 RAM을 얼마나 쓰는지는 GPU 없이 셀 수 있다(Colab 대신 Kaggle이나 '32GB'처럼 쓴다):",
            en="What takes how much of the RAM is counted without a GPU (Colab, Kaggle, or a size as 32GB):",
        )
        lines += [counts, f"   $ virtual-gpu run --host Colab {diagnosis.program or 'program.py'}"]
    return [head, *lines] if lines else []
