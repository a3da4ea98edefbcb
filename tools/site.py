"""The course as a website: what is committed (notebooks with their outputs, pictures, pages) -> tmp/site.

    python tools/site.py [--to FOLDER]

Nothing is run and nothing is fetched. It needs the packages of requirements-site.txt.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("sphinx", "myst_nb", "furo", "latex2mathml")
RAW_PICTURE = re.compile(r"https://raw\.githubusercontent\.com/[^/]+/[^/]+/main/(image/)")
PANEL_NOTE = "(조작 패널은 노트북을 실행하면 나타난다. 여기서는 그림이 그 모습을 보여 준다.)"
PAGES = {
    "처방 한 장": "cheat_sheet",
    "질문에서 시작하기": "questions",
    "여러 GPU에서 돌리기": "launching",
    "출처마다 얼마나 틀리나": "errors",
    "용어집": "glossary",
    "출처": "sources",
}
# Furo lets a formula scroll, which cuts off a fraction's numerator; none of the page's fonts has a formula's signs.
# A browser breaks Korean between any two letters. A table of an output has no rules of its own here, and one that is
# wider than the page scrolls inside itself, as a picture does whose words would become too small to read.
STYLE = """math { font-family: math, serif; overflow: visible; }
article { word-break: keep-all; overflow-wrap: anywhere; }
.cell_output table { display: block; overflow-x: auto; border-collapse: collapse; margin: 0.5rem 0; }
.cell_output th, .cell_output td { padding: 0.2rem 0.7rem; border-bottom: 1px solid var(--color-background-border);
  white-space: nowrap; text-align: right; }
.cell_output th:first-child, .cell_output td:first-child { text-align: left; }
@media (max-width: 600px) {
  .cell_output .output.text_html, .cell_output .output.image_svg, article .figure, article p:has(> img) {
    overflow-x: auto; }
  .cell_output svg, article p > img[src$=".svg"] { max-width: none !important; min-width: 560px; }
}
"""
CONF = """
import latex2mathml.converter
project, language, author = "작은 GPU, 큰 모델", "ko", "the gpu-memory-course authors"
html_title = project
extensions = ["myst_nb"]
exclude_patterns = []
nb_execution_mode = "off"
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_show_copyright = html_show_sphinx = html_show_sourcelink = html_copy_source = False
html_math_renderer = "mathml"
html_static_path, html_css_files = ["static"], ["course.css"]


def _write(display):
    from docutils.nodes import SkipNode

    def visit(self, node):
        formula = latex2mathml.converter.convert(node.astext(), display=display)
        # Room above and below: where it scrolls, what is taller than a line would be cut off.
        style = "overflow-x: auto; padding: 0.8em 0"
        self.body.append(formula if display == "inline" else f'<div style="{style}">{formula}</div>')
        raise SkipNode

    return visit


def setup(app):
    # The browser's own mathematics: a script would have to be fetched.
    app.add_html_math_renderer("mathml", (_write("inline"), None), (_write("block"), None))
"""


def prepare(source: Path) -> None:
    """Lay out in `source` what Sphinx reads: the repository's own folders, so that every link stays as it is."""
    shutil.copytree(ROOT / "image", source / "image")
    shutil.copytree(ROOT / "docs", source / "docs")
    (source / "notebooks" / "ko").mkdir(parents=True)
    names = []
    for path in sorted((ROOT / "notebooks" / "ko").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        for_the_web(notebook)
        nbformat.write(notebook, source / "notebooks" / "ko" / path.name)
        names.append(f"notebooks/ko/{path.stem}")
    for name in ("requirements.txt", "requirements-colab.txt"):
        shutil.copy(ROOT / name, source)
    readme = (ROOT / "README.ko.md").read_text(encoding="utf-8")
    picture = re.search(r"^!\[.*$", readme, re.MULTILINE)[0]
    opening = next(part for part in readme.split("\n\n")[1:] if part[0] not in "*!#")
    (source / "index.md").write_text(
        f"# 작은 GPU, 큰 모델\n\n{picture}\n\n{opening}\n\n[0장에서 시작한다](notebooks/ko/00_start_here.ipynb).\n\n"
        + toctree("장", names)
        + toctree("곁에 두고 보기", [f"{words} <docs/{name}>" for words, name in PAGES.items()]),
        encoding="utf-8",
    )
    (source / "static").mkdir()
    (source / "static" / "course.css").write_text(STYLE, encoding="utf-8")
    (source / "conf.py").write_text(CONF, encoding="utf-8")


def toctree(caption: str, entries: list[str]) -> str:
    return f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n" + "\n".join(entries) + "\n```\n\n"


def for_the_web(notebook: nbformat.NotebookNode) -> None:
    """Take out, in place, what only a notebook needs: the set-up cells, public addresses of pictures, panels' names."""
    notebook.cells = [cell for cell in notebook.cells if "set-up" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = RAW_PICTURE.sub(r"../../\1", cell.source)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if list(data) == ["text/plain"] and re.search(r"_panel\(", cell.source):
                data["text/plain"] = PANEL_NOTE
            if "text/html" in data:
                data["text/html"] = re.sub(r'(href="[\w.-]+)\.ipynb"', r'\1.html"', data["text/html"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "tmp" / "site", help="the folder (default: tmp/site)")
    arguments = parser.parse_args(argv)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The site is not built: {', '.join(missing)} not installed for {sys.executable}.")
        print(f"Bring them with: {sys.executable} -m pip install -r requirements-site.txt")
        return 1
    from sphinx.cmd.build import main as sphinx

    source = arguments.to.with_name(arguments.to.name + "-source")
    for folder in (source, arguments.to):
        shutil.rmtree(folder, ignore_errors=True)
    prepare(source)
    # A link that leads nowhere or a picture that is not there ends the build.
    status = sphinx(["-q", "-W", "--keep-going", "-b", "html", str(source), str(arguments.to)])
    if status == 0:
        print(f"wrote {arguments.to / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
