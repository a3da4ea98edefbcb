"""What this machine has for the course, and what a notebook that was opened alone still needs."""

from __future__ import annotations

import http.client
import importlib
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path

from virtual_gpu.language import tr
from virtual_gpu.units import human_bytes

COURSE = Path(__file__).resolve().parent.parent
# Whatever is missing: these stay as they are. A Colab runtime with another torch or ipywidgets no longer works.
KEPT = ("torch", "ipywidgets", "ipykernel", "ipython", "numpy")
HUB_LIMIT_S = 3.0


@dataclass(frozen=True)
class Package:
    """A package the course needs: its installed version (None: not there) and the least one that it works with."""

    name: str
    version: str | None
    least: str

    @property
    def is_enough(self) -> bool:
        """Whether it is there and not older than `least`."""
        return self.version is not None and _release(self.version) >= _release(self.least)


@dataclass(frozen=True)
class Environment:
    """What was found: versions, the GPU (bytes), free disk (bytes), and whether the model hub answered."""

    python: str
    packages: tuple[Package, ...]
    gpu_name: str | None
    gpu_bytes: int
    disk_free_bytes: int
    hub: str  # "reachable", "unreachable" or "off"

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What, what was found, and what that means for the course."""
        lacking = [package for package in self.packages if not package.is_enough]
        found = ", ".join(f"{p.name} {p.version}" for p in self.packages if p.version)
        return [
            (
                "Python",
                self.python,
                _fine() if sys.version_info >= (3, 11) else tr(ko="3.11 이상 필요", en="needs 3.11"),
            ),
            (tr(ko="패키지", en="packages"), found, _lacking(lacking) if lacking else _fine()),
            ("GPU", *self._gpu_row()),
            (
                tr(ko="디스크", en="disk"),
                tr(ko=f"{human_bytes(self.disk_free_bytes)} 남음", en=f"{human_bytes(self.disk_free_bytes)} free"),
                tr(ko="가중치를 내려받지 않으므로 충분하다", en="no weights are downloaded: enough")
                if self.disk_free_bytes > 2**30
                else tr(ko="1 GiB도 남지 않았다. 자리를 비운다", en="less than 1 GiB: make room"),
            ),
            (tr(ko="모델 허브", en="model hub"), *self._hub_row()),
        ]

    def _gpu_row(self) -> tuple[str, str]:
        if self.gpu_name is None:
            return (
                tr(ko="없음", en="none"),
                tr(ko="가상 T4에서 메모리를 예측한다", en="memory is predicted on a virtual T4"),
            )
        return (
            f"{self.gpu_name}, {human_bytes(self.gpu_bytes)}",
            tr(ko="메모리와 시간을 이 GPU에서 측정한다", en="memory and time are measured on it"),
        )

    def _hub_row(self) -> tuple[str, str]:
        bundled = tr(
            ko="강의에 들어 있는 모델 구조만 쓴다", en="the architectures that come with the course are what there is"
        )
        return {
            "reachable": (
                tr(ko="연결됨", en="reachable"),
                tr(ko="다른 모델의 구조도 불러올 수 있다", en="other models' architectures can be loaded too"),
            ),
            "unreachable": (tr(ko="연결되지 않음", en="not reachable"), bundled),
            "off": (tr(ko="꺼 둠 (HF_HUB_OFFLINE)", en="switched off (HF_HUB_OFFLINE)"), bundled),
        }[self.hub]

    def __str__(self) -> str:
        return "\n".join(f"{what}: {found} ({meaning})" for what, found, meaning in self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heads = (tr(ko="항목", en="what"), tr(ko="찾은 것", en="found"), tr(ko="뜻", en="meaning"))
        return html_rows(heads, [[escape(text) for text in row] for row in self.rows])


def html_rows(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table with its text on the left, broken between words only; cells are HTML already."""
    left = ' style="text-align: left"'
    head = "".join(f"<th{left}>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td{left}>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table style="word-break: keep-all">\n<tr>{head}</tr>\n{body}\n</table>'


def check_environment(hub_limit_s: float = HUB_LIMIT_S) -> Environment:
    """Look at this machine. Never waits longer than `hub_limit_s` for the network, and raises nothing without one."""
    name, nbytes = _gpu()
    return Environment(
        python=platform.python_version(),
        packages=tuple(required_packages()),
        gpu_name=name,
        gpu_bytes=nbytes,
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        hub=_ask_hub(hub_limit_s),
    )


def required_packages() -> list[Package]:
    """The packages of pyproject.toml and its extras (each as `name>=least`) with the versions that are installed."""
    project = tomllib.loads((COURSE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pairs = [one.split(">=") for one in (*project["dependencies"], *extras["models"], *extras["course"]) if ">=" in one]
    return [Package(name.strip(), _version(name.strip()), least.strip()) for name, least in pairs]


def set_up() -> None:
    """For a notebook without the course's environment (Colab): install what is missing, and print what that was.

    Only packages that are not there are installed, with pyproject.toml's loose bounds; those of `KEPT` never change.
    Processes started from the notebook find `helpers` too.
    """
    paths = [str(COURSE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    missing = [package for package in required_packages() if package.version is None]
    if missing:
        _install([f"{package.name}>={package.least}" for package in missing])
        importlib.invalidate_caches()
        names = ", ".join(package.name for package in missing)
        print(tr(ko=f"설치한 패키지: {names}", en=f"Installed: {names}"))


def _install(requirements: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept.txt"
        versions = {name: _version(name) for name in KEPT}
        kept.write_text("".join(f"{name}=={version}\n" for name, version in versions.items() if version))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(kept)]
        ran = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if ran.returncode:
        wanted, said = " ".join(requirements), ran.stderr.strip()
        raise RuntimeError(
            tr(
                ko=f"{wanted}: 설치하지 못했다. 네트워크를 확인하고 셀을 다시 실행한다. pip이 알린 것: {said}",
                en=f"{wanted}: could not be installed. Check the network and run the cell again. pip says: {said}",
            )
        )


def _fine() -> str:
    return tr(ko="준비됨", en="ready")


def _lacking(packages: list[Package]) -> str:
    names = ", ".join(f"{p.name}>={p.least}" for p in packages)
    return tr(ko=f"없거나 오래됨: {names}", en=f"missing or old: {names}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers a version begins with: 2.11.0+cu128 is (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)


def _gpu() -> tuple[str | None, int]:
    import torch

    if not torch.cuda.is_available():
        return None, 0
    return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory


def _ask_hub(limit_s: float) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "off"
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            urllib.request.urlopen(request, timeout=limit_s).close()
        except urllib.error.HTTPError:
            answers.put("reachable")  # an answer, if not a page
        except (OSError, ValueError, http.client.HTTPException):
            answers.put("unreachable")
        else:
            answers.put("reachable")

    # A look-up of a name knows no time limit: the thread is left behind when it takes too long.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=limit_s)
    except queue.Empty:
        return "unreachable"
