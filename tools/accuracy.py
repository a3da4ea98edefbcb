"""Write how accurate the predictions are into README.md and README.ko.md, from the records of benchmarks/records.

python tools/accuracy.py

A record is what `make measure-gpu` wrote on a machine with a CUDA GPU. Of each GPU the newest complete record counts,
or the newest where none is complete.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT
from benchmarks.measure_gpu import NUMBERS, RECORDS, VERSION, error
from virtual_gpu.cards import CATALOG

PAGES = {"en": ROOT / "README.md", "ko": ROOT / "README.ko.md"}
MARKERS = re.compile(r"(<!-- accuracy:begin -->\n).*?(<!-- accuracy:end -->)", re.DOTALL)
HEADS = {
    "en": "| GPU | settings | after the first step | peak | reserved | torch | date |",
    "ko": "| GPU | 설정 수 | 첫 스텝 직후 | 최대 | 예약 | torch | 날짜 |",
}
NOTES = {
    "en": "Difference of the predicted from the measured in %: middle / worst of the settings.",
    "ko": "예측값이 측정값과 다른 정도(%)다. 여러 설정의 가운데값 / 가장 나쁜 값.",
}
NOT_YET = {"en": "not yet measured", "ko": "아직 재지 않음"}


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


def table(language: str, records: dict[str, dict[str, Any]]) -> str:
    """The table in "en" or "ko": a row for each record, and a line that names what is not yet measured."""
    lines = []
    if records:
        lines = [HEADS[language], "|" + "---|" * HEADS[language].count(" | ") + "---|"]
        lines += [_row(name, record) for name, record in records.items()]
        lines += ["", NOTES[language]]
    if absent := [name for name in CATALOG if name not in records]:
        lines += [""] * bool(lines) + [f"{NOT_YET[language].capitalize()}: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def write(pages: dict[str, Path] = PAGES, folder: Path = RECORDS) -> list[Path]:
    """Put the table between each page's markers; the pages that it changed. ValueError where there are no markers."""
    records, changed = read_records(folder), []
    for language, page in pages.items():
        before = page.read_text(encoding="utf-8")
        if len(MARKERS.findall(before)) != 1:
            raise ValueError(f"{page.name}: the markers <!-- accuracy:begin --> and <!-- accuracy:end --> belong once")
        text = table(language, records)
        after = MARKERS.sub(lambda found, text=text: found[1] + text + found[2], before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            changed.append(page)
    return changed


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
