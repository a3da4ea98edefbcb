"""Write the table of chapters into README.md and README.ko.md: titles, questions and minutes as the notebooks say.

    .venv/bin/python tools/chapters.py

`make test` fails where a page says something else than the notebooks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from helpers import set_language  # noqa: E402
from helpers.course import CHAPTERS, START, chapter  # noqa: E402

PAGES = {"en": ROOT / "README.md", "ko": ROOT / "README.ko.md"}
MARKERS = re.compile(r"(<!-- chapters:begin -->\n).*?(<!-- chapters:end -->)", re.DOTALL)
HEADS = {
    "en": ("", "Chapter", "The question it answers", "minutes", "exercises"),
    "ko": ("", "장", "답하려는 질문", "분", "연습 문제"),
}
FOLDER = "notebooks/ko"


def table(language: str) -> str:
    """The chapters as a Markdown table."""
    set_language(language)
    rows = [HEADS[language], ("---",) * 5]
    for entry in (START, *CHAPTERS):
        line = chapter(entry, ROOT / FOLDER)
        link = f"[{line.title}]({FOLDER}/{line.notebook}.ipynb)"
        rows.append((str(line.number), link, line.question, str(line.minutes), str(line.exercises or "")))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(text: str, language: str) -> str:
    """A page's text with the table of today. ValueError where it has no place for it."""
    made, places = MARKERS.subn(lambda match: f"{match[1]}{table(language)}{match[2]}", text)
    if places != 1:
        raise ValueError(f"a page has one <!-- chapters:begin --> … <!-- chapters:end -->, this one has {places}")
    return made


def main() -> None:
    for language, page in PAGES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), language), encoding="utf-8")


if __name__ == "__main__":
    main()
