"""docs/cheat_sheet.md is what the course computes now."""

import re

import pytest

from tools import cheat_sheet

STORED = cheat_sheet.TARGET.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 2, 7])
def test_a_row_is_computed_anew(number):
    """Where one begins, and one step of each kind: without adapters and with them."""
    assert cheat_sheet.row(number) in STORED.splitlines(), "python tools/cheat_sheet.py"


def test_every_step_is_in_the_table():
    assert len(re.findall(r"GiB \(−\d+%\)", STORED)) == 2 * (len(cheat_sheet.STEPS) - 1)


@pytest.mark.stress
def test_every_number_is_computed_anew():
    assert cheat_sheet.page() == STORED, "python tools/cheat_sheet.py"
