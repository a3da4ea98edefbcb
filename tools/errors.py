"""Write docs/errors.md and image/errors/: how far off the predictions are, source by source, the worst first.

Every figure is read from benchmarks/judged.json, which `make truth` wrote; card, versions, licence and address of a
source are those of its rows in benchmarks/measured.

    python tools/errors.py
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT
from benchmarks.picture import draw_lines, has_error
from benchmarks.recipes.recipe import Recipe, recipes
from benchmarks.summaries import Summary, summary
from benchmarks.truth import MEASURED, Judged
from helpers.chapters.c9_planner.measured import card_name
from tools.accuracy import read_judged
from virtual_gpu.language import set_language
from virtual_gpu.units import human_bytes

PAGE = ROOT / "docs" / "errors.md"
PICTURES = ROOT / "image" / "errors"
RAN = ("run", "died")
UNSTATED = "밝히지 않음"
HEAD = """# 출처마다 얼마나 틀리나

<!-- tools/errors.py가 benchmarks/judged.json에서 쓴다. 손으로 고치지 않는다. -->

다른 사람들이 자기 GPU에서 재어 공개한 값과, 같은 프로그램을 가상 GPU에서 실행해 예측한 값을 출처마다 비교한다\
(마지막 실행 {date}, torch {torch}, `make truth`). 행이나 규칙이 바뀌면 그것이 미치는 출처만 다시 실행한다. \
출처 {sources}곳의 {rows}행 가운데 실행한 것이 {ran}행이고, 그 가운데 {counted}행의 바이트를 비교했다.

오차는 예측 ÷ 측정 − 1이다. 음수이면 적게 예측한 것이다. 중앙값과 95 %는 오차의 크기로 세고, 최악(가장 크게 \
틀린 값)은 부호까지 적는다. ‘해상도 안’은 입력이 모두 밝혀져 있는 행 가운데 측정값이 출력된 자릿수 안에서 맞은 수다. \
어떤 값에 맞춘(fit) 행은 세지 않고, 틀린 행은 모두 남긴다.

카드에서는 메모리가 부족했는데 들어간다고 한 행은 {fits}개, 카드에서는 돌았는데 부족하다고 한 행은 {died}개다. 설정이 \
다 밝혀지지 않아 세지 않은 행에서 부족하다고 한 것이 {died_aside}개 더 있다.

## 가장 크게 틀린 것부터

"""
COLUMNS = ("출처", "행", "중앙값", "95 %", "최악", "해상도 안", "실행 못 함")
PARTS = ("무엇", "카드", "행", "중앙값", "95 %", "최악", "해상도 안")


def facts() -> dict[str, dict[str, Any]]:
    """The rows of benchmarks/measured by their ids."""
    rows = (row for path in sorted(MEASURED.glob("*.json")) for row in json.loads(path.read_text(encoding="utf-8")))
    return {row["id"]: row for row in rows}


def by_source(rows: list[Judged]) -> list[tuple[str, list[Judged]]]:
    """(source, its rows): those that are farthest off first, then those that have no error, by name."""
    found = {source: [row for row in rows if row.source == source] for source in {row.source for row in rows}}

    def rank(entry: tuple[str, list[Judged]]) -> tuple:
        worst = summary(entry[1]).worst
        return worst is None, -abs(worst or 0), entry[0].lower()

    return sorted(found.items(), key=rank)


def page(judged: dict[str, Any], known: dict[str, dict[str, Any]]) -> str:
    """The page as Markdown. judged: what `read_judged` gives; known: the measured rows by id."""
    rows, sources = judged["rows"], by_source(judged["rows"])
    whole = summary(rows)
    text = HEAD.format(
        date=judged["date"], torch=judged["versions"]["torch"].partition("+")[0], sources=len(sources), rows=len(rows),
        ran=sum(row.outcome in RAN for row in rows), counted=len(whole.errors),
        fits=len(whole.fits_wrongly), died=len(whole.died_wrongly),
        died_aside=sum(row.outcome == "died" and row.kind != "oom" and not row.counts for row in rows),
    )  # fmt: skip
    lines = [_line(COLUMNS), _rule(COLUMNS, 1)]
    for source, group in sources:
        found = summary(group)
        left_out = sum(found.not_run.values())
        cells = [f"[{source}](#{anchor(source)})", *_numbers(found), _within(found), left_out or "–"]
        lines.append(_line(cells))
    text += "\n".join(lines) + "\n\n"
    return text + "\n".join(section(source, group, known) for source, group in sources)


def section(source: str, rows: list[Judged], known: dict[str, dict[str, Any]]) -> str:
    """What is known of one source: where it is from, its picture, its parts, and what was not run, and why."""
    its = [known[row.id] for row in rows]
    versions = sorted({row["settings"]["torch"] for row in its if (row.get("settings") or {}).get("torch")})
    lines = [f"## {source}", ""]
    lines.append(f"- 출처: {_address(source, its)}")
    lines.append(f"- 라이선스: {', '.join(sorted({row['licence'] for row in its}))}")
    lines.append(f"- 잰 사람의 카드: {', '.join(sorted({row['gpu'] for row in its}))}")
    lines.append(f"- 잰 사람의 PyTorch: {', '.join(versions) or UNSTATED}")
    used = {row.recipe for row in rows}
    for recipe in recipes():
        if recipe.name in used and recipe.fitted:
            lines.append(f"- 맞춘 것(통계에 넣지 않는다): {recipe.fitted_ko or recipe.fitted}")
    parts = _parts(rows)
    if parts:
        lines += ["", f"![{source}: 예측이 측정과 다른 정도](../image/errors/{_file(source)})", ""]
        lines += [_line(PARTS), _rule(PARTS, 2)]
        farthest = []
        for what, card, group in parts:
            found = summary(group)
            lines.append(_line([what, card, *_numbers(found), _within(found)]))
            worst = next(row for row in group if row.id == found.worst_id)
            if worst.error:
                sizes = f"측정 {human_bytes(worst.measured)}, 예측 {human_bytes(worst.predicted)}"
                farthest.append(f"- {_percent(worst.error, sign=True)}: `{worst.id}` ({sizes})")
        if farthest:
            lines += ["", "줄마다 가장 크게 틀린 행:", "", *farthest]
    aside = Counter(_why_aside(row) for row in rows if row.outcome in RAN and not row.counts)
    if aside:
        lines += ["", "실행했지만 세지 않은 것(이유는 벤치의 말 그대로다):", ""]
        lines += [f"- {count}행: {why}" for why, count in aside.most_common()]
    reasons = _not_run(rows, known)
    if reasons:
        lines += ["", "실행하지 않은 것(이유는 벤치와 데이터의 말 그대로다):", ""]
        lines += [f"- {count}행: {why}" for why, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def pictures(rows: list[Judged]) -> dict[str, str]:
    """File name → SVG, of each source that has bytes to compare."""
    return {
        _file(source): draw_lines(source, [(w, f"{card} ({len(its)})", its) for w, card, its in parts]).svg() + "\n"
        for source, group in by_source(rows)
        if (parts := _parts(group))
    }


def write() -> list[Path]:
    """Write page and pictures; the files that changed. A picture of a source that is no more is removed."""
    judged = read_judged()
    wanted = {PICTURES / name: svg for name, svg in pictures(judged["rows"]).items()}
    wanted[PAGE] = page(judged, facts())
    PICTURES.mkdir(exist_ok=True)
    changed = [path for path in PICTURES.iterdir() if path not in wanted]
    for path in changed:
        path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def anchor(heading: str) -> str:
    """What a heading's link is called, on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _parts(rows: list[Judged]) -> list[tuple[str, str, list[Judged]]]:
    """(what, card, rows that count and have bytes), the worst first."""
    what: dict[str, Recipe] = {recipe.name: recipe for recipe in recipes()}
    found: dict[tuple[str, str], list[Judged]] = {}
    for row in filter(has_error, rows):
        found.setdefault((row.recipe, card_name(row.gpu) or UNSTATED), []).append(row)
    parts = [(what[recipe].what_ko or what[recipe].what, card, group) for (recipe, card), group in found.items()]
    return sorted(parts, key=lambda part: (-abs(summary(part[2]).worst), part[:2]))


