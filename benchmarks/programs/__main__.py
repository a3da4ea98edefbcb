"""python -m benchmarks.programs FOLDER [NAME …]: the programs of `catalogue` that lie in FOLDER, as a table.

Nothing is fetched: FOLDER/repos/NAME holds the programs, brought by hand; FOLDER/site, FOLDER/vision and FOLDER/ds the
packages that they need beside ours (`pip install --target`); what stands in for their data is made in FOLDER/work.
`--list` prints what to bring. A program that is not there is said to be missing.

On a machine with a card, `--record` runs the same commands there instead, with random weights, and keeps what each
asked the allocator for in FOLDER/records. Where such a record lies, the table has what was measured beside what is
predicted for that card (name it with `--gpu`), and how far the requests are equal; `--json` keeps it, row by row, and
`table` makes benchmarks/README.md's table of it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT
from virtual_gpu.terminal import tell

from . import stand_ins
from .catalogue import PROGRAMS, Program

LIMIT_SECONDS = 600  # a program that hangs is said to hang
CARD_SECONDS = 120  # as much on a card
HEADS = (
    "program", "card", "ran", "steps", "CPU seconds", "peak", "reserved", "largest module", "answers", "why not",
    "measured peak", "measured reserved", "equal requests",
)  # fmt: skip
KEPT = ("status", "steps", "allocated", "reserved", "error", "versions", "notes")  # of a report


def main() -> int:
    """Run the programs; exit status 1 where one of them did not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--gpu", help="the virtual card, instead of each program's own; of the programs of one card")
    parser.add_argument("--record", action="store_true", help="on the card of this machine; of the programs of one")
    parser.add_argument("--json", type=Path, help="a file for what was predicted and measured; other rows in it stay")
    parser.add_argument("--at-once", type=int, default=1, help="so many programs share the card while recording")
    args = parser.parse_intermixed_args()
    chosen = [program for program in PROGRAMS if not args.names or program.name in args.names]
    if args.record or args.gpu:
        chosen = [program for program in chosen if program.gpus == 1]
    if args.list:
        for program in chosen:
            print(f"{program.name}\n  {program.source}\n  {program.command}\n  data: {program.data}")
        return 0
    folder = args.folder.resolve()
    sys.path.append(str(folder / "site"))  # Pillow
    stand_ins.make(folder)
    if args.record:
        import torch

        if not torch.cuda.is_available():
            parser.error("--record needs a card, and PyTorch finds none here")
        return record(chosen, folder, args.at_once)
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|", flush=True)
    rows = []
    for number, program in enumerate(chosen, 1):
        tell(f"{number} of {len(chosen)}: {program.name} … Ctrl+C stops")
        rows.append(run(program, folder, args.gpu or program.gpu))
        print("| " + " | ".join(cells(rows[-1])) + " |", flush=True)
        if args.json is not None:
            keep(rows[-1], args.json)
    return int(any(row["status"] != "fits" for row in rows))


