"""The reader's copy of the notebooks: new versions come, what he wrote stays, what he solved is on the map."""

import json

import nbformat
import pytest

from helpers import course_map, exercise, progress
from tools.readers_copy import refresh


def notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(source, id=f"c{at}") for at, source in enumerate(sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def sources(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


@pytest.fixture
def folders(tmp_path):
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    notebook(shipped / "a.ipynb", "1")
    notebook(shipped / "b.ipynb", "2")
    copy = tmp_path / "my" / "ko"
    assert refresh(shipped, copy) == []
    return shipped, copy


def test_a_new_version_comes_where_nothing_was_written(folders):
    shipped, copy = folders
    ran = nbformat.read(copy / "a.ipynb", as_version=4)
    ran.cells[0].execution_count = 7  # what JupyterLab saves when a cell is only run
    ran.metadata["language_info"] = {"name": "python", "version": "3.11.7"}
    nbformat.write(ran, copy / "a.ipynb")
    notebook(shipped / "a.ipynb", "1 + 1")
    assert refresh(shipped, copy) == []
    assert sources(copy / "a.ipynb") == ["1 + 1"]
    assert sorted(path.name for path in copy.glob("*")) == [".versions.json", "a.ipynb", "b.ipynb"]


def test_what_the_reader_wrote_stays_and_the_new_version_lies_beside_it(folders):
    shipped, copy = folders
    notebook(copy / "a.ipynb", "my own")
    assert refresh(shipped, copy) == [] and sources(copy / "a.ipynb") == ["my own"]
    notebook(shipped / "a.ipynb", "newer")
    [said] = refresh(shipped, copy)
    assert "a.new.ipynb" in said
    assert (sources(copy / "a.ipynb"), sources(copy / "a.new.ipynb")) == (["my own"], ["newer"])
    assert refresh(shipped, copy) == []  # once
    notebook(shipped / "a.ipynb", "newest")
    assert len(refresh(shipped, copy)) == 1 and sources(copy / "a.ipynb") == ["my own"]


@pytest.mark.parametrize("broken", [b"", b"{", b'{"cells": 3}', b"\xff\xfe"])
def test_a_broken_file_is_the_readers_too(folders, broken):
    shipped, copy = folders
    (copy / "b.ipynb").write_bytes(broken)
    notebook(shipped / "b.ipynb", "newer")
    assert len(refresh(shipped, copy)) == 1
    assert (copy / "b.ipynb").read_bytes() == broken


def test_a_lost_record_overwrites_nothing(folders):
    shipped, copy = folders
    (copy / ".versions.json").write_text("?")
    assert len(refresh(shipped, copy)) == 2 and sources(copy / "a.ipynb") == ["1"]


def test_what_is_solved_is_on_the_map(tmp_path, monkeypatch, capsys):
    exec(exercise("1-2").answer, answer := {})
    right = next(value for value in answer.values() if isinstance(value, dict) and "fp16" in value)
    monkeypatch.setattr(progress, "READERS", tmp_path / "my")
    monkeypatch.setattr(progress, "_FILE", tmp_path / "my" / "progress.json")
    (tmp_path / "my" / "ko").mkdir(parents=True)
    before = repr(course_map())
    exercise("1-2").check(right)  # outside of the copy nothing is kept
    assert repr(course_map()) == before and not progress._FILE.exists()

    monkeypatch.chdir(tmp_path / "my" / "ko")
    exercise("1-2").check({"fp16": 1, "bf16": 1})
    assert progress.solved() == set()
    exercise("1-2").check(right)
    exercise("1-2").check({"fp16": 1, "bf16": 1})  # a wrong one later takes nothing away
    assert progress.solved() == {"1-2"}
    assert "1/3" in repr(course_map()) and repr(course_map()) != before
    assert json.loads(progress._FILE.read_text()) == {"solved": ["1-2"]}
    progress._FILE.write_text("[")
    assert progress.solved() == set()
    capsys.readouterr()