def _why_aside(row: Judged) -> str:
    note = row.note or "settings that are not known: evidence only"
    return (
        f"설정이 다 밝혀지지 않았고, 가상 GPU에서는 메모리가 부족했다({row.id}: {note})"
        if row.outcome == "died"
        else note
    )


def _not_run(rows: list[Judged], known: dict[str, dict[str, Any]]) -> Counter:
    """Why rows were not run; where there is no recipe, what the measured row says is missing."""
    reasons: Counter = Counter()
    for row in rows:
        if row.outcome not in RAN:
            measured = known[row.id]
            reasons[row.note or measured.get("missing") or measured.get("note") or row.outcome] += 1
    return reasons


def _address(source: str, rows: list[dict[str, Any]]) -> str:
    """Links to what was read, at its commit: the file, or the folder that holds all of them."""
    root = f"https://github.com/{source}"
    threads = sorted({row["path"] for row in rows if re.fullmatch(r"(pull|issues)/\d+", row["path"])})
    links = [f"[{path}]({root}/{path})" for path in threads]
    for commit in sorted({row["commit"] for row in rows if row.get("commit")}):
        paths = {row["path"].split(" ")[0] for row in rows if row.get("commit") == commit}
        files = sorted(path for path in paths if re.search(r"\.\w+$", path) and "*" not in path)
        if not files:
            links.append(f"[커밋 {commit[:8]}]({root}/commit/{commit})")
        elif len(files) <= 3:
            links += [f"[{path}]({root}/blob/{commit}/{path})" for path in files]
        else:
            folder = os.path.commonpath(files)
            links.append(
                f"[{folder or source}의 파일 {len(files)}개]({'/'.join([root, 'tree', commit, folder]).rstrip('/')})"
            )
    return ", ".join(links)


def _numbers(found: Summary) -> list[str]:
    percent = [_percent(found.median), _percent(found.percentile(0.95)), _percent(found.worst, sign=True)]
    return [str(len(found.errors) or "–"), *percent]


def _within(found: Summary) -> str:
    return f"{found.exact_within}\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}{found.exact}" if found.exact else "–"


def _percent(number: float | None, *, sign: bool = False) -> str:
    if number is None:
        return "–"
    if number and abs(number) < 5e-6:
        return "0.001\N{NO-BREAK SPACE}% 미만"
    text = f"{abs(number) * 100:.3f}\N{NO-BREAK SPACE}%" if number else "0\N{NO-BREAK SPACE}%"
    return ("−" if number < 0 else "+" if sign and number else "") + text


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _rule(heads: tuple[str, ...], texts: int) -> str:
    return "|" + "---|" * texts + "---:|" * (len(heads) - texts)


def _file(source: str) -> str:
    return source.replace("/", "_") + ".svg"


if __name__ == "__main__":
    set_language("ko")
    for path in write():
        print(f"wrote {path.relative_to(ROOT)}")
