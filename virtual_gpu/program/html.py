"""The report as one page that opens anywhere: numbers, a bar of the peak, the curve of the run."""

from __future__ import annotations

import html
from typing import Any

from ..units import human_bytes
from .report import OOM, Report
from .watch import CATEGORIES

_COLORS = ("#4e79a7", "#e15759", "#b07aa1", "#f28e2b", "#edc948", "#9c755f", "#76b7b2", "#bab0ac")
_WIDTH, _HEIGHT, _POINTS, _ROWS = 900, 220, 1200, 30


def page(report: Report) -> str:
    """A complete HTML document."""
    title = f"{report.program} on {report.gpu}"
    verdict = report.text().splitlines()[0]
    tables = (
        ("At the peak", ("bytes", "what"), [(human_bytes(n), name) for name, n in report.at_peak.items() if n]),
        (
            "Phases",
            ("peak", "reserved", "phase"),
            [(human_bytes(a), human_bytes(r), name) for name, (a, r) in report.phases.items()],
        ),
        (
            "By module, at the peak",
            ("bytes", "module"),
            [(human_bytes(n), name or "(outside modules)") for name, n in report.modules[:_ROWS]],
        ),
        (
            "By line of the program, at the peak",
            ("bytes", "line"),
            [(human_bytes(n), f"{file}:{line}") for file, line, n in report.lines[:_ROWS]],
        ),
        (
            "Values answered",
            ("times", "what", "answer", "where"),
            [(n, kind, told, where) for kind, told, where, n in report.values[:_ROWS]],
        ),
    )
    body = "".join(f"<h2>{head}</h2>{_table(columns, rows)}" for head, columns, rows in tables)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    versions = html.escape(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;margin:1rem 0}}td,th{{padding:.15rem .8rem;text-align:left}}
td:first-child{{text-align:right;font-variant-numeric:tabular-nums}}svg{{max-width:100%}}
.verdict{{font-size:1.2rem;padding:.6rem 1rem;border-left:6px solid {"#e15759" if report.status == OOM else "#59a14f"}}}
</style><h1>{html.escape(title)}</h1><p class="verdict">{html.escape(verdict)}</p>
<p>Peak {human_bytes(report.allocated)} allocated, in {report.peak_phase}; {human_bytes(report.reserved)} reserved;
{report.steps} optimizer steps in {report.seconds:.1f} s.</p>
<h2>The run</h2>{_curve(report)}{_bar(report)}{body}<h2>Notes</h2><ul>{notes}</ul>
<p><small>Rules of CUDA applied: {", ".join(report.rules)}. Versions: {versions}.</small></p></html>
"""


def _table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>" if rows else "<p>none</p>"


def _bar(report: Report) -> str:
    total, x, parts = max(report.capacity, report.allocated, 1), 0.0, []
    for name, color in zip(CATEGORIES, _COLORS, strict=True):
        width = report.at_peak.get(name, 0) / total * _WIDTH
        parts.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="36" fill="{color}"><title>{name}</title></rect>')
        x += width
    return (
        f'<svg viewBox="0 0 {_WIDTH} 38" role="img" aria-label="the peak by category, of the card\'s capacity">'
        f'{"".join(parts)}<rect width="{_WIDTH}" height="36" fill="none" stroke="#888"/></svg>'
    )


def _curve(report: Report) -> str:
    live, totals = 0, []
    for event in report.watch.events:
        nbytes = report.watch.blocks[abs(event)].held
        live += nbytes if event > 0 else -nbytes
        totals.append(live)
    if not totals:
        return "<p>nothing was allocated</p>"
    step = max(1, len(totals) // _POINTS)
    highest = max(report.capacity, max(totals))
    tops = [max(totals[i : i + step]) for i in range(0, len(totals), step)]
    points = " ".join(
        f"{i * _WIDTH / max(1, len(tops) - 1):.1f},{_HEIGHT - top / highest * (_HEIGHT - 10):.1f}"
        for i, top in enumerate(tops)
    )
    line = _HEIGHT - report.capacity / highest * (_HEIGHT - 10)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="bytes allocated over the run">'
        f'<polygon points="0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}" fill="#4e79a7"/>'
        f'<line x1="0" x2="{_WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#e15759" stroke-dasharray="6 4"/></svg>'
    )
