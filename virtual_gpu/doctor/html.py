"""A diagnosis as HTML for a notebook: the verdict first, then its evidence, what it is not, and what to try."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..changes import what
from ..language import tr
from . import foreign, words
from .diagnosis import Diagnosis, first_changes
from .report import change_of, command, headline, hints, numbers, where

_LEFT = "text-align:left;vertical-align:top"
_VERDICT = "font-size:1.1em;font-weight:bold;padding:6px 12px;border-left:6px solid"
_CERTAIN, _LIKELY, _POSSIBLE, _NONE = "#0b7a53", "#0072b2", "#b36b00", "#6b7280"
_COLORS = {"certain": _CERTAIN, "likely": _LIKELY, "possible": _POSSIBLE, None: _NONE}


def page(diagnosis: Diagnosis) -> str:
    """A fragment of HTML; whatever the message held is escaped."""
    first, *more = diagnosis.findings or [None]
    parts = [f'<p style="{_VERDICT} {_COLORS[diagnosis.sure]}">{escape(headline(diagnosis))}</p>']
    if first:
        parts.append(_items(tr(ko="근거", en="Evidence"), first.evidence))
    if diagnosis.foreign:
        parts.append(f"<p>{escape(foreign.says(diagnosis.foreign))}</p>")
    others = [" ".join([f"{words.cause(one.cause)} ({words.sure(one.sure)}).", *one.evidence]) for one in more]
    parts += [
        _items(tr(ko="그 밖에", en="Besides"), others),
        _items(tr(ko="아닌 것", en="What it is not"), diagnosis.ruled_out),
        _items(tr(ko="참고", en="Notes"), [*diagnosis.notes, *where(diagnosis), *map(str.strip, hints(diagnosis))]),
        _numbers(diagnosis),
        _changes(diagnosis),
    ]
    return "".join(parts)


def _items(head: str, texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<p><b>{escape(head)}</b></p><ul>{items}</ul>" if items else ""


def _numbers(diagnosis: Diagnosis) -> str:
    title, rows = numbers(diagnosis)
    body = "".join(
        f'<tr><td style="{_LEFT}">{escape(letter)}</td><td style="text-align:right">{escape(size)}</td>'
        f'<td style="{_LEFT}">{escape(name)}</td></tr>'
        for letter, size, name in rows
    )
    return f"<p><b>{escape(title)}</b></p><table>{body}</table>" if body else ""


def _changes(diagnosis: Diagnosis) -> str:
    rows = []
    keys = first_changes(diagnosis)
    commands = [command(diagnosis, key) for key in keys]
    heads = [
        tr(ko="해 볼 것, 이 순서로", en="Try, in this order"),
        "Trainer",
        tr(ko="직접 쓴 코드, 터미널", en="a loop of one's own, the terminal"),
    ]
    if any(commands):
        heads.append(
            tr(ko="가상 카드에서(--change가 없으면 고친 뒤)", en="on a virtual card (without --change: changed so)")
        )
    for number, (key, tried) in enumerate(zip(keys, commands, strict=True), 1):
        change = change_of(diagnosis, key)
        loop = "\n".join(filter(None, [change.loop, change.shell and f"$ {change.shell}"]))
        cells = [
            escape(f"{number}. {what(key)}"),
            *map(_code, (change.trainer or change.subclass, loop, tried and f"$ {tried}")),
        ]
        rows.append("<tr>" + "".join(f'<td style="{_LEFT}">{cell}</td>' for cell in cells[: len(heads)]) + "</tr>")
    head = "".join(f'<th style="{_LEFT}">{escape(text)}</th>' for text in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>" if rows else ""


def _code(text: str | None) -> str:
    return f'<pre style="margin:0;font-family:monospace;white-space:pre-wrap">{escape(text)}</pre>' if text else ""
