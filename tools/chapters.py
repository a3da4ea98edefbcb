"""Write the table of chapters into README.md and README.ko.md: titles, questions and minutes as the notebooks say.

    .venv/bin/python tools/chapters.py           write both, and build chapter 0 where its map is not today's
    .venv/bin/python tools/chapters.py --check   only say what is not today's (status 1)

A cell more in a chapter can move its minutes. `make notebooks` does the first, `make check` the second.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from helpers import set_language  # noqa: E402
from helpers.course import CHAPTERS, START, CourseMap, chapter, course_map  # noqa: E402

PAGES = {"en": ROOT / "README.md", "ko": ROOT / "README.ko.md"}
MARKERS = re.compile(r"(<!-- chapters:begin -->\n).*?(<!-- chapters:end -->)", re.DOTALL)
HEADS = {
    "en": ("", "Chapter", "The question it answers", "minutes", "exercises"),
    "ko": ("", "장", "답하려는 질문", "분", "연습 문제"),
}
FOLDER = "notebooks/ko"
MAP = ROOT / FOLDER / "00_start_here.ipynb"


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


def map_is_todays(notebook: Path) -> bool:
    """Whether a built chapter 0 shows the map that its neighbours give, as a reader sees it who has solved nothing."""
    set_language("ko")
    html = CourseMap(replace(line, solved=0) for line in course_map(notebook.parent))._repr_html_()
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = (output.get("data", {}).get("text/html", "") for cell in cells for output in cell.get("outputs", ()))
    return html in ("".join(text) for text in shown)


def stale() -> Iterator[Path]:
    """The pages that say something else than the notebooks."""
    for language, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        if with_table(text, language) != text:
            yield page
    if not map_is_todays(MAP):
        yield MAP


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args(argv).check:
        pages = [str(page.relative_to(ROOT)) for page in stale()]
        for page in pages:
            print(f"{page}: its chapters are not what the notebooks say today; run tools/chapters.py")
        return 1 if pages else 0
    for language, page in PAGES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), language), encoding="utf-8")
    if not map_is_todays(MAP):
        return subprocess.run([sys.executable, ROOT / "tools" / "notebooks.py", "build", MAP.stem]).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
