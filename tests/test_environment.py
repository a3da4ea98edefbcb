"""What chapter 0 says about a machine, and what the set-up cell installs: real servers, a real pip, no network."""

import http.server
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants

from helpers import check_environment, course_map, environment
from helpers.course import CHAPTERS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hub(monkeypatch):
    """Set the hub's address, and let the course ask it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)


@pytest.mark.parametrize("status", [200, 404])
def test_a_hub_that_answers(hub, status):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub(f"http://127.0.0.1:{server.server_port}")
        assert check_environment(hub_limit_s=60).hub == "reachable"
        server.shutdown()


def test_a_hub_that_never_answers(hub):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert check_environment(hub_limit_s=0.3).hub == "unreachable"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://no-such-host.invalid", "nonsense"])
def test_no_hub(hub, address):
    hub(address)
    assert check_environment().hub == "unreachable"


def test_a_hub_that_is_switched_off(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = check_environment()
    assert found.hub == "off" and "HF_HUB_OFFLINE" in str(found)


def test_the_environment_of_the_tests_is_enough():
    found = check_environment()
    assert {p.name for p in found.packages} >= {"torch", "transformers", "ipywidgets"}
    assert all(p.is_enough for p in found.packages)
    assert found._repr_html_().count("<tr>") == 6 and len(str(found).splitlines()) == 5


@pytest.mark.parametrize(
    ("version", "least", "enough"),
    [
        ("2.11.0+cu128", "2.6", True),
        ("2.5.1", "2.6", False),
        ("10.0", "9.1", True),
        (None, "1", False),
        ("4", "4.0.1", False),
    ],
)
def test_versions_are_compared_as_numbers(version, least, enough):
    assert environment.Package("x", version, least).is_enough is enough


def test_what_is_lacking_is_named(monkeypatch):
    lacking = [environment.Package("peft", None, "0.15"), environment.Package("torch", "2.1", "2.6")]
    monkeypatch.setattr(environment, "required_packages", lambda: lacking)
    assert "없거나 오래됨: peft>=0.15, torch>=2.6" in str(check_environment())


# ---- the set-up cell's installer: a real pip in an environment of its own ----


def wheel(folder, name, version, requires=""):
    """A package that is nothing but its name and what it requires."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """run(code) in a new environment that has torch 2.6 and ipywidgets 7.7.1; newer ones can be had."""
    home = tmp_path_factory.mktemp("machine")
    shelf = home / "shelf"
    shelf.mkdir()
    for version in ("2.6", "2.13"):
        wheel(shelf, "torch", version)
    wheel(shelf, "ipywidgets", "7.7.1")
    wheel(shelf, "peft", "0.20", "torch>=2.0")
    wheel(shelf, "greedy", "1.0", "torch>=2.13")
    subprocess.run([sys.executable, "-m", "venv", home / "env"], check=True)
    python = home / "env" / "bin" / "python"
    quiet = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}

    def run(*arguments):
        return subprocess.run([python, *arguments], capture_output=True, text=True, env=quiet, cwd=home)

    assert run("-m", "pip", "install", "-q", "torch==2.6", "ipywidgets==7.7.1").returncode == 0
    return run


SET_UP = """
import os
from helpers import environment as e
e.required_packages = lambda: [e.Package(n, e._version(n), least) for n, least in {packages}]
e.set_up()
print(e._version("torch"), e._version("ipywidgets"), e._version("peft"), os.environ["PYTHONPATH"])
"""


def test_only_what_is_missing_is_installed_and_torch_stays(machine):
    packages = [("torch", "2.6"), ("ipywidgets", "7.7"), ("peft", "0.15")]
    first, second = (machine("-c", SET_UP.format(packages=packages)) for _ in range(2))
    assert first.stdout.splitlines() == ["설치한 패키지: peft", f"2.6 7.7.1 0.20 {ROOT}"], first.stderr
    assert second.stdout.splitlines() == [f"2.6 7.7.1 0.20 {ROOT}"]


def test_what_would_replace_torch_is_refused(machine):
    said = machine("-c", SET_UP.format(packages=[("greedy", "1.0")]))
    assert said.returncode == 1 and "greedy>=1.0: 설치하지 못했다" in said.stderr
    assert "2.6" in machine("-m", "pip", "show", "torch").stdout.splitlines()[1]


# ---- the map ----


def test_the_map_names_every_notebook_of_the_course():
    entries = {name for (_, name), *_ in CHAPTERS}
    there = {path.stem for path in (ROOT / "notebooks" / "ko").glob("*.ipynb")} - {"00_start_here"}
    assert there <= entries
    for chapter in course_map():
        assert (chapter.notebook in there) == (chapter.minutes is not None)


def test_the_map_reads_the_notebooks(tmp_path):
    (tmp_path / "04_gradient_accumulation.ipynb").write_text(
        '{"cells": [{"cell_type": "markdown", "source": ["# 4장. 나누어 <더하기>\\n", "'
        + "가" * 4000
        + '"]}, {"cell_type": "code", "source": "exercise(\\"4-1\\").check(x)"}, '
        + '{"cell_type": "markdown", "source": ["## 4.9 더 읽을거리\\n", "'
        + "나" * 8000
        + '"]}, {"cell_type": "code", "source": "exercise(\\"4-2\\").check(x)"}]}',
        encoding="utf-8",
    )
    assert not any(chapter.notebook for chapter in course_map("a" * 300))  # no file has such a name
    found = course_map(tmp_path)
    assert [chapter.number for chapter in found if chapter.notebook] == [4]
    assert (found[3].title, found[3].minutes, found[3].exercises) == ("나누어 <더하기>", 15, 1)
    page = found._repr_html_()
    assert '<a href="04_gradient_accumulation.ipynb">나누어 &lt;더하기&gt;</a>' in page
    assert page.count("<a ") == 1 and page.count("준비 중") == len(CHAPTERS) - 1
