"""The course's words: one spelling each, everywhere; and each word stands in the chapter that the glossary names."""

import re
import unicodedata
from pathlib import Path

import pytest

from helpers.chapters import CHAPTERS

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
TEXTS = [
    *SOURCES,
    *sorted((ROOT / "helpers").rglob("*.py")),
    *sorted((ROOT / "virtual_gpu").rglob("*.py")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.ko.md",
]
TEXTS.remove(GLOSSARY)


def entries():
    lines = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def words(cell):
    return [word.strip() for word in re.sub(r"\([^)]*\)", "", cell).split(",") if word.strip()]


AVOIDED = {wrong: row[0] for row in entries() for wrong in words(row[4])}


def faults(text):
    """The avoided spellings in a text, as `wrong → right`."""
    return [f"{wrong} → {right}" for wrong, right in AVOIDED.items() if wrong in text]


def test_the_glossary_is_whole():
    assert len(entries()) >= 40
    for row in entries():
        assert len(row) == 5 and all(row[:4]), row
        assert row[3].isdecimal() and int(row[3]) in (0, *CHAPTERS), row
    right = [word for row in entries() for word in words(row[0])]
    assert len(right) == len(set(right))
    assert not any(wrong in word for word in right for wrong in AVOIDED)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_has_another_spelling(path):
    assert faults(path.read_text(encoding="utf-8")) == []


def test_another_spelling_is_found():
    assert faults("그래디언트와 배치 사이즈") == ["그래디언트 → 그레이디언트", "배치 사이즈 → 배치 크기"]


@pytest.mark.parametrize("row", entries(), ids=lambda row: row[0])
def test_a_word_stands_in_its_chapter(row):
    chapter = [path for path in SOURCES if path.name.startswith(f"{int(row[3]):02d}_")]
    if not chapter:
        pytest.skip(f"chapter {row[3]} is not there")
    text = chapter[0].read_text(encoding="utf-8")
    for word in words(row[0]):
        # Letter by letter, so that 얼리다 is found in 얼린.
        assert letters(word.removesuffix("다")) in letters(text), word


def letters(text):
    return unicodedata.normalize("NFD", text)
