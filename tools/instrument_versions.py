"""The instrument's own tests under other libraries: `python tools/instrument_versions.py oldest` (or `newest`, `here`).

oldest: the lower bounds of pyproject.toml; newest: whatever pip finds; both in an environment of their own under
.bench. here: the Python that runs this, with the libraries that it has. What asks for the exact versions of
requirements.txt (figures of chapters, stored outputs, panels) is not among these tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# They hold the instrument against itself, a CPU's real bytes or published figures, whatever the libraries' versions.
TESTS = (
    "tests/test_allocator.py",
    "tests/test_allocator_pytorch.py",
    "tests/test_allocator_settings.py",
    "tests/test_cards.py",
    "tests/test_doctor.py",
    "tests/test_edits.py",
    "tests/test_replay.py",
    "tests/test_sequences.py",
    "tests/test_units.py",
    "tests/test_fake_outputs.py",
    "tests/test_real_bytes.py",
    "tests/test_virtual_gpu.py",
    "tests/program/test_run.py",
)
TOOLS = ("pytest", "hypothesis", "psutil", "playwright", "nbformat")  # what tests/conftest.py imports


def requirements(versions: str) -> list[str]:
    """What pip is asked for; "oldest" pins every lower bound of pyproject.toml, "newest" none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [*project["dependencies"], *project["optional-dependencies"]["models"], "datasets>=3.0"]
    if versions == "oldest":
        return [re.sub(r">=(\d+\.\d+)$", r"==\1.*", bound) for bound in bounds]
    return [bound.split(">=")[0] for bound in bounds]


def main(versions: str) -> int:
    """Build the environment where one is asked for, say what is in it, run the tests; pytest's exit status."""
    if versions not in ("oldest", "newest", "here"):
        raise SystemExit(f"{versions}: oldest, newest or here")
    python = sys.executable
    if versions != "here":
        folder = ROOT / ".bench" / versions
        if not folder.exists():
            venv.create(folder, with_pip=True)
        python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
        pip += [] if sys.stderr.isatty() else ["--quiet"]  # whoever watches sees how far it is
        subprocess.run([*pip, *requirements(versions), *TOOLS], check=True)
    subprocess.run([python, "-m", "virtual_gpu", "bug-report"], check=True, cwd=ROOT)
    return subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["here"]))
