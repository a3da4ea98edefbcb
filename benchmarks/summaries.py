"""Judged rows as numbers and as a table: median, 95th percentile and worst, source by source."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """Of some judged rows: how many were run and count, and how far off they are.

    errors: predicted over measured, less 1, of the rows that count. exact, exact_within: rows graded exact, and those
    of them within their resolution. died_wrongly, fits_wrongly: the virtual card ran out of memory where the card did
    not, and the reverse. agreed, disagreed: rows that have no bytes to compare. aside: why rows count nowhere, and how
    many; not_run: the same of what could not be run.
    """

    errors: list[float] = field(default_factory=list)
    worst_id: str = ""
    exact: int = 0
    exact_within: int = 0
    near: int = 0
    died_wrongly: list[str] = field(default_factory=list)
    fits_wrongly: list[str] = field(default_factory=list)
    agreed: int = 0
    disagreed: int = 0
    aside: Counter = field(default_factory=Counter)
    not_run: Counter = field(default_factory=Counter)

    @property
    def median(self) -> float | None:
        """Of the errors' sizes."""
        return statistics.median(map(abs, self.errors)) if self.errors else None

    @property
    def worst(self) -> float | None:
        """The error that is farthest off, with its sign."""
        return max(self.errors, key=abs) if self.errors else None

    def percentile(self, share: float) -> float | None:
        """The size of error that this share of the rows does not exceed."""
        if not self.errors:
            return None
        ordered = sorted(map(abs, self.errors))
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(rows: Iterable[Any]) -> Summary:
    """Of `Judged` rows."""
    found = Summary()
    for row in rows:
        if row.outcome not in ("run", "died"):
            found.not_run[f"{row.outcome}: {row.note}" if row.note else row.outcome] += 1
            continue
        if not row.counts:
            found.aside[row.note or "settings that are not known: evidence only"] += 1
            continue
        if row.kind == "oom" and row.outcome == "run":
            found.fits_wrongly.append(row.id)
            continue
        if row.kind != "oom" and row.outcome == "died":
            found.died_wrongly.append(row.id)
            continue
        if row.agrees is not None:
            found.agreed, found.disagreed = found.agreed + row.agrees, found.disagreed + (not row.agrees)
        if row.error is None:
            continue
        found.errors.append(row.error)
        if abs(row.error) == max(map(abs, found.errors)):
            found.worst_id = row.id
        found.exact += row.grade == "exact"
        found.exact_within += row.grade == "exact" and bool(row.within)
        found.near += row.grade == "near"
    return found


def grouped(rows: Iterable[Any]) -> dict[tuple[str, str], list[Any]]:
    """(source, recipe) → its rows, in their order."""
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        found[row.source, row.recipe].append(row)
    return dict(sorted(found.items()))


def peers(rows: Sequence[Any]) -> dict[str, Summary]:
    """What other predictors said of the same rows, name → their summary; ours beside them as "virtual card"."""
    found: dict[str, Summary] = {}
    for row in rows:
        if row.peers and row.measured and row.error is not None and row.counts:
            for name, nbytes in {"virtual card": row.predicted, **row.peers}.items():
                found.setdefault(name, Summary()).errors.append(nbytes / row.measured - 1)
    return found


def table(rows: Sequence[Any], *, every_row: bool = False) -> str:
    """Every source with its numbers, then the rows that are off (or every row), and what could not be run.

    exact: rows graded so, and how many of them lie within their print; of rows without bytes, how many agree.
    """
    head = f"{'source · recipe':<52}{'run':>5}{'median':>9}{'95 %':>9}{'worst':>9}{'exact':>10}{'wrong fits':>11}"
    lines = [head, "-" * len(head)]
    ran = [(key, group, summary(group)) for key, group in grouped(rows).items() if key[1]]
    for (source, recipe), _, found in ran:
        exact = f"{found.exact_within}/{found.exact}" if found.exact else ""
        if not found.errors and found.agreed + found.disagreed:
            exact = f"{found.agreed}/{found.agreed + found.disagreed}"
        wrong = len(found.fits_wrongly) + len(found.died_wrongly)
        counted = len(found.errors) + found.agreed + found.disagreed
        lines.append(
            f"{_short(source, 34) + ' · ' + recipe:<52}{counted:>5}{_percent(found.median):>9}"
            f"{_percent(found.percentile(0.95)):>9}{_percent(found.worst, sign=True):>9}{exact:>10}{wrong or '':>11}"
        )
    for (source, recipe), group, found in ran:
        shown = [row for row in group if every_row or _is_off(row)]
        if shown or found.not_run or found.aside:
            lines += ["", f"{source} · {recipe}"]
        lines += [_line(row) for row in shown if row.outcome in ("run", "died")]
        lines += [f"  {count} rows count nowhere: {why}" for why, count in found.aside.most_common()]
        lines += [f"  {count} rows {why}" for why, count in found.not_run.most_common()]
        for name, peer in peers(group).items():
            lines.append(
                f"  {name}: median {_percent(peer.median)}, worst {_percent(peer.worst, sign=True)} "
                f"of {len(peer.errors)} rows"
            )
    without = Counter((row.source, row.kind, row.grade) for row in rows if row.outcome == "no recipe")
    if without:
        lines += ["", "no recipe"]
        lines += [
            f"  {count:>4}  {source} ({kind}, {grade})" for (source, kind, grade), count in sorted(without.items())
        ]
    malformed = [row for row in rows if row.outcome == "malformed"]
    if malformed:
        lines += ["", "malformed", *(f"  {row.id}: {row.note}" for row in malformed)]
    return "\n".join(lines)


def _is_off(row: Any) -> bool:
    if row.outcome == "died":
        return row.kind != "oom" or row.agrees is False
    if row.outcome != "run":
        return False
    return row.within is False and (row.grade == "exact" or row.error is None or abs(row.error) > 0.01)


def _line(row: Any) -> str:
    if row.error is None:
        return f"  {row.id}: {row.note or row.outcome}" + ("" if row.agrees is None else f" (agrees: {row.agrees})")
    reach = f" [{row.low:,} to {row.high:,}]" if row.low is not None else ""
    return (
        f"  {'' if row.within else '≠ '}{row.id}: measured {row.measured:,} ± {row.resolution:,}, "
        f"predicted {row.predicted:,}{reach} ({row.predicted - row.measured:+,}, {row.error:+.3%})"
        + (f"; {row.note}" if row.note else "")
    )


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _percent(number: float | None, *, sign: bool = False) -> str:
    if number is None:
        return ""
    return f"{number:+.3%}" if sign else f"{number:.3%}"
