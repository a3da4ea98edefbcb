"""Write how accurate the predictions are into README.md and README.ko.md: one block, made from two things.

benchmarks/judged.json is what `make truth` wrote: the rows of benchmarks/measured, which others measured on their
cards, each beside its prediction. benchmarks/records holds what `make measure-gpu` wrote on machines with a CUDA GPU;
of each GPU the newest complete record counts, or the newest where none is complete.

    python tools/accuracy.py
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT
from benchmarks.measure_gpu import NUMBERS, RECORDS, VERSION, error
from benchmarks.recipes.recipe import Recipe, recipes
from benchmarks.summaries import peers, summary
from benchmarks.truth import Judged
from helpers.chapters.c9_planner.measured import card_name
from virtual_gpu.cards import CATALOG

JUDGED = ROOT / "benchmarks" / "judged.json"
PAGES = {"en": ROOT / "README.md", "ko": ROOT / "README.ko.md"}
MARKERS = re.compile(r"(<!-- accuracy:begin -->\n).*?(<!-- accuracy:end -->)", re.DOTALL)
TEXTS = {
    "en": {
        "truth": "What others measured on their cards and published, last run on {date} (torch {torch}, "
        "`make truth`). “Exact” rows state every input and are printed finely: of these so many lie within the print. "
        "Nothing is fitted but what is named. Rows that are off stay in.",
        "heads": "| source | card | what | rows | median | worst | exact |",
        "fitted": "Fitted, and counted nowhere: {what}.",
        "wrong": "“Fits” where the card died: {fits}. Out of memory where the card was not: {died}.",
        "not run": "Not run, with the reason in the bench's output: {count} rows.",
        "peers": "On the same {count} rows, median / worst: {each}.",
        "unstated": "not stated",
        "ours": "| GPU | settings | after the first step | peak | reserved | torch | date |",
        "note": "Measured by us. Difference of the predicted from the measured in %: middle / worst of the settings.",
        "not yet": "Not yet measured by us",
    },
    "ko": {
        "truth": "다른 사람들이 자기 카드에서 재어 공개한 값을 예측한 결과다(마지막 실행 {date}, torch {torch}, "
        "`make truth`). ‘정확’은 입력이 모두 밝혀져 있고 자세히 출력된 행 가운데 출력의 해상도 안에 든 수다. "
        "적어 둔 것 말고는 맞춘(fit) 값이 없다. 틀린 행도 남긴다.",
        "heads": "| 출처 | 카드 | 무엇 | 행 | 중앙값 | 가장 나쁜 값 | 정확 |",
        "fitted": "맞춘 것(통계에 넣지 않는다): {what}.",
        "wrong": "카드에서는 죽었는데 들어간다고 한 것: {fits}개. 카드에서는 돌았는데 부족하다고 한 것: {died}개.",
        "not run": "실행하지 못한 것(이유는 벤치의 출력에 있다): {count}행.",
        "virtual card": "가상 GPU",
        "peers": "같은 {count}행에서 중앙값 / 가장 나쁜 값: {each}.",
        "unstated": "밝히지 않음",
        "ours": "| GPU | 설정 수 | 첫 스텝 직후 | 최대 | 예약 | torch | 날짜 |",
        "note": "직접 잰 값이다. 예측값이 측정값과 다른 정도(%): 여러 설정의 중앙값 / 가장 나쁜 값.",
        "not yet": "직접 재지 않은 카드",
    },
}


def read_records(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """GPU (its name in the catalogue, where it is there) → the record that counts. ValueError names a strange file."""
    chosen: dict[str, tuple[tuple, dict]] = {}
    names = {spec.device_name: name for name, spec in CATALOG.items()}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("version") != VERSION:
            raise ValueError(f"{path.name}: a record of version {record.get('version')}, and this reads {VERSION}")
        name = names.get(record["gpu"]["name"], record["gpu"]["name"])
        rank = record["complete"], record["date"], path.name
        if name not in chosen or rank > chosen[name][0]:
            chosen[name] = rank, record
    return {name: chosen[name][1] for name in sorted(chosen, key=[*CATALOG, *sorted(chosen)].index)}


def read_judged(path: Path = JUDGED) -> dict[str, Any]:
    """What `make truth` wrote: date, versions, and rows as `Judged`; no rows where it has not run."""
    if not path.exists():
        return {"rows": []}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found | {"rows": [Judged(**row) for row in found["rows"]]}


def table(language: str, records: dict[str, dict[str, Any]]) -> str:
    """Our own records in "en" or "ko": a row for each, and a line that names what is not yet measured."""
    lines, texts = [], TEXTS[language]
    if records:
        lines = [texts["ours"], "|" + "---|" * texts["ours"].count(" | ") + "---|"]
        lines += [_row(name, record) for name, record in records.items()]
        lines += ["", texts["note"]]
    if absent := [name for name in CATALOG if name not in records]:
        lines += [""] * bool(lines) + [f"{texts['not yet']}: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def truth(language: str, judged: dict[str, Any]) -> str:
    """What others measured, in "en" or "ko": a row for each source, card and program; "" where nothing was judged."""
    if not judged["rows"]:
        return ""
    texts, known = TEXTS[language], {recipe.name: recipe for recipe in recipes()}
    groups: dict[tuple[str, str, str], list[Judged]] = defaultdict(list)
    for row in judged["rows"]:
        if row.recipe in known:
            groups[row.source, row.recipe, card_name(row.gpu) or texts["unstated"]].append(row)
    heads = texts["heads"]
    lines = [texts["truth"].format(date=judged["date"], torch=judged["versions"]["torch"].partition("+")[0]), ""]
    lines += [heads, "|" + "---|" * 3 + "---:|" * (heads.count(" | ") - 2)]
    for (source, recipe, card), rows in sorted(groups.items()):
        if line := _truth_row(source, card, _what(known[recipe], language), rows):
            lines.append(line)
    used = {row.recipe for row in judged["rows"]}
    fitted = [recipe for recipe in known.values() if recipe.fitted and recipe.name in used]
    lines.append("")
    for recipe in fitted:
        lines.append(texts["fitted"].format(what=(recipe.fitted_ko if language == "ko" else "") or recipe.fitted))
    whole = summary(row for row in judged["rows"] if row.recipe in known)
    lines.append(texts["wrong"].format(fits=len(whole.fits_wrongly), died=len(whole.died_wrongly)))
    not_run = sum(row.outcome not in ("run", "died") for row in judged["rows"])
    lines.append(texts["not run"].format(count=not_run))
    by_peer = peers(judged["rows"])
    if by_peer:
        each = ", ".join(
            f"{texts.get(name, name)} {_percent(one.median)} / {_percent(one.worst)}" for name, one in by_peer.items()
        )
        lines.append(texts["peers"].format(count=len(by_peer["virtual card"].errors), each=each))
    return "\n".join(lines) + "\n\n"


def write(pages: dict[str, Path] = PAGES, folder: Path = RECORDS, judged: Path = JUDGED) -> list[Path]:
    """Put the block between each page's markers; the pages that it changed. ValueError where there are no markers."""
    records, found, changed = read_records(folder), read_judged(judged), []
    for language, page in pages.items():
        before = page.read_text(encoding="utf-8")
        if len(MARKERS.findall(before)) != 1:
            raise ValueError(f"{page.name}: the markers <!-- accuracy:begin --> and <!-- accuracy:end --> belong once")
        text = truth(language, found) + table(language, records)
        after = MARKERS.sub(lambda found, text=text: found[1] + text + found[2], before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            changed.append(page)
    return changed


def _truth_row(source: str, card: str, what: str, rows: list[Judged]) -> str:
    found = summary(rows)
    counted = len(found.errors) + (0 if found.errors else found.agreed + found.disagreed)
    if not counted:
        return ""
    exact = f"{found.exact_within} / {found.exact}" if found.exact else "–"
    if not found.errors:
        return f"| {source} | {card} | {what} | {counted} | – | – | {found.agreed} / {counted} |"
    numbers = f"{_percent(found.median)} | {_percent(found.worst, sign=True)}"
    return f"| {source} | {card} | {what} | {counted} | {numbers} | {exact} |"


def _what(recipe: Recipe, language: str) -> str:
    return (recipe.what_ko if language == "ko" else "") or recipe.what


def _percent(number: float | None, *, sign: bool = False) -> str:
    if number is None:
        return "–"
    size = f"{abs(number) * 100:.3f}" if abs(number) < 0.1 else f"{abs(number) * 100:.1f}"
    if float(size) == 0:
        return "0 %" if number == 0 else "< 0.001 %"
    return ("−" if number < 0 else "+" if sign else "") + f"{size} %"


def _row(name: str, record: dict[str, Any]) -> str:
    rows = [row for row in record["rows"] if row["kind"] == "grid"]  # a card that plays a T4 is judged otherwise
    found = {number: [e for row in rows if (e := error(row, number)) is not None] for number in NUMBERS}
    cells = [_cell(errors) for errors in found.values()]
    torch = record["versions"]["torch"].partition("+")[0]
    return "| " + " | ".join([name, str(len(found["peak_bytes"])), *cells, torch, record["date"]]) + " |"


def _cell(errors: list[float]) -> str:
    """Middle of the absolute errors, and the one that is farthest off with its sign, in %."""
    if not errors:
        return "–"
    middle = statistics.median(abs(error) for error in errors)
    return f"{middle * 100:.2f} / {max(errors, key=abs) * 100:+.2f}".replace("-", "−")


if __name__ == "__main__":
    for page in write():
        print(f"wrote {page}")
