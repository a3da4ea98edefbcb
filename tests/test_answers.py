"""docs/answers.json is what the planner says now; the page and the picture are drawn from it."""

import json
import re
import shlex
import xml.dom.minidom
from urllib.parse import parse_qsl

import pytest

from helpers.chapters.c9_planner.heat_map import heat_map
from tools import answers
from virtual_gpu.__main__ import main as virtual_gpu
from virtual_gpu.plan import plan_training

ROWS = json.loads(answers.TARGET.read_text(encoding="utf-8"))


def test_a_row_is_computed_anew():
    row = min(ROWS, key=lambda row: (answers.MODELS.index(row["model"]), row["length"], row["card"]))
    assert answers.answer(row["model"], row["card"], row["length"]) == row, "python tools/answers.py"


@pytest.mark.stress
def test_every_row_is_computed_anew():
    assert [answers.answer(row["model"], row["card"], row["length"]) for row in ROWS] == ROWS


@pytest.mark.stress
@pytest.mark.parametrize("length", [512, 2048])
def test_the_answer_is_the_first_of_the_whole_ranking(length):
    best = plan_training("Qwen/Qwen3-0.6B", "T4", length=length, batch=answers.BATCH).best
    row = answers.answer("Qwen/Qwen3-0.6B", "T4", length)
    assert (row["method"], row["plan"], row["needed_bytes"]) == (best.recipe.method, best.title, best.needed_bytes)


def test_page_and_picture_are_drawn_from_the_rows():
    assert answers.page(ROWS) == answers.TARGET.with_suffix(".md").read_text(encoding="utf-8"), "--draw"
    picture = (answers.ROOT / "image" / "answers.svg").read_text(encoding="utf-8")
    assert answers.heat_map(ROWS).svg() + "\n" == picture, "python tools/answers.py --draw"
    assert answers.in_order(ROWS) == ROWS


def test_a_card_with_a_blank_is_quoted():
    command = answers.command({"model": "a/b", "card": "RTX 3090", "length": 512})
    assert command == 'virtual-gpu fit --model a/b --gpu "RTX 3090" --length 512 --batch 16'


@pytest.mark.slow
def test_the_command_of_a_row_says_the_same(capsys):
    row = next(row for row in ROWS if row["method"])
    program, *arguments = shlex.split(answers.command(row))
    assert program == "virtual-gpu" and virtual_gpu([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["plans"][0]
    assert (first["method"], first["needed_bytes"], first["card_bytes"]) == (
        row["method"],
        row["needed_bytes"],
        row["card_bytes"],
    )


def test_nothing_is_missing():
    """Every model, card and length; a length that the model has no positions for is not asked for."""
    assert answers.lengths_of("EleutherAI/polyglot-ko-1.3b") == [512, 2048]
    asked = {(m, card, length) for m in answers.MODELS for card in answers.CARDS for length in answers.lengths_of(m)}
    assert {(row["model"], row["card"], row["length"]) for row in ROWS} == asked and len(ROWS) == len(asked)


def test_where_nothing_fits_the_line_says_so():
    row = {"model": "a/b", "card": "T4", "length": 512, "method": None}
    page = answers.page([row])
    assert re.search(r"\| b \| T4 \| 512 \| 없음 \| 들어가는 것이 없다 \| – \| – \|", page)


def test_a_cell_of_the_heat_map_leads_to_its_row():
    """On the site: its link filters the page's table to one row, and says what stands there."""
    document = xml.dom.minidom.parseString(answers.heat_map(ROWS).svg())
    table = [line.strip("| ").split(" | ")[:5] for line in answers.page(ROWS).splitlines() if line.startswith("| ")][1:]
    shown = [row for row in ROWS if row["length"] == answers.SHOWN]
    links = document.getElementsByTagName("a")
    assert len(links) == len(shown) > 0
    for link in links:
        said = dict(parse_qsl(link.getAttribute("href").removeprefix("#")))
        (row,) = [row for row in table if row[:3] == [said["model"], said["gpu"], said["length"]]]
        told = link.getAttribute("aria-label")
        assert told.startswith(f"{row[0]}, {row[1]}: ") and (row[4] in told or row[3] == "없음")


def test_a_cell_of_the_panels_heat_map_chooses_its_model_and_gpu():
    document = xml.dom.minidom.parseString(heat_map(ROWS, ("planner-model", "planner-gpu")).svg())
    cells = [part for part in document.getElementsByTagName("g") if part.getAttribute("data-part")]
    written = {tuple(json.loads(cell.getAttribute("data-value"))) for cell in cells}
    assert written == {(row["model"], row["card"]) for row in ROWS if row["length"] == answers.SHOWN}
    assert {cell.getAttribute("data-to") for cell in cells} == {"planner-model planner-gpu"}
