"""The reader's own copy of the notebooks, in `my/ko`, which git does not see: what he writes there is his.

    python tools/readers_copy.py

`make course` runs it before it opens them. A notebook that he has not changed is replaced by a newer version; beside
one that he has, the newer version is put as NAME.new.ipynb, and that is said. Nothing of his is ever overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "notebooks" / "ko"
COPY = ROOT / "my" / "ko"
_RECORD = ".versions.json"  # name → the digest of the version that was put there


def digest(path: Path) -> str:
    """Of what a reader changes: the cells' kinds and sources, not their outputs and not what JupyterLab adds."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    told = [[cell["cell_type"], "".join(cell["source"])] for cell in cells]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def refresh(shipped: Path = SHIPPED, copy: Path = COPY) -> list[str]:
    """Bring the copy up to date; returns a line for each notebook that the reader should know of."""
    copy.mkdir(parents=True, exist_ok=True)
    record = copy / _RECORD
    put = _read(record)
    said = []
    for source in sorted(shipped.glob("*.ipynb")):
        name, version, target = source.name, hashlib.sha256(source.read_bytes()).hexdigest(), copy / source.name
        beside = target.with_suffix(".new.ipynb")
        before = put.get(name, {})
        if target.exists() and before.get("file") == version:
            continue
        if not target.exists() or _unchanged(target, before.get("cells")):
            _write(target, source.read_bytes())
        else:
            _write(beside, source.read_bytes())
            said.append(f"{target.relative_to(ROOT) if target.is_relative_to(ROOT) else target} is yours and stays; "
                        f"the new version is {beside.name} beside it.")  # fmt: skip
        put[name] = {"file": version, "cells": digest(source)}
        _write(record, json.dumps(put, indent=1).encode())
    return said


def _unchanged(target: Path, cells: str | None) -> bool:
    try:
        return digest(target) == cells
    except (OSError, ValueError, KeyError, TypeError):  # not a notebook any more: his, whatever it is
        return False


def _read(record: Path) -> dict:
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # lost: then every notebook counts as the reader's
        return {}


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    fresh = path.with_name(path.name + ".part")
    fresh.write_bytes(content)
    os.replace(fresh, path)


if __name__ == "__main__":
    for line in refresh():
        print(line)
    sys.exit(0)
