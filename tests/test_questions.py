"""docs/questions.md: twenty questions, each led to a section that is there or said to be open."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "questions.md"
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
LINKS = re.findall(r"\[([^\]]+)\]\(((?!https:)[^)]+)\)", PAGE.read_text(encoding="utf-8"))


def headings(notebook: Path) -> set[str]:
    source = ROOT / "notebooks" / "src" / f"{notebook.stem}.py"
    return {line.strip() for line in re.findall(r"^# #{2,3} (.+)$", source.read_text(encoding="utf-8"), re.MULTILINE)}


def test_there_are_twenty_questions_each_with_a_place_or_open():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 21))
    assert all(re.search(r"\]\(|\d+장\(\d+\.\d|열려 있다", answer) for _, _, answer, _ in ROWS)
    assert all(re.search(r"#\d+", thread) for *_, thread in ROWS)


@pytest.mark.parametrize("words, target", sorted(set(LINKS)))
def test_a_link_leads_to_a_heading_that_is_there(words, target):
    path = (PAGE.parent / target).resolve()
    assert path.exists(), target
    if path.suffix == ".ipynb":
        assert words in headings(path), f"{path.stem} has no section {words!r}"


def test_the_pages_lead_to_each_other():
    sheet = (ROOT / "docs" / "cheat_sheet.md").read_text(encoding="utf-8")
    assert "(questions.md)" in sheet and "10_oom_clinic.ipynb" in sheet
    assert "(cheat_sheet.md)" in PAGE.read_text(encoding="utf-8")
