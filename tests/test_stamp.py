"""The course's public address: stamped from one place into every notebook, which then works when it is opened alone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jupyter_client
import nbformat
import pytest
from nbclient import NotebookClient

from helpers import course_map
from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "https://github.com/someone/gpu-memory-course"


def pyproject(folder, address):
    path = folder / "pyproject.toml"
    path.write_text(f'[tool.course]\nrepository = "{address}"\n', encoding="utf-8")
    return path


@pytest.fixture
def home(tmp_path):
    """A copy of the course's notebooks, sources, pictures and pages."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name in ("image", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(home, command, address, *names):
    place = ["--notebooks", str(home / "notebooks"), "--pyproject", str(pyproject(home, address))]
    return notebooks.main([command, *names, *place])


def contents(home):
    return {path.name: path.read_bytes() for path in (home / "notebooks" / "ko").glob("*.ipynb")}


def test_every_notebook_is_stamped_and_unstamped_without_being_run(home, capsys):
    before, chapters = contents(home), course_map(home / "notebooks" / "ko")
    assert run(home, "stamp", ADDRESS) == 0
    after = contents(home)
    assert course_map(home / "notebooks" / "ko") == chapters  # chapter 0 shows what it showed
    assert run(home, "check", ADDRESS) == 0, capsys.readouterr().out
    for name, stored in after.items():
        text, code = nbformat.reads(stored.decode(), as_version=4).cells[:2]
        page = f"https://colab.research.google.com/github/someone/gpu-memory-course/blob/main/notebooks/ko/{name}"
        assert f"]({page})" in text.source
        assert f'"{ADDRESS}"' in code.source and code.outputs == []
        assert b"../../image/" not in stored
    pictures = b"raw.githubusercontent.com/someone/gpu-memory-course/main/image/03_batch_4_on_a_t4.svg"
    assert pictures in after["03_memory_decomposition.ipynb"]
    assert run(home, "stamp", "") == 0
    assert contents(home) == before


def test_a_notebook_with_another_address_is_found(home, capsys):
    assert run(home, "stamp", ADDRESS, "01_data_types") == 0
    capsys.readouterr()
    assert run(home, "check", "", "01_data_types") == 1
    assert "differs from its source" in capsys.readouterr().out


def test_a_source_that_changed_is_not_stamped(home, capsys):
    source = home / "notebooks" / "src" / "01_data_types.py"
    source.write_text(source.read_text(encoding="utf-8").replace("list(FORMATS)", "sorted(FORMATS)"), encoding="utf-8")
    before = contents(home)
    assert run(home, "stamp", ADDRESS, "01_data_types") == 1
    assert "build it" in capsys.readouterr().err
    assert contents(home) == before


def test_without_an_address_there_is_no_badge_and_no_set_up_cell(home):
    for source in (home / "notebooks" / "src").glob("*.py"):
        cells = notebooks.convert(source, "ko").cells
        assert "colab" not in cells[0].source and not any("set-up" in cell.metadata.get("tags", []) for cell in cells)


def test_outside_of_github_there_is_no_badge(home):
    text, code = notebooks.convert(
        home / "notebooks" / "src" / "01_data_types.py", "ko", "https://example.org/x"
    ).cells[:2]
    assert "colab.research" not in text.source and "https://example.org/x" in code.source


@pytest.mark.parametrize(
    "address", ["someone/gpu-memory-course", "git@github.com:a/b", "https://x.org/a b", "https://x.org/'"]
)
def test_an_address_that_git_cannot_clone_is_refused(home, capsys, address):
    with pytest.raises(SystemExit):
        run(home, "stamp", address)
    assert "not an address that git can clone" in capsys.readouterr().err


def test_a_traceback_names_the_cell_that_it_is_in():
    error = nbformat.v4.new_output("error", ename="E", evalue="", traceback=["Cell \x1b[32mIn[3]\x1b[39m", "In[31]"])
    [after] = notebooks.renumbered([error], 3, 4)
    assert after.traceback == ["Cell \x1b[32mIn[4]\x1b[39m", "In[31]"]


# ---- alone ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path):
    """The course as it stands here, as a git repository of its own: what is published."""
    there = tmp_path / "published"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, there / name)
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "published"]):
        subprocess.run(["git", *command], cwd=there, check=True)
    return there


def kernel_without_the_course(folder):
    """A kernel that has every library and not `helpers`: the libraries' folder, without what makes it editable."""
    spec = folder / "kernels" / "alone"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-S", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    env = {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    (spec / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "alone", "language": "python", "env": env})
    )
    return jupyter_client.kernelspec.KernelSpecManager(kernel_dirs=[str(folder / "kernels")])


@pytest.mark.kernel
@pytest.mark.slow
def test_a_notebook_opened_alone_fetches_the_course_and_runs(tmp_path, repository):
    empty = tmp_path / "content"
    empty.mkdir()
    source = repository / "notebooks" / "src" / "00_start_here.py"
    notebook = notebooks.convert(source, "ko", repository.as_uri())
    manager = jupyter_client.AsyncKernelManager(kernel_name="alone")
    manager.kernel_spec_manager = kernel_without_the_course(tmp_path)
    notebook.cells.append(nbformat.v4.new_code_cell("import helpers; print(helpers.__file__)"))
    client = NotebookClient(
        notebook, km=manager, timeout=300, coalesce_streams=True, resources={"metadata": {"path": str(empty)}}
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    client.execute(env={**environment, **notebooks.QUIET_MACHINE, "IPYTHONDIR": str(tmp_path / "profile")})
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert outputs[0] == []  # nothing was missing
    assert outputs[-1][0].text.strip() == str(empty / "gpu-memory-course" / "helpers" / "__init__.py")
    stored = nbformat.read(ROOT / "notebooks" / "ko" / "00_start_here.ipynb", as_version=4)
    stored_cells = [cell for cell in stored.cells if cell.cell_type == "code"]
    experiments = [cell.outputs for cell in stored_cells if "gpu_memory_experiment(" in cell.source]
    alone = [
        cell.outputs for cell in notebook.cells if cell.cell_type == "code" and "gpu_memory_experiment(" in cell.source
    ]
    texts = [[output.get("text") for output in outputs] for outputs in alone]
    assert texts == [[output.get("text") for output in outputs] for outputs in experiments] and len(texts) == 2
