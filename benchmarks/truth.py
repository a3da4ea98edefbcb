"""What others measured on real cards, beside what the virtual card says: `python benchmarks/truth.py FILE …`.

FILE holds rows in the format of benchmarks/measured/README.md (a JSON list, or one object a line); without one, those
of benchmarks/measured. For every row that a recipe (benchmarks/recipes) handles, the program of its source is run on
the virtual card. Printed are, source by source: rows, median, 95th percentile and worst error, exact rows within their
resolution, "fits" where the card died and the reverse, what could not be run and why.

A row that is malformed, of a kind that is not known, or without a recipe is named and counted; it stops nothing. Each
recipe runs in a process of its own, and those that need older libraries in an environment with them.

    python benchmarks/truth.py ../shared/measurements.json --source linkedin/Liger-Kernel --rows
    python benchmarks/truth.py --json judged.json
    python benchmarks/truth.py --source liger --update judged.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import emit, run
from benchmarks.environments import CannotBuild, python_with
from benchmarks.recipes.recipe import Prediction, Recipe, Refused, Row, recipes
from benchmarks.summaries import table
from virtual_gpu import terminal

MEASURED = Path(__file__).resolve().parent / "measured"
KINDS = ("measurement", "trace", "oom", "capacity", "derived", "fact")
SECONDS = 600  # for a row of a recipe, those of one environment together
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_TEXTS = ("id", "kind", "source", "metric")
_OPTIONAL = ("model", "gpu", "note", "path")


@dataclass
class Judged:
    """A row and what became of it.

    outcome: "run", "died" (the virtual card ran out of memory), "refused" (by the recipe, or no environment), "failed"
    (the program failed), "no recipe", "malformed". measured, predicted, resolution in bytes; low, high: where the
    prediction is a range; agrees: of what has no bytes. counts: whether it is part of the statistics (not where it was
    fitted on, nor where the row says that its settings are not known).
    """

    id: str
    source: str
    kind: str
    metric: str
    gpu: str
    grade: str
    recipe: str
    outcome: str
    measured: int | None = None
    predicted: int | None = None
    resolution: int = 0
    low: int | None = None
    high: int | None = None
    agrees: bool | None = None
    counts: bool = True
    note: str = ""
    seconds: float = 0.0
    peers: dict[str, int] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; of a range, from its nearest end. None where there is nothing to compare."""
        if self.outcome != "run" or self.measured is None or self.predicted is None:
            return None
        nearest = self.predicted
        if self.low is not None and self.high is not None:
            nearest = min(max(self.measured, self.low), self.high)
        if nearest == self.measured:
            return 0.0
        return nearest / self.measured - 1 if self.measured else float("inf")

    @property
    def within(self) -> bool | None:
        """Whether the prediction lies within what the measurement resolves."""
        if self.agrees is not None:
            return self.agrees
        if self.error is None:
            return None
        low, high = (end if end is not None else self.predicted for end in (self.low, self.high))
        return low - self.resolution <= self.measured <= high + self.resolution


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> list[Any]:
    """The objects of a file: a JSON list, one object a line, or both. ValueError names the line that is neither."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        return found if isinstance(found, list) else [found]
    except json.JSONDecodeError:
        rows: list[Any] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip().rstrip(",")
        if line in ("", "[", "]"):
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error.msg}") from error
    return rows


def why_malformed(row: Any) -> str:
    """What is wrong with a row; "" where nothing is."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, not an object"
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            return f"has no {name}"
    if row["kind"] not in KINDS:
        return f"is of the kind {row['kind']!r}, and known are {', '.join(KINDS)}"
    for name in ("value_bytes", "resolution_bytes"):
        if not _is_size(row.get(name)):
            return f"has no number as {name}: {row[name]!r:.80}"
    peers = row.get("peers") or {}
    if not isinstance(peers, dict) or not all(map(_is_size, peers.values())):
        return f"has no numbers as peers: {peers!r:.80}"
    if not isinstance(row.get("settings") or {}, dict):
        return f"has no object as settings: {row['settings']!r}"
    for name in _OPTIONAL:
        if not isinstance(row.get(name) or "", str):
            return f"has no text as {name}: {row[name]!r}"
    return ""


