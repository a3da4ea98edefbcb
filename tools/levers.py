"""Write docs/levers.md: the levers against an out-of-memory error in one table, with the lines to write.

Every figure is read from benchmarks/levers.json, which `python -m benchmarks.levers` wrote by running each lever's
program on its virtual card. A lever that was not run there has no figure here.

    python tools/levers.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.levers.__main__ import RECORD
from benchmarks.levers.catalogue import BASES, LEVERS, Lever
from tools.lever_claims import section
from tools.lever_words import BASE_WORDS as ONE_CARD
from tools.lever_words import GROUPS, HEAD, PHASES, RESULTS, TAIL
from tools.lever_words import WORDS as ON_ONE_CARD
from tools.lever_words_cards import CARD_BASE_WORDS, CARD_GROUPS, CARD_WORDS, CARDS_HEAD, CARDS_WAITING
from virtual_gpu.cards import card
from virtual_gpu.shards.nccl import of_groups
from virtual_gpu.units import GiB

WORDS, BASE_WORDS = ON_ONE_CARD | CARD_WORDS, ONE_CARD | CARD_BASE_WORDS
PAGE = RECORD.parent.parent / "docs" / "levers.md"


def read() -> dict[str, Any]:
    """The record of benchmarks/levers."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def page(record: dict[str, Any]) -> str:
    """The page's text."""
    rows = record["rows"]
    some = rows[next(iter(rows))]["base"]["versions"]
    text = HEAD.format(
        date=record["date"],
        bases="\n".join(base_row(base, rows[base]["base"]) for base in BASES if base in rows),
        **{name: some[name].split("+")[0] for name in ("torch", "transformers", "peft")},
    )
    text += sections(GROUPS, "##", table, rows)
    two, more = (f"{of_groups((size,)).likely / 2**20:.0f}" for size in (2, 3))
    text += CARDS_HEAD.format(two=two, more=more) + sections(CARD_GROUPS, "###", table_of_cards, rows)
    tail = TAIL.format(waiting=waiting(rows))
    return f"{text}\n## 주장을 계산해 보기\n\n{section(rows)}\n{tail}{CARDS_WAITING}"


def sections(groups: dict[str, str], mark: str, table: Callable, rows: dict[str, Any]) -> str:
    """Each group's levers that were run: what they take, and the lines to write."""
    ran = {key for row in rows.values() for key in row}
    text = ""
    for group, title in groups.items():
        levers = [lever for lever in LEVERS if lever.group == group and lever.key in ran]
        if levers:
            text += f"\n{mark} {title}\n\n{table(levers, rows)}\n\n{lines(levers, rows)}\n"
    return text


def waiting(rows: dict[str, Any]) -> str:
    """The levers that the record lacks, by program."""
    found = []
    for base in BASES:
        lacking = [
            WORDS[lever.key].title for lever in LEVERS if base in lever.bases and lever.key not in rows.get(base, {})
        ]
        if lacking:
            found.append(f"- `{base}`({BASE_WORDS[base]}): {'; '.join(lacking)}")
    if not found:
        return "없다."
    said = "아래의 레버는 프로그램만 있고 이 기록에 실행한 값이 없다. 값이 없는 것은 표에 적지 않는다."
    return "\n".join((said, "", *found))


def base_row(base: str, row: dict[str, Any]) -> str:
    limit = card(BASES[base].card).capacity_bytes
    fits = "들어간다" if row["fits"] else "들어가지 않는다"
    return f"| `{base}` | {BASE_WORDS[base]} | {gib(row['peak'])} | {PHASES[row['phase']]} | {gib(limit)} | {fits} |"


