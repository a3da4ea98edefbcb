"""docs/cheat_sheet.md is what the course computes now."""

import re

from tools import cheat_sheet


def test_every_number_is_computed_anew():
    stored = cheat_sheet.TARGET.read_text(encoding="utf-8")
    assert cheat_sheet.page() == stored, "python tools/cheat_sheet.py"
    assert len(re.findall(r"GiB \(−\d+%\)", stored)) == 2 * (len(cheat_sheet.STEPS) - 1)
