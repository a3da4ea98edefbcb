"""The report as one page that opens anywhere: the verdict, the run as a picture, tables.

Text is HTML, and only areas are SVG, so that the page is read at any width; colours follow the reader's light or dark
theme.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from ..drawing.svg import BLUE, GREEN, GREY, MUTED, ORANGE, PURPLE, RED, SKY, YELLOW, nice_step
from ..language import language, tr
from ..units import human_bytes
from . import words
from .report import FITS, Report, line_of
from .watch import BETWEEN, CATEGORIES

COLORS = dict(zip(CATEGORIES, (BLUE, ORANGE, GREEN, PURPLE, RED, GREY, SKY, YELLOW, MUTED), strict=True))
_COLUMNS = 500  # of the picture; each shows the highest moment of the events that fall into it
_ROWS = 30
_NEAR = 1.7  # the card's line is drawn where it is no higher than this many times the picture

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2933;--muted:#5f6b76;--line:#d9dee3;--paper:#fff;--good:#0b7a53;--bad:#b3400b}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--muted:#a3adb6;--line:#3a444d;--paper:#14181c;--good:#3fc493;
--bad:#ff9a5c}}
body{font:15px/1.5 system-ui,'Noto Sans KR','Apple SD Gothic Neo','Malgun Gothic',sans-serif;max-width:60rem;
margin:2rem auto;padding:0 1rem;color:var(--ink);background:var(--paper)}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.verdict{font-size:1.15rem;padding:.5rem 1rem;border-left:6px solid var(--good)}.no{border-color:var(--bad)}
.tables{overflow-x:auto}table{border-collapse:collapse}
td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}th{color:var(--muted);font-weight:500}
.plot{display:grid;grid-template-columns:5.2rem minmax(0,1fr);grid-template-rows:14rem auto}.y,.area{position:relative}
.y span{position:absolute;right:.5rem;transform:translateY(50%);font-size:.8rem;color:var(--muted);white-space:nowrap}
.area svg{position:absolute;inset:0;width:100%;height:100%}.area{border-left:1px solid var(--muted);
border-bottom:1px solid var(--muted)}.area b{position:absolute;right:0;font-size:.8rem;color:var(--bad)}
.phases{grid-column:2;display:flex;font-size:.75rem;color:var(--muted)}
.phases span{overflow:hidden;white-space:nowrap;text-overflow:ellipsis;border-right:1px solid var(--line)}
.axis{grid-column:2;font-size:.8rem;color:var(--muted)}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem;margin:.6rem 0}
.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem;vertical-align:-.1rem}
.card{height:1.6rem;border:1px solid var(--muted);display:flex;margin-top:.3rem}.card i{min-width:0}
small{color:var(--muted)}
"""


