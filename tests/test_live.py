"""The website's panels: what is stored in image/live is what the panels of the course show."""

import json
import os
import random
import subprocess
import sys

import pytest

from tools import live

GRIDS = {grid.panel: grid for grid in live.GRIDS if (live.FOLDER / f"{grid.panel}.json").exists()}
QUICK = ("number_panel", "quantization_panel", "checkpointing_panel", "cache_panel")  # a setting is milliseconds


def stored(name):
    return json.loads((live.FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def picture_of(data, setting):
    return "".join(data["pieces"][piece] for piece in data["pictures"][setting[-1]])


def shown_by_a_new_panel(name, data, setting):
    """Status and answer of a panel that was just opened, its controls set to a stored setting in their order."""
    panel = live.open_panel(GRIDS[name])
    for control, place in zip(data["controls"], setting, strict=False):
        widget = live.control_of(panel, control["name"])
        if not widget.disabled:
            widget.value = control["values"][place]
    return live.shown(panel, GRIDS[name])


# The programs of the clinic take other bytes in a process that has run something before: the command answers for them.
@pytest.mark.parametrize("name", [name for name in GRIDS if name != "doctor_panel"])
def test_the_opening_is_what_the_panel_opens_with(name):
    data = stored(name)
    setting = data["settings"][data["start"]]
    found = shown_by_a_new_panel(name, data, setting)
    assert found == (data["statuses"][setting[-2]], picture_of(data, setting)), f"python tools/live.py {name}"


@pytest.mark.parametrize("name", [name for name in QUICK if name in GRIDS])
def test_a_sample_of_settings_is_what_the_panel_shows(name):
    data = stored(name)
    for setting in random.Random(0).sample(data["settings"], 8):
        found = shown_by_a_new_panel(name, data, setting)
        assert found == (data["statuses"][setting[-2]], picture_of(data, setting)), f"python tools/live.py {name}"


@pytest.mark.stress
def test_the_command_writes_what_is_stored(tmp_path):
    """Of the clinic, whose five programs run in a few seconds."""
    command = [sys.executable, "tools/live.py", "doctor_panel", "--to", str(tmp_path)]
    done = subprocess.run(command, cwd=live.ROOT, env={**os.environ, "PYTHONPATH": str(live.ROOT)}, timeout=600)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["doctor_panel.json"]
    assert json.loads((tmp_path / "doctor_panel.json").read_text(encoding="utf-8")) == stored("doctor_panel")


@pytest.mark.stress
@pytest.mark.parametrize("name", GRIDS)
def test_everything_stored_is_computed_anew(name):
    assert json.loads(json.dumps(live.collect(GRIDS[name]))) == stored(name), f"python tools/live.py {name}"


@pytest.mark.parametrize("name", GRIDS)
def test_what_is_stored_is_whole(name):
    """Every setting once, every place there; nothing of this machine, nothing that a page would run or fetch."""
    data = stored(name)
    count = len(data["controls"])
    keys = [tuple(setting[:count]) for setting in data["settings"]]
    assert len(set(keys)) == len(keys) > 1
    for index, control in enumerate(data["controls"]):
        places = {key[index] for key in keys}
        assert places == set(range(len(control["values"]))) and len(control["words"]) == len(control["values"])
        assert control["label"].strip() and control["kind"] in ("menu", "check", "slider")
    assert {setting[count] for setting in data["settings"]} == set(range(len(data["statuses"])))
    assert {setting[count + 1] for setting in data["settings"]} == set(range(len(data["pictures"])))
    text = "".join([*data["pieces"], *data["statuses"]])
    assert "<script" not in text and str(live.ROOT) not in text and "site-packages" not in text


def test_an_unknown_panel_is_refused(capsys):
    with pytest.raises(SystemExit):
        live.main(["no_such_panel"])
    assert "no such panel: no_such_panel" in capsys.readouterr().err


def test_numbers_stand_in_their_order_and_words_as_they_came():
    assert live.in_order(["64", "16", "256", "16"]) == ["16", "64", "256"]
    assert live.in_order([True, False, True]) == [False, True]
    assert live.in_order(["8 bit", "fp16", "8 bit"]) == ["8 bit", "fp16"]
