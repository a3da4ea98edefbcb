"""The files in which the last run of the tests failed, on one line; nothing where it did not, or in too many.

python tools/failed_files.py --most 5

Whole files, not single tests: a cell of a notebook needs the cells before it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

LAST_FAILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "v" / "cache" / "lastfailed"


def failed_files(record: Path = LAST_FAILED) -> list[str]:
    """Paths from the repository's root, each once, in order of their names."""
    if not record.exists():
        return []
    return sorted({test.split("::")[0] for test in json.loads(record.read_text())})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=5, help="more files than these are a broken state, not bad luck")
    files = failed_files()
    if len(files) <= parser.parse_args().most:
        print(*files)