def _is_size(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**62  # NaN is not


def whole(row: Row) -> dict[str, Any]:
    """A row with the optional fields that it lacks, empty: recipes need not ask whether they are there."""
    return {**row, "settings": row.get("settings") or {}, **{name: row.get(name) or "" for name in _OPTIONAL}}


# -- judging ----------------------------------------------------------------------------------------------------------


def judge(row: Row, recipe: Recipe) -> Judged:
    """Run a row's program on the virtual card, here and now."""
    import torch

    found = blank(row, recipe.name, "run")
    if row["id"] in recipe.fitted_on:
        found.counts, found.note = False, f"fitted on this row: {recipe.fitted}"
    began = time.perf_counter()
    try:
        predicted = recipe.predict(recipe.of(row))
        if not isinstance(predicted, Prediction):
            predicted = Prediction(int(predicted))
        found.predicted, found.low, found.high = predicted.nbytes, predicted.low, predicted.high
        found.agrees, found.note = predicted.agrees, found.note or predicted.note
        if predicted.measured is not None:
            found.measured = predicted.measured
        found.outcome = "died" if predicted.died else "run"
        if predicted.given:
            found.counts, found.note = False, "given: what the recipe starts from"
    except Refused as refusal:
        found.outcome, found.note = "refused", str(refusal)
    except torch.OutOfMemoryError as error:
        found.outcome, found.note = "died", str(error).partition(". ")[2].partition(". ")[0]
    except Exception as error:  # one row's program must not take the others with it; it is named, and counted
        found.outcome, found.note = "failed", f"{type(error).__name__}: {error}"[:300]
    found.peers = dict(recipe.peers(row))
    found.seconds = round(time.perf_counter() - began, 2)
    return found


def blank(row: Any, recipe: str, outcome: str, note: str = "") -> Judged:
    """What is known of a row before it is run."""
    row = row if isinstance(row, dict) else {}
    texts = {name: str(row.get(name) or "?") for name in (*_TEXTS, "gpu")}
    measured, resolution = (
        round(row[name]) if row.get(name) is not None and _is_size(row[name]) else None
        for name in ("value_bytes", "resolution_bytes")
    )
    grade = str(row.get("reproducibility") or "?")
    return Judged(
        **texts,
        grade=grade,
        recipe=recipe,
        outcome=outcome,
        measured=measured,
        resolution=resolution or 0,
        counts=grade != "no",
        note=note,
    )


def judged(rows: Iterable[Any], *, jobs: int = 1) -> list[Judged]:
    """Every row, in its recipes' processes. One that two recipes handle is judged by both."""
    found: list[Judged] = []
    batches: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        if why := why_malformed(row):
            found.append(blank(row, "", "malformed", why))
            continue
        row = whole(row)
        handled = [recipe for recipe in recipes() if recipe.handles(row)]
        if not handled:
            found.append(blank(row, "", "no recipe"))
        for recipe in handled:
            try:
                packages = recipe.packages(recipe.of(row))
            except Refused as refusal:
                found.append(blank(row, recipe.name, "refused", str(refusal)))
                continue
            batches.setdefault((recipe.name, packages), []).append(row)
    total = len(found) + sum(map(len, batches.values()))
    with ThreadPoolExecutor(jobs) as pool:
        for batch in pool.map(_in_a_process, batches, batches.values()):
            found += batch
            terminal.tell(f"{len(found)} of {total} rows are judged")
    return found


def _in_a_process(key: tuple[str, tuple[str, ...]], rows: list[Row]) -> list[Judged]:
    name, packages = key
    try:
        python = python_with(packages)
    except CannotBuild as error:
        reason = f"no environment with {', '.join(packages)}: {str(error).strip().splitlines()[-1]}"
        return [blank(row, name, "refused", reason) for row in rows]
    found: list[Judged] = []
    while rest := rows[len(found) :]:  # one that ends its process is named, and the others go on without it
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(rest, file)
            file.flush()
            command = [str(python), __file__, "--inside", name, file.name]
            child = run(command, SECONDS * len(rest), _OFFLINE, told=f"{name}, {len(rest)} rows")
        found += [Judged(**row) for row in child.rows]
        if len(child.rows) < len(rest):
            ended = "ran out of time" if child.returncode is None else f"ended with {child.returncode}"
            why = f"the process {ended}: {child.last_words}"
            found.append(blank(rest[len(child.rows)], name, "failed", why))
    return found


def inside(name: str, path: str) -> None:
    """In a recipe's process: a JSON line for each row."""
    recipe = next(recipe for recipe in recipes() if recipe.name == name)
    for row in read(path):
        emit(asdict(judge(row, recipe)))


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Judge the rows of the files, print the tables; 1 where a program failed or a file could not be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="rows; by default those of benchmarks/measured")
    parser.add_argument("--source", action="append", help="only rows whose source or recipe contains this")
    parser.add_argument("--json", metavar="PATH", help="write every judged row ('-': print it)")
    parser.add_argument("--update", metavar="PATH", help="write the rows judged now into PATH, and leave its others")
    parser.add_argument("--rows", action="store_true", help="print every row, not only those that are off")
    parser.add_argument("--fast", action="store_true", help="only rows that take a second or less")
    parser.add_argument("--jobs", type=int, default=1, help="recipes that run at the same time")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.inside:
        inside(*args.inside)
        return 0
    rows, broken = [], False
    for path in args.files or sorted(MEASURED.glob("*.json")):
        try:
            rows += [{**row, "file": str(path)} if isinstance(row, dict) else row for row in read(path)]
        except (OSError, ValueError) as error:
            broken = True
            print(f"cannot be read: {error}", file=sys.stderr)
    repeated = [name for name, count in Counter(_id(row) for row in rows).items() if count > 1 and name]
    rows = list({_id(row) or n: row for n, row in enumerate(rows)}.values())
    if args.source:
        rows = [row for row in rows if any(part in text for part in args.source for text in _names(row))]
    if args.fast:
        well = [whole(row) for row in rows if not why_malformed(row)]
        rows = [row for row in well if any(recipe.handles(row) and recipe.fast(row) for recipe in recipes())]
    began = time.perf_counter()
    found = judged(rows, jobs=args.jobs)
    report = {"date": date.today().isoformat(), "seconds": round(time.perf_counter() - began), "versions": versions()}
    if args.json == "-":
        print(json.dumps(report | {"rows": [asdict(row) for row in found]}, indent=1))
        return 1 if broken else 0
    for path in filter(None, (args.json, args.update)):
        before = (
            json.loads(Path(path).read_text(encoding="utf-8")) if path == args.update else {"seconds": 0, "rows": []}
        )
        write(path, report | {"seconds": max(report["seconds"], before["seconds"])}, updated(before["rows"], found))
    print(table(found, every_row=args.rows))
    if repeated:
        print(f"\n{len(repeated)} ids stand more than once, of each the last row counts: {', '.join(repeated[:5])}")
    print(f"\n{report['seconds']} s, {', '.join(f'{name} {number}' for name, number in report['versions'].items())}")
    return 1 if broken or any(row.outcome == "failed" for row in found) else 0


def updated(before: Iterable[dict[str, Any]], found: Iterable[Judged]) -> list[dict[str, Any]]:
    """The rows of before, those judged again by the same recipe replaced in their places, and the new ones last."""
    rows = {(row["id"], row["recipe"]): row for row in before}
    return list((rows | {(row.id, row.recipe): asdict(row) for row in found}).values())


def write(path: str | Path, report: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """A report, its rows one a line."""
    lines = ",\n".join(map(json.dumps, rows))
    Path(path).write_text(f'{json.dumps(report)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _id(row: Any) -> str:
    return str(row.get("id") or "") if isinstance(row, dict) else ""


def _names(row: Any) -> list[str]:
    if why_malformed(row):
        return [_id(row)]
    return [row["source"], *(recipe.name for recipe in recipes() if recipe.handles(whole(row)))]


def versions() -> dict[str, str]:
    """Of the libraries that the predictions rest on, where a recipe names no others."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "peft", "bitsandbytes"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


if __name__ == "__main__":
    sys.exit(terminal.run(main))  # that the reader of the table has gone is no error