def page(report: Report) -> str:
    """A complete HTML document."""
    title = f"{report.program}, {report.gpu}"
    said = *report.which_card, report.summary, *report.grows, *report.on_a_smaller_card, *_host(report)
    text = [f"<p>{html.escape(line)}</p>" for line in said]
    text += [f"<p>{html.escape(line)}</p>" for line in (*report.changes_made, *report.advice)]
    if report.to_write:
        text.append(f"<pre>{html.escape(chr(10).join(report.to_write))}</pre>")
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    rules = ", ".join(f"{name} ({versions})" for name, versions in report.rules.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="verdict{"" if report.judgement == FITS else " no"}">{html.escape(report.verdict)}</p>',
        *text,
        f"<h2>{tr(ko='실행', en='The run')}</h2>{_picture(report)}",
        f"<h2>{tr(ko='GPU에서 차지하는 만큼', en='Of the card')}</h2>{_card(report)}",
        *_tables(report),
        f"<h2>{tr(ko='참고', en='Notes')}</h2><ul>{notes}</ul>" if notes else "",
        f"<p><small>{tr(ko='적용한 CUDA의 규칙', en='Rules of CUDA in force')}: {html.escape(rules)}. "
        f"{tr(ko='버전', en='Versions')}: {html.escape(versions)}.</small></p>",
    ]
    return (
        f'<!doctype html><html lang="{language()}"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )


def _host(report: Report) -> list[str]:
    return [] if report.host is None else [report.host.line]


def _tables(report: Report) -> Iterable[str]:
    nbytes = tr(ko="바이트", en="bytes")
    yield _table(
        tr(ko="최대일 때", en="At the peak"),
        (nbytes, tr(ko="무엇", en="what")),
        [(human_bytes(n), words.category(name)) for name, n in report.at_peak.items() if n],
    )
    yield _table(
        tr(ko="호스트 RAM이 최대일 때", en="At the peak of the host's RAM"),
        (nbytes, tr(ko="무엇", en="what")),
        [(human_bytes(n), words.category(name)) for name, n in report.on_host() if n],
    )
    yield _table(
        tr(ko="단계별 최대", en="The peak of each phase"),
        (tr(ko="할당", en="allocated"), tr(ko="예약", en="reserved"), tr(ko="단계", en="phase")),
        [(human_bytes(a), human_bytes(r), words.phase(name)) for name, (a, r) in report.phases.items()],
    )
    yield _table(
        tr(ko="최대일 때, 모듈별", en="At the peak, by module"),
        (nbytes, tr(ko="모듈", en="module")),
        [(human_bytes(n), words.module(name)) for name, n in report.modules[:_ROWS]],
    )
    yield _table(
        tr(ko="최대일 때, 프로그램의 줄별", en="At the peak, by line of the program"),
        (nbytes, tr(ko="줄", en="line")),
        [(human_bytes(n), line_of(file, line)) for file, line, n in report.lines[:_ROWS]],
    )
    yield _table(
        tr(ko="가상 GPU에 없는 값을 물은 곳과 답", en="Values that a virtual GPU does not have, answered"),
        (tr(ko="횟수", en="times"), tr(ko="질문", en="what"), tr(ko="답", en="answer"), tr(ko="어디", en="where")),
        [(n, words.question(kind), told, where) for kind, told, where, n in report.values[:_ROWS]],
    )


def _table(title: str, heads: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(_cell(cell, heads[i]) for i, cell in enumerate(row))}</tr>" for row in rows)
    return f'<h2>{html.escape(title)}</h2><div class="tables"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: object, head: str) -> str:
    text = str(value)
    number = text[:1].isdigit() and (text.endswith("B") or text.isdigit())
    return f"<td{' class=n' if number else ''}>{html.escape(text)}</td>"


def _events(report: Report) -> list[int]:
    """The run's events up to its last allocation: then it ends, and all is released."""
    events = report.watch.events
    return events[: max((place for place, event in enumerate(events, 1) if event > 0), default=0)]


def heights(report: Report, columns: int = _COLUMNS) -> np.ndarray:
    """(at most `columns`, categories): bytes of each category, at the highest moment of each part of the run."""
    watch, sums, events = report.watch, report.categories(), _events(report)
    if not events:
        return np.zeros((0, len(CATEGORIES)), dtype=np.int64)
    moves = np.zeros((len(events), len(CATEGORIES)), dtype=np.int64)
    for place, event in enumerate(events):
        moves[place, sums[abs(event)]] = watch.blocks[abs(event)].held if event > 0 else -watch.blocks[abs(event)].held
    live = moves.cumsum(axis=0)
    bounds = np.linspace(0, len(live), min(columns, len(live)) + 1).astype(int)
    return np.array([live[a + live[a:b].sum(axis=1).argmax()] for a, b in pairwise(bounds)])


def _picture(report: Report) -> str:
    tops = heights(report)
    if not len(tops):
        return f"<p>{tr(ko='할당한 것이 없다.', en='Nothing was allocated.')}</p>"
    highest = max(report.reserved, report.allocated)
    near = report.capacity <= _NEAR * highest
    top = (max(highest, report.capacity) if near else highest) * 1.05
    unit = 2 ** (10 * min(3, int(np.log2(top) // 10)))
    step = nice_step(top / unit, 4) * unit
    ticks = [n * step for n in range(int(top // step) + 1)]
    stacked = np.concatenate([np.zeros((len(tops), 1)), tops.cumsum(axis=1)], axis=1) / top * 100
    x = np.linspace(0, 100, len(tops)) if len(tops) > 1 else np.array([0.0])
    areas = []
    for place, name in enumerate(CATEGORIES):
        if tops[:, place].any():
            upper = [f"{a:.2f},{100 - b:.2f}" for a, b in zip(x, stacked[:, place + 1], strict=True)]
            lower = [f"{a:.2f},{100 - b:.2f}" for a, b in zip(x[::-1], stacked[::-1, place], strict=True)]
            title = html.escape(words.category(name))
            areas.append(
                f'<polygon points="{" ".join(upper + lower)}" fill="{COLORS[name]}"><title>{title}</title></polygon>'
            )
    lines = "".join(
        f'<path d="M0 {100 - tick / top * 100:.2f}H100" stroke="var(--line)" vector-effect="non-scaling-stroke"/>'
        for tick in ticks
    )
    card = ""
    if near:
        y = 100 - report.capacity / top * 100
        areas.append(
            f'<path d="M0 {y:.2f}H100" stroke="var(--bad)" stroke-width="2" vector-effect="non-scaling-stroke"/>'
        )
        card = f'<b style="bottom:{100 - y:.2f}%">{html.escape(report.gpu)} {human_bytes(report.capacity)}</b>'
    labels = "".join(f'<span style="bottom:{n / top * 100:.2f}%">{human_bytes(n)}</span>' for n in ticks)
    axis = tr(ko="할당과 해제의 순서 →", en="allocations and releases, in their order →")
    alt = tr(
        ko="실행하는 동안 할당된 바이트, 종류별로 쌓음", en="bytes allocated over the run, stacked by what they are"
    )
    return (
        f'<div class="plot"><div class="y">{labels}</div><div class="area">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{alt}">{lines}'
        f'{"".join(areas)}{_reserved(report, top)}</svg>{card}</div><div class="phases">{_phases(report)}</div>'
        f'<div class="axis">{axis}</div></div>'
        + _legend([name for place, name in enumerate(CATEGORIES) if tops[:, place].any()])
    )


def _spans(report: Report) -> list[tuple[str, float, float, int]]:
    """(phase, its start and end in percent of the events, the most that was reserved in it)."""
    watch, n = report.watch, len(_events(report))
    starts = [min(start, n) for _, start in watch.spans] + [n]
    return [
        (name, start / n * 100, end / n * 100, reserved)
        for (name, start), end, reserved in zip(watch.spans, starts[1:], watch.reserved_peaks, strict=True)
        if end > start
    ]


def _reserved(report: Report, top: float) -> str:
    path = "".join(f"{'L' if i else 'M'}{a:.2f} {100 - r / top * 100:.2f}H{b:.2f}" for i, (_, a, b, r) in
                   enumerate(_spans(report)))  # fmt: skip
    return f'<path d="{path}" fill="none" stroke="var(--ink)" stroke-width="1.5" vector-effect="non-scaling-stroke"/>'


def _phases(report: Report) -> str:
    return "".join(
        f'<span style="width:{end - start:.2f}%" title="{words.phase(name)}">'
        f"{words.phase(name) if end - start > 3 and name != BETWEEN else ''}</span>"
        for name, start, end, _ in _spans(report)
    )


def _legend(names: list[str]) -> str:
    shown = [f'<span><i style="background:{COLORS[name]}"></i>{words.category(name)}</span>' for name in names]
    line = '<i style="height:.15rem;background:var(--ink);vertical-align:.25rem"></i>'
    return f'<div class="legend">{"".join(shown)}<span>{line}{tr(ko="예약", en="reserved")}</span></div>'


def _card(report: Report) -> str:
    whole = max(report.capacity, report.allocated)
    parts = "".join(
        f'<i style="width:{n / whole * 100:.3f}%;background:{COLORS[name]}" '
        f'title="{html.escape(words.category(name))}: {human_bytes(n)}"></i>'
        for name, n in report.at_peak.items()
        if n
    )
    peak, capacity = human_bytes(report.allocated), human_bytes(report.capacity)
    share = report.allocated / report.capacity
    said = tr(ko=f"최대 할당 {peak}, {capacity}의 {share:.1%}", en=f"peak {peak} of {capacity}: {share:.1%}")
    return f'<div class="card" role="img" aria-label="{said}">{parts}</div><small>{said}</small>'