def run(program: Program, folder: Path, gpu: str) -> dict[str, Any]:
    """What the program needs on a virtual card, and what a card measured where a record lies; sizes in bytes.

    status: of `virtual_gpu.program.report.Report`, "missing" or "hangs"; without a report there is an error alone.
    """
    row: dict[str, Any] = {"program": program.name, "card": f"{program.gpus} × {gpu}" if program.gpus > 1 else gpu}
    command = _command(program, folder)
    if command is None:
        return row | {"status": "missing"}
    report, measured = folder / "work" / "report.json", _record_of(program, folder)
    trace = folder / "traces" / measured.name.removesuffix(".gz")
    trace.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    trace.unlink(missing_ok=True)
    ours = [sys.executable, "-m", "virtual_gpu", "--language", "en", "run", "--no-advise", "--report", str(report)]
    ours += ["--save", str(trace)] if measured.exists() else []
    options = ["--gpu", gpu, "--gpus", str(program.gpus), "--values", program.values]
    environment = _environment(program, folder) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    before = _cpu_seconds()
    try:
        done = subprocess.run(
            [*ours, *options, *command], cwd=folder / program.folder, env=environment, capture_output=True, text=True,
            timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return row | {"status": "hangs"}
    row["seconds"] = round(_cpu_seconds() - before)
    if report.exists():
        found = json.loads(report.read_text(encoding="utf-8"))
        row |= {
            name: found[name] for name in ("status", "steps", "allocated", "reserved", "error", "versions", "notes")
        }
        row["module"] = next((list(module) for module in found["modules"] if not module[0].startswith("(")), None)
        row["answers"] = sum(value[-1] for value in found["values"])
    else:
        row |= {"status": "failed", "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    if measured.exists():
        row["measured"] = _beside(measured, trace, gpu)
    return row


def _beside(measured: Path, trace: Path, gpu: str) -> dict[str, Any]:
    """What a card measured, and how many of its requests are equal to the virtual ones from the first on."""
    from virtual_gpu.cards import card
    from virtual_gpu.trace.compare import compare

    with gzip.open(measured, "rt", encoding="utf-8") as file:
        found = json.load(file)["measured"]
    if tuple(found["capability"]) != tuple(card(gpu).compute_capability):
        return {"gpu": found["gpu"], "error": f"measured on {found['gpu']}, which {gpu} is not"}
    row = {name: found[name] for name in ("gpu", "steps", "error", "peak", "reserved", "versions")}
    if trace.exists():
        both = compare(trace, measured)
        row["requests"] = both.entries[1]
        row["equal"] = both.entries[1] if both.first_difference is None else both.first_difference[0]
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, in the order of HEADS."""
    from virtual_gpu.units import human_bytes

    def size(found: dict[str, Any], name: str) -> str:
        return human_bytes(found[name]) if name in found else ""

    def line(error: str | None) -> str:
        return (error or "").replace("\n", " ").replace("|", "\\|")[:160]

    module, measured = row.get("module"), row.get("measured", {})
    return [
        row["program"],
        row["card"],
        {"fits": "yes", "oom": "out of memory", "failed": "no"}.get(row["status"], row["status"]),
        str(row.get("steps", "")),
        str(row.get("seconds", "")),
        size(row, "allocated"),
        size(row, "reserved"),
        f"{module[0]} {human_bytes(module[1])}" if module else "",
        str(row.get("answers", "")),
        line(row.get("error")),
        line(measured.get("error")) or size(measured, "peak"),
        size(measured, "reserved"),
        f"{measured['equal']:,} of {measured['requests']:,}" if "equal" in measured else "",
    ]


def keep(row: dict[str, Any], path: Path) -> None:
    """Put a row into the file at the place of the program's earlier one, else at the end."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    others = {one["program"]: one for one in kept} | {row["program"]: row}
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in others.values())
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


# -- on a card ---------------------------------------------------------------------------------------------------------


def record(chosen: list[Program], folder: Path, at_once: int) -> int:
    """Run each program on this machine's card; a line of JSON for each, and its record in FOLDER/records.

    The first runs alone: what the card holds outside PyTorch's allocator is the one process's.
    """
    (folder / "records").mkdir(exist_ok=True)
    here = [program for program in chosen if _command(program, folder) is not None]
    models = dict.fromkeys(name for program in here for name in program.models)
    with ThreadPoolExecutor(max(at_once, 1)) as pool:
        for row in pool.map(lambda name: _weights(name, folder), models):
            print(json.dumps(row), flush=True)
        tell(f"{len(here)} programs … Ctrl+C stops")
        codes = [_recorded(program, folder) for program in here[:1]]
        codes += pool.map(lambda program: _recorded(program, folder), here[1:])
    return int(any(codes))


def _weights(name: str, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.programs.weights", str(folder), name]
    paths = [*_house(), os.environ.get("PYTHONPATH", ""), str(folder / "site")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended = _child(command, environment, folder, CARD_SECONDS)
    return {"weights": name, **ended, "seconds": round(time.perf_counter() - began, 1)}


def _recorded(program: Program, folder: Path) -> int:
    out = _record_of(program, folder)
    out.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("record.py")), str(out), *_command(program, folder)]
    began = time.perf_counter()
    ended = _child(command, _environment(program, folder), folder / program.folder, CARD_SECONDS)
    row = {"program": program.name, **ended, "seconds": round(time.perf_counter() - began, 1), "record": out.exists()}
    print(json.dumps(row), flush=True)
    return int(row["returncode"] != 0)


def _child(command: list[str], environment: dict[str, str], folder: Path, seconds: float) -> dict[str, Any]:
    """How a child ended (None: out of time), and its last words where it did not end well."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as child:  # fmt: skip
        try:
            told, code = child.communicate(timeout=seconds)[0], child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)  # its data loaders too
            told, code = child.communicate()[0], None
    lines = told.decode("utf-8", "replace").strip().splitlines()
    return {"returncode": code, **({} if code == 0 else {"last": lines[-12:]})}


def _record_of(program: Program, folder: Path) -> Path:
    return folder / "records" / f"{program.name.replace(' ', '-').replace(',', '')}.json.gz"


# ----------------------------------------------------------------------------------------------------------------------


def _command(program: Program, folder: Path) -> list[str] | None:
    """The program with its arguments; None where it was not brought."""
    command = shlex.split(program.command.format(repos=folder / "repos", work=folder / "work"))
    script = next((part for part in command if part.endswith(".py")), None)
    return None if script is not None and not Path(script).exists() else command


def _house() -> list[str]:
    return list(dict.fromkeys([str(Path(__file__).resolve().parents[2]), str(ROOT)]))


def _environment(program: Program, folder: Path) -> dict[str, str]:
    paths = [*_house(), *(str(folder / path) for path in program.paths), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1",
        "NLTK_DATA": str(folder / "work" / "nltk_data"), "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **dict(entry.format(work=folder / "work").split("=", 1) for entry in program.environment),
    }  # fmt: skip


def _cpu_seconds() -> float:
    """Of all children so far, imports included: the same on a machine that does something else meanwhile."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
