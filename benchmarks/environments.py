"""Environments with older libraries beside the running one, each built once under build/."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import ROOT


class CannotBuild(Exception):
    """The environment cannot be built here; the text says why."""


def python_with(packages: tuple[str, ...], name: str = "") -> Path:
    """The Python of an environment with these packages (as pip takes them) and the running one's behind them.

    Everything that is not named, torch above all, is the running environment's, through a .pth file behind the new
    environment's own packages. Built when it is missing or was built for another torch or recipe. name: of its folder
    in build/; by default made from the packages. CannotBuild where pip fails.
    """
    if not packages:
        return Path(sys.executable)
    name = name or "env-" + hashlib.sha256("\n".join(packages).encode()).hexdigest()[:12]
    environment = ROOT / "build" / name
    python = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp = environment / "recipe.txt"
    paths = [*dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))]
    recipe = "\n".join([sys.version, *paths, *packages])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == recipe:
        return python
    print(f"Building {environment.relative_to(ROOT)} with {', '.join(packages)} (once).", file=sys.stderr, flush=True)
    _quietly([sys.executable, "-m", "venv", "--clear", str(environment)])
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([str(python), "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    # Directories that a .pth file names come after the environment's own, so what is installed here goes first.
    (Path(own) / "running_environment.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    _quietly([str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *packages])
    stamp.write_text(recipe, encoding="utf-8")
    return python


def _quietly(command: list[str]) -> None:
    # pip complains that the running environment's packages want newer ones; they are not used here.
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotBuild(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
