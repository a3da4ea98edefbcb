"""Child processes that print JSON lines: a clean start for each measurement, and a crash is a row, not the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtual_gpu.terminal import tell

ROOT = Path(__file__).resolve().parent.parent
TOLD_S = 10  # so often a terminal is told that a child still runs


@dataclass
class Child:
    """What a child left: the JSON objects that it printed, and how it ended (returncode None: out of time)."""

    rows: list[dict[str, Any]]
    returncode: int | None
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line of stderr that says something: where Python names the exception."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


def run(command: list[str], seconds: float, environment: dict[str, str] | None = None, *, told: str) -> Child:
    """Run `command` for at most `seconds`; lines of its stdout that are not JSON objects are passed over.

    told: what it is, for whoever watches a terminal; there it stands with the seconds and the lines so far.
    """
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **(environment or {})}
    tell(f"{told} … Ctrl+C stops")
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT) as child:
        try:
            while True:
                try:
                    left = began + seconds - time.monotonic()
                    output, code = child.communicate(timeout=max(min(left, TOLD_S), 0)), child.returncode
                    break
                except subprocess.TimeoutExpired as error:
                    spent = time.monotonic() - began
                    if spent >= seconds:
                        child.kill()
                        child.wait()
                        output, code = (error.output, error.stderr), None
                        break
                    tell(f"{told} … {spent:.0f} s, {len((error.output or b'').splitlines())} lines")
        except BaseException:
            child.kill()
            raise
    stdout, stderr = ((part or b"").decode("utf-8", "replace") for part in output)
    return Child([row for line in stdout.splitlines() if (row := _json_object(line))], code, stderr)


def emit(row: dict[str, Any]) -> None:
    """Print a row for the parent, past any redirection of stdout."""
    print(json.dumps(row), file=sys.__stdout__, flush=True)


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
