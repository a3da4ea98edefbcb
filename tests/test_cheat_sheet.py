"""docs/cheat_sheet.md is what the course computes now."""

import ast
import re

import pytest

from tools import cheat_sheet
from virtual_gpu.changes import CHANGES
from virtual_gpu.models import attention
from virtual_gpu.plan.files import trainer, trl_sft

STORED = cheat_sheet.TARGET.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 2, 7])
def test_a_row_is_computed_anew(number):
    """Where one begins, and one step of each kind: without adapters and with them."""
    assert cheat_sheet.row(number) in STORED.splitlines(), "python tools/cheat_sheet.py"


def test_every_step_is_in_the_table():
    assert len(re.findall(r"GiB \(−\d+%\)", STORED)) == 2 * (len(cheat_sheet.STEPS) - 1)


def test_the_page_s_text_is_the_tool_s():
    """Each line, but for the numbers in it: who edits the page alone loses it when it is written again."""
    written = cheat_sheet._linked(cheat_sheet.PAGE).splitlines()
    whole = ("{rows}", "{code}", "{stages}")
    patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(line)) for line in written if line not in whole]
    computed = len(cheat_sheet.STEPS) + len(cheat_sheet.CODE) + 4  # of ZeRO's stages
    stored = STORED.splitlines()
    assert len(stored) == len(patterns) + computed
    found = [any(re.fullmatch(pattern, line) for line in stored) for pattern in patterns]
    assert all(found), [pattern for pattern, there in zip(patterns, found, strict=True) if not there]


@pytest.mark.parametrize("name", cheat_sheet.CODE)
def test_code_is_taken_as_it_stands(name, tmp_path):
    """TrainingArguments knows the names and the values; a loop's lines are Python."""
    from transformers import TrainingArguments

    arguments, loop = cheat_sheet.CODE[name]
    keywords = ast.parse(f"f({arguments})").body[0].value.keywords
    given = {one.arg: ast.literal_eval(one.value) for one in keywords if one.arg != "fp16"}  # a CPU has no fp16
    taken = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
    assert all(getattr(taken, key) == value for key, value in given.items())
    assert ast.parse(loop).body
    assert cheat_sheet.code_row(name) in STORED


def test_lines_below_the_table_are_those_of_the_scripts():
    """The page's FusedTrainer, the line for grouped heads and adapters in fp32: as `fit --save` writes them."""
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", STORED, re.DOTALL))
    defined = {one.name: one for one in ast.parse(blocks).body if isinstance(one, ast.ClassDef)}
    written = ast.parse(trainer._FUSED_TRAINER).body[0]
    proposed = ast.parse(CHANGES["fused_head"].subclass).body[-1]
    for method in (found := [*defined["FusedTrainer"].body, *written.body[1:], *proposed.body]):  # no docstring
        method.body[0].value.orelse = ast.Constant(None)  # {**inputs, "fused_lm_head": True}, written otherwise
    page, script, lines = map(ast.dump, found)
    assert page == script == lines
    assert attention.REPEAT_KV in blocks
    assert "parameter.data = parameter.data.float()" in blocks and "parameter.data.float()" in trl_sft._UPCAST


@pytest.mark.stress
def test_every_number_is_computed_anew():
    assert cheat_sheet.page() == STORED, "python tools/cheat_sheet.py"
