"""Run the levers on their virtual cards and keep what they take: `python -m benchmarks.levers [--only BASE …]`.

The record is benchmarks/levers.json: the versions it was made with, and for each base and lever the bytes at the peak.
A lever whose package is not installed keeps the row that it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from virtual_gpu.terminal import tell

from .catalogue import BASES, LEVERS, Lever, installed
from .program import measure
from .two_models import Preferences

RECORD = Path(__file__).resolve().parent.parent / "levers.json"
PACKAGES = ("torch", "transformers", "peft", "accelerate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=tuple(BASES), default=tuple(BASES), help="programs (all)")
    parser.add_argument("--lever", nargs="*", default=None, help="levers (all, and the program without one)")
    parser.add_argument("--into", type=Path, default=RECORD)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    record = json.loads(given.into.read_text()) if given.into.exists() else {"rows": {}}
    for base in given.only:
        for lever in (None, *(lever for lever in LEVERS if base in lever.bases)):
            name = lever.key if lever else "base"
            if given.lever is not None and name not in given.lever:
                continue
            if lever and (missing := lever.missing()):
                print(f"{base} {name}: {', '.join(missing)} is not installed", file=sys.stderr)
                continue
            tell(f"{base} {name} … Ctrl+C stops; what is there stays")
            record["rows"].setdefault(base, {})[name] = row(base, lever)
            record |= {"date": str(date.today())}
            given.into.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(base, name, record["rows"][base][name], flush=True)
    return 0


def row(base: str, lever: Lever | None) -> dict[str, Any]:
    """What a lever's program takes, and the versions of what ran."""
    packages = {*PACKAGES, *(lever.needs if lever else ())}
    program = lever.of(base) if lever else BASES[base]
    return asdict(program.measure() if isinstance(program, Preferences) else measure(program)) | {
        "versions": {package: installed(package) for package in sorted(packages)}
    }


if __name__ == "__main__":
    sys.exit(main())
