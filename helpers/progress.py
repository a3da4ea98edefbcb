"""What the reader has done, kept beside the notebooks that are his own (see `make course`): one small JSON file.

In the repository's own notebooks, on Colab and in the tests nothing is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from .environment import COURSE

READERS = COURSE / "my"  # his copy of the notebooks; made by tools/readers_copy.py
_FILE = READERS / "progress.json"


def record(number: str, is_right: bool) -> None:
    """Keep that an exercise or a case was answered; a right answer stays right."""
    if not is_kept():
        return
    done = solved()
    if is_right and number not in done:
        fresh = _FILE.with_suffix(".new")
        fresh.write_text(json.dumps({"solved": sorted(done | {number})}), encoding="utf-8")
        os.replace(fresh, _FILE)


def solved() -> set[str]:
    """Numbers ("3-1", "3-A") that were answered right; a file that cannot be read is one with none."""
    if not is_kept():
        return set()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return set(map(str, json.loads(_FILE.read_text(encoding="utf-8"))["solved"]))
    return set()


def is_kept() -> bool:
    """Whether the notebook that runs is one of the reader's copy."""
    return READERS.is_dir() and Path.cwd().is_relative_to(READERS)
