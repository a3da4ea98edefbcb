"""python -m benchmarks.programs FOLDER [NAME …]: the programs of `catalogue` that lie in FOLDER, as a table.

Nothing is fetched: FOLDER/repos/NAME holds the programs, brought by hand; FOLDER/site, FOLDER/vision and FOLDER/ds the
packages that they need beside ours (`pip install --target`); what stands in for their data is made in FOLDER/work.
`--list` prints what to bring. A program that is not there is said to be missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.children import ROOT
from virtual_gpu.units import human_bytes

from . import stand_ins
from .catalogue import PROGRAMS, Program

LIMIT_SECONDS = 600  # a program that hangs is said to hang
HEADS = ("program", "card", "ran", "steps", "CPU seconds", "peak", "reserved", "largest module", "answers", "why not")


def main() -> int:
    """Run the programs; exit status 1 where one of them did not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [program for program in PROGRAMS if not args.names or program.name in args.names]
    if args.list:
        for program in chosen:
            print(f"{program.name}\n  {program.source}\n  {program.command}\n  data: {program.data}")
        return 0
    folder = args.folder.resolve()
    sys.path.append(str(folder / "site"))  # Pillow
    stand_ins.make(folder)
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|", flush=True)
    rows = []
    for program in chosen:
        rows.append(run(program, folder))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    return int(any(row[2] != "yes" for row in rows))


def run(program: Program, folder: Path) -> tuple[str, ...]:
    """One row of the table."""
    work = folder / "work"
    card = f"{program.gpus} × {program.gpu}" if program.gpus > 1 else program.gpu
    command = shlex.split(program.command.format(repos=folder / "repos", work=work))
    script = next((part for part in command if part.endswith(".py")), None)
    if script is not None and not Path(script).exists():
        return program.name, card, "missing", *[""] * (len(HEADS) - 3)
    report = work / "report.json"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1",
        "NLTK_DATA": str(work / "nltk_data"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(str(folder / path) for path in program.paths)]),
    }  # fmt: skip
    ours = [sys.executable, "-m", "virtual_gpu", "--language", "en", "run", "--no-advise", "--report", str(report)]
    options = ["--gpu", program.gpu, "--gpus", str(program.gpus), "--values", program.values]
    before = _cpu_seconds()
    try:
        done = subprocess.run(
            [*ours, *options, *command], cwd=folder / program.folder, env=environment, capture_output=True, text=True,
            timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return program.name, card, "hangs", *[""] * (len(HEADS) - 3)
    if not report.exists():
        return program.name, card, "no", *[""] * (len(HEADS) - 4), (done.stderr.strip().splitlines() or ["?"])[-1]
    found = json.loads(report.read_text(encoding="utf-8"))
    module = next(
        (f"{name} {human_bytes(nbytes)}" for name, nbytes in found["modules"] if not name.startswith("(")), ""
    )
    answers = sum(row[-1] for row in found["values"])
    why = (found["error"] or "").replace("\n", " ").replace("|", "\\|")[:160]
    ran = {"fits": "yes", "oom": "out of memory", "failed": "no"}[found["status"]]
    numbers = human_bytes(found["allocated"]), human_bytes(found["reserved"])
    return (
        program.name,
        card,
        ran,
        str(found["steps"]),
        f"{_cpu_seconds() - before:.0f}",
        *numbers,
        module,
        str(answers),
        why,
    )


def _cpu_seconds() -> float:
    """Of all children so far, imports included: the same on a machine that does something else meanwhile."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
