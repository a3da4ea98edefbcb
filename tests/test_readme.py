"""What the README pages say, run as they say it, as far as a test can."""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "README.ko.md", "CONTRIBUTING.md"]
READMES = PAGES[:2]


def fences(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page):
    """The command lines of the page's sh blocks, without comments."""
    lines = [shlex.split(line, comments=True) for block in fences(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line]


@functools.cache  # both pages have the same line
def planner(arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page):
    assert commands(page)
    for command in commands(page):
        match command:
            case ["make", *targets]:
                said = subprocess.run(["make", "-n", *targets], capture_output=True, text=True, cwd=ROOT)
                assert said.returncode == 0, said.stderr
            case ["conda", "env", "create", "-f", file]:
                assert (ROOT / file).exists()
            case ["conda", "activate", name]:
                assert f"name: {name}\n" in (ROOT / "environment.yml").read_text(encoding="utf-8")
            case ["python", "-m", "virtual_gpu", "fit", *arguments]:
                ran = planner(tuple(command[1:]))
                assert ran.returncode == 0 and "1. LoRA" in ran.stdout, ran.stdout + ran.stderr
                assert "--batch" in arguments
            case [".venv/bin/virtual-gpu", "run", "--gpu", "T4", "train.py", "--its", "--own", "arguments"]:
                assert 'virtual-gpu = "virtual_gpu.__main__:program"' in (ROOT / "pyproject.toml").read_text()
            case [".venv/bin/virtual-gpu", "doctor", "error.txt"]:
                from virtual_gpu.command import main

                with pytest.raises(SystemExit, match="0"):
                    main(["doctor", "--help"])
            case ["python", "tools/readers_copy.py"]:
                assert (ROOT / command[1]).exists()
            case ["jupyter", "trust", files]:
                assert list(ROOT.glob(files.replace("my/", "notebooks/")))
            case ["jupyter", "lab", "my/ko/00_start_here.ipynb"]:
                assert "jupyterlab==" in (ROOT / "requirements.txt").read_text(encoding="utf-8")
            case _:
                pytest.fail(f"{page} has a command that this test does not know: {shlex.join(command)}")


@pytest.mark.parametrize("page", READMES)
def test_every_make_target_in_the_text_exists(page):
    targets = set(re.findall(r"`make ([a-z-]+)`", (ROOT / page).read_text(encoding="utf-8")))
    for target in targets:
        assert subprocess.run(["make", "-n", target], capture_output=True, cwd=ROOT).returncode == 0, target


def test_the_code_runs(tmp_path):
    """Each python block in a process of its own; both pages have the same ones."""
    blocks = fences("README.md", "python")
    assert blocks and blocks == fences("README.ko.md", "python")
    for block in blocks:
        program = tmp_path / "block.py"
        program.write_text(block, encoding="utf-8")
        status, out, err = run_forked([str(program)], folder=ROOT)
        assert status == 0, err
        assert out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("page, language", [("README.md", "en"), ("README.ko.md", "ko")])
def test_what_the_planner_prints(page, language):
    """Line by line; "…" stands for lines that are left out."""
    command = next(tuple(words[1:]) for words in commands(page) if words[:4] == ["python", "-m", "virtual_gpu", "fit"])
    printed = iter(planner((*command, "--language", language)).stdout.splitlines())
    block = next(block for block in fences(page, "text") if block.startswith("polyglot-ko-5.8b"))
    for line in block.splitlines():
        assert line == "…" or line in printed, line


@functools.cache
def error_of_batch_16():
    """What `virtual-gpu run` prints to stderr, an out-of-memory error at its end."""
    command = ["run", "--gpu", "T4", "--no-advise", "examples/train.py", "--fp16", "True"]
    command += ["--per_device_train_batch_size", "16"]
    status, _, err = run_forked(["-m", "virtual_gpu", *command], folder=ROOT)
    assert status == 1, err[-2000:]
    return err.encode()


@pytest.mark.slow
@pytest.mark.parametrize("page, language", [("README.md", "en"), ("README.ko.md", "ko")])
def test_what_the_doctor_says(page, language):
    command = [sys.executable, "-m", "virtual_gpu", "doctor", "--language", language, "-"]
    said = subprocess.run(command, input=error_of_batch_16(), capture_output=True, cwd=ROOT, timeout=60)
    assert said.returncode == 0 and said.stdout.decode() in fences(page, "text")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_are_there(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for words, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text):
        assert words.strip(), f"{target} has no text"
        assert re.match(r"[a-z]+:", target) or (ROOT / target).exists(), f"{page}: {target} does not exist"


@pytest.mark.parametrize("page", READMES)
def test_both_pages_have_the_same_sections_chapters_and_accuracy_table(page):
    def shape(name):
        text = (ROOT / name).read_text(encoding="utf-8")
        table = re.search(r"<!-- accuracy:begin -->(.*?)<!-- accuracy:end -->", text, re.DOTALL)
        assert table, f"{name} has no accuracy table"
        return {
            "sections": len(re.findall(r"^## ", text, re.MULTILINE)),
            "chapters": re.findall(r"^\| (\d) \|", text, re.MULTILINE),
            # a picture with words has one file a language
            "links": sorted(
                re.findall(r"\]\(((?!README)[^)\s]+)\)", text.replace("_ko.svg", ".svg").replace(".en.md", ".md"))
            ),
            "accuracy rows": table[1].strip().count("\n"),
            "rows of all tables": len(re.findall(r"^\|", text, re.MULTILINE)),
        }

    assert shape(page) == shape("README.md")


def test_every_notebook_is_in_the_table_of_chapters():
    for notebook in (ROOT / "notebooks" / "ko").glob("*.ipynb"):
        for page in READMES:
            assert f"notebooks/ko/{notebook.name}" in (ROOT / page).read_text(encoding="utf-8"), (page, notebook.name)
