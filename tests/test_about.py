"""What people expect of a command and a package: examples that can be typed, versions, a bug report, a wheel."""

import getpass
import importlib.metadata
import json
import platform
import re
import shlex
import socket
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from odd_inputs import LLAMA

import virtual_gpu
from virtual_gpu.command import EXAMPLES, _commands, _joined, _parser, main

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE_LINES = [(name, line) for name, lines in EXAMPLES.items() for line in lines.strip().splitlines()]


def test_every_subcommand_has_its_examples():
    assert set(EXAMPLES) == {None, *_commands()}
    assert [name for name, lines in EXAMPLES.items() if len(lines.strip().splitlines()) < 3] == []


@pytest.mark.parametrize(("name", "line"), EXAMPLE_LINES, ids=[line[:60] for _, line in EXAMPLE_LINES])
def test_an_example_can_be_typed(name, line):
    command = re.search(r"virtual-gpu [^;|<>)]*", line)[0]  # what the shell does beside it is the shell's
    given = shlex.split(command)[1:]
    if "--argument" in given:
        args = _parser("largest --argument").parse_args(_joined(given))
    else:
        args = _parser(given[0]).parse_args(given)
    assert callable(args.execute)
    assert name in (None, given[0])


def test_help_ends_in_the_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--language", "en", "shards", "--help"])
    assert capsys.readouterr().out.endswith("examples:\n  " + EXAMPLES["shards"].strip().replace("\n", "\n  ") + "\n")


def test_help_says_what_holds_without_an_option(capsys):
    for name, line in (
        ("run", r"--gpus GPUS [^(]+\(default: 1\)"),
        ("fit", r"--gpu GPU [^(]+\(default: T4\)"),
    ):
        with pytest.raises(SystemExit, match="0"):
            main(["--language", "en", name, "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert re.search(line, out)
        assert "Exit status: 0" in out and "None" not in out and "False" not in out


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_told_to_a_terminal_only(watched, capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    model = ["--model", str(tmp_path), "--gpu", "H100"]
    for command in (["largest", *model, "--of", "sequence_length"], ["shards", *model, "--length", "64"]):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)
        assert main(["--language", "en", *command]) == 0
        said = capsys.readouterr()
        assert ("Ctrl+C stops" in said.err) is watched and "Ctrl+C" not in said.out
        assert bool(said.err) is watched


def test_versions_without_transformers(monkeypatch, capsys):
    known = importlib.metadata.version

    def version(name):
        if name == "transformers":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    said = capsys.readouterr().out
    assert said.startswith(f"virtual-gpu {virtual_gpu.__version__}, torch ") and "transformers" not in said
    assert "rules up to PyTorch " in said


def test_a_bug_report_tells_nothing_private(capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert main(["bug-report"]) == 0
    said, to_the_reader = capsys.readouterr()
    report = json.loads(said)
    assert "카드" in to_the_reader  # what to send with it stands beside it, not in the file
    assert report["python"].endswith(platform.python_version())
    assert report["settings"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert {"torch", "numpy"} <= set(report["libraries"])
    words = set(re.findall(r"[\w.-]+", said))
    assert not words & {getpass.getuser(), socket.gethostname()}
    assert str(Path.home()) not in said and str(ROOT) not in said


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_shell_completes_every_subcommand(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in _commands()) and "--through-evaluation" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    sources = folder / "sources"  # a build leaves its folders beside what it builds
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(sources)], check=True)
    subprocess.run([*build, str(folder), str(sources)], check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        yield {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_instrument_alone(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"virtual_gpu"}
    listing = ["git", "ls-tree", "-r", "--name-only", "HEAD", "virtual_gpu"]
    committed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(committed.stdout.split()) == {name for name in wheel if name.startswith("virtual_gpu/")}
    assert not [name for name in wheel if name.endswith((".pyc", ".ipynb"))]


def test_the_wheels_page_reads_on_a_package_index(wheel):
    [metadata] = [text.decode() for name, text in wheel.items() if name.endswith("METADATA")]
    page = Parser().parsestr(metadata)
    text = page.get_payload()
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", text)
    assert [one for pair in targets for one in pair if one and not one.startswith("https://")] == []
    assert "virtual-gpu run --gpu T4" in text and re.search("[가-힣]", text) and "English" in text
    assert page["Requires-Python"] == ">=3.11" and page["Description-Content-Type"] == "text/markdown"
    [points] = [text.decode() for name, text in wheel.items() if name.endswith("entry_points.txt")]
    assert "virtual-gpu = virtual_gpu.__main__:program" in points