def table(levers: list[Lever], rows: dict[str, Any]) -> str:
    """What each lever takes, a column for each program of the group."""
    bases = [base for base in BASES if base in rows and any(base in lever.bases for lever in levers)]
    heads = "".join(f" `{base}` |" for base in bases)
    found = [f"| 레버 |{heads} 연산 | 오가는 양 | 결과 | 참고 |", f"|---|{'---:|' * (len(bases) + 2)}---|---|"]
    start = " | ".join(gib(rows[base]["base"]["peak"]) for base in bases)
    found.append(f"| (출발점) | {start} |  |  |  |  |")
    for lever in levers:
        cells = " | ".join(cell(rows[base], lever.key) for base in bases)
        largest = next(base for base in reversed(bases) if lever.key in rows[base])
        words = WORDS[lever.key]
        flops = "세지 못함" if lever.kernels else more(rows[largest], lever.key)
        found.append(
            f"| {words.title} | {cells} | {flops} | {traffic(rows[largest][lever.key])} | "
            f"{RESULTS.get(lever.result, '같다')} | {words.note} |"
        )
    return "\n".join(found)


def table_of_cards(levers: list[Lever], rows: dict[str, Any]) -> str:
    """What one of several cards takes, has reserved and sends."""
    bases = [base for base in BASES if base in rows and any(base in lever.bases for lever in levers)]
    heads = "".join(f" `{base}` | 예약 | 보내는 양 |" for base in bases)
    found = [f"| 레버 |{heads} 연산 | 결과 | 참고 |", f"|---|{'---:|' * (3 * len(bases) + 1)}---|---|"]

    def cells(key: str) -> str:
        return " | ".join(cells_of_card(rows[base], key) for base in bases)

    found.append(f"| (출발점) | {cells('base')} |  |  |  |")
    for lever in levers:
        words = WORDS[lever.key]
        largest = next(base for base in reversed(bases) if lever.key in rows[base])
        note = words.note.format(traffic=traffic(rows[largest][lever.key]))
        flops = "세지 못함" if lever.kernels else more(rows[largest], lever.key)
        found.append(f"| {words.title} | {cells(lever.key)} | {flops} | {RESULTS.get(lever.result, '같다')} | {note} |")
    return "\n".join(found)


def cells_of_card(rows: dict[str, Any], key: str) -> str:
    if key not in rows:
        return " |  | "
    row = rows[key]
    peak = gib(row["peak"]) if key == "base" else cell(rows, key)
    return f"{peak} | {gib(row['reserved'])} | {row['sent'] / 1e9:.1f} GB"


def cell(rows: dict[str, Any], key: str) -> str:
    """The peak, and how it differs from the start's."""
    if key not in rows:
        return ""
    peak, start = rows[key]["peak"], rows["base"]["peak"]
    change = f"{(peak / start - 1) * 100:+.0f}%".replace("-", "−")
    text = f"{gib(peak)} ({change})"
    return f"**{text}**" if rows[key]["fits"] else text


def more(rows: dict[str, Any], key: str) -> str:
    change = rows[key]["flops"] / rows["base"]["flops"] - 1
    return "" if abs(change) < 0.0005 else f"{change * 100:+.1f}%".replace("-", "−")


def traffic(row: dict[str, Any]) -> str:
    return f"{row['traffic'] / 1e9:.1f} GB" if row["traffic"] > 1e8 else ""


def lines(levers: list[Lever], rows: dict[str, Any]) -> str:
    """The lines to write."""
    found = [
        "| 레버 | `TrainingArguments`(`SFTConfig`) | 직접 쓴 루프 | 언제부터 | 실행한 버전 |",
        "|---|---|---|---|---|",
    ]
    for lever in levers:
        words = WORDS[lever.key]
        trainer, loop = (
            "<br>".join(f"`{line}`" if "`" not in line else line for line in text.splitlines())
            for text in (words.trainer, words.loop)
        )
        row = next(row[lever.key] for row in rows.values() if lever.key in row)
        ran = ", ".join(f"{package} {row['versions'][package]}" for package in lever.needs)
        found.append(f"| {words.title} | {trainer} | {loop} | {words.since} | {ran} |")
    return "\n".join(found)


def gib(nbytes: float) -> str:
    return f"{nbytes / GiB:.2f}"


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
    print(f"wrote {PAGE}")
