"""The course as a website: what is committed (notebooks with their outputs, pictures, pages) -> tmp/site.

    python tools/site.py [--to FOLDER]

Nothing is run and nothing is fetched. It needs the packages of requirements-site.txt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import sys
import tomllib
from html import escape
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
WEBSITE = ROOT / "tools" / "website"  # styles, scripts and Sphinx's settings
NEEDED = ("sphinx", "myst_nb", "furo", "latex2mathml", "bs4")
RAW_PICTURE = re.compile(r"https://raw\.githubusercontent\.com/[^/]+/[^/]+/main/(image/)")
LIVE = ROOT / "image" / "live"  # tools/live.py
LINKED = re.compile(r"^!\[.*\]\((\.\./image/answers\.svg)\)$", re.MULTILINE)  # a picture whose links are followed
FILES = ("requirements.txt", "requirements-colab.txt")  # that pages lead to
STATIC = ("course.css", "live.js", "find.js", "answers.js")
PANEL_CALL = re.compile(r"\b(\w+_panel)\(")
PANEL_NOTE = "(조작 패널은 노트북을 실행하면 나타난다. 여기서는 그림이 그 모습을 보여 준다.)"
LIVE_NOTE = "값을 바꾸면 그 설정에서 미리 계산한 결과가 나타난다. 노트북을 실행하면 다른 값도 고를 수 있다."
PLANNER_NOTE = "칸을 누르면 그 모델과 GPU에서 1위로 꼽힌 계획이 나온다. 다른 설정은 노트북을 실행해서 찾는다."
ANSWERS = "../../docs/answers.html"
NO_SCRIPT = "자바스크립트를 켜면 값을 바꿀 수 있다. 그림은 패널을 처음 열었을 때의 것이다."
TRY = """[0장에서 시작한다](notebooks/ko/00_start_here.ipynb). 설치하지 않고 이 자리에서 만져 볼 수 있는 것도 있다.

- <a href="notebooks/ko/01_data_types.html#number_panel">숫자 하나의 비트</a>: 0.1은 어떤 형식에서 얼마가 되나
- <a href="notebooks/ko/02_quantization.html#quantization_panel">양자화</a>: 이상치 하나가 코드를 얼마나 버리나
- <a href="notebooks/ko/03_memory_decomposition.html#allocator_panel">할당자</a>: 텐서가 어디에 놓이고, 왜 빈틈이 남나
- <a href="notebooks/ko/08_lora.html#lora_panel">LoRA의 메모리</a>: 조금만 학습하면 무엇이 줄고 무엇이 남나
- <a href="docs/answers.html">모델 × GPU</a>: 무엇이 들어가나"""
COLAB = "https://colab.research.google.com/github/{path}/blob/main/notebooks/ko/{name}.ipynb"
GITHUB = re.compile(r"https://github\.com/([^/]+/[^/]+?)(?:\.git)?/?")
# What Furo says around a page: it has no Korean of its own.
FURO = {
    "Back to top": "맨 위로", "Next": "다음", "Previous": "이전", "Home": "처음", "On this page": "이 쪽의 차례",
    "Contents": "차례", "Menu": "메뉴", "Expand": "펼치기", "Skip to content": "본문으로", "Made with": "만든 도구:",
    "Light mode": "밝게", "Dark mode": "어둡게", "Auto light/dark, in light mode": "시스템을 따라 밝게",
    "Auto light/dark, in dark mode": "시스템을 따라 어둡게", "Toggle site navigation sidebar": "장 목록 여닫기",
    "Toggle table of contents sidebar": "이 쪽의 차례 여닫기",
    "Toggle Light / Dark / Auto color theme": "밝게, 어둡게, 시스템을 따라",
}  # fmt: skip
AROUND = re.compile(rf'(>\s*|aria-label=")({"|".join(map(re.escape, FURO))})(?=\s*<|")')
PAGES = {
    "처방 한 장": "cheat_sheet",
    "레버 한 장": "levers",
    "무엇이 들어가나": "answers",
    "질문에서 시작하기": "questions",
    "플래너의 옵션": "planner",
    "여러 GPU에서 돌리기": "launching",
    "출처마다 얼마나 틀리나": "errors",
    "다른 계산기들은 얼마나 맞나": "others",
    "용어집": "glossary",
    "출처": "sources",
}


def prepare(source: Path) -> None:
    """Lay out in `source` what Sphinx reads: the repository's own folders, so that every link stays as it is."""
    shutil.copytree(ROOT / "image", source / "image")
    shutil.copytree(ROOT / "docs", source / "docs")
    for path in (source / "docs").glob("*.md"):
        path.write_text(LINKED.sub(inlined, path.read_text(encoding="utf-8")), encoding="utf-8")
    (source / "notebooks" / "ko").mkdir(parents=True)
    names = []
    for path in sorted((ROOT / "notebooks" / "ko").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        for_the_web(notebook, path.stem, repository())
        nbformat.write(notebook, source / "notebooks" / "ko" / path.name)
        names.append(f"notebooks/ko/{path.stem}")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    (source / "index.md").write_text(index(names), encoding="utf-8")
    shutil.copytree(WEBSITE / "templates", source / "templates")
    for name in ("conf.py", "icon.svg"):
        shutil.copy(WEBSITE / name, source)
    write_static(source / "static")


def inlined(picture: re.Match) -> str:
    """A picture as a part of the page, where its links work."""
    return f'<div class="linked">\n{(ROOT / "docs" / picture[1]).read_text(encoding="utf-8").strip()}\n</div>'


def index(chapters: list[str]) -> str:
    """The first page: README's picture and opening, what can be tried at once, how accurate it is, and every page."""
    readme = (ROOT / "README.ko.md").read_text(encoding="utf-8")
    picture, accuracy = (re.search(rf"^!\[.*{name}.*$", readme, re.MULTILINE)[0] for name in ("", "truth_ko"))
    narrow = accuracy.replace("truth_ko.svg", "truth_ko_narrow.svg")
    opening = next(part for part in readme.split("\n\n")[1:] if part[0] not in "*!#")
    pages = [f"{words} <docs/{name}>" for words, name in PAGES.items() if (ROOT / "docs" / f"{name}.md").exists()]
    pages += [f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in PAGES.values()]
    parts = [
        "# 작은 GPU, 큰 모델",
        picture,
        opening,
        TRY,
        "## 실제 카드와 얼마나 다른가",
        f'<div class="wide">\n\n{accuracy}\n\n</div>\n<div class="narrow">\n\n{narrow}\n\n</div>',
        "점 하나가 다른 사람이 자기 GPU에서 잰 값 하나다. 자세한 것은 [출처마다 얼마나 틀리나](docs/errors.md)에 있다.",
        toctree("장", chapters) + toctree("곁에 두고 보기", pages),
    ]
    return "\n\n".join(parts)


def write_static(folder: Path) -> None:
    """The site's own style and scripts, and what was computed for its panels."""
    folder.mkdir()
    for name in STATIC:
        shutil.copy(WEBSITE / name, folder)
    for path in sorted(LIVE.glob("*.json")):  # as a script: a page that is opened as a file may fetch nothing
        text = path.read_text(encoding="utf-8").strip()
        (folder / f"{path.stem}.js").write_text(f"coursePanel({json.dumps(path.stem)},{text});\n", encoding="utf-8")


def toctree(caption: str, entries: list[str]) -> str:
    return f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n" + "\n".join(entries) + "\n```\n\n"


def repository() -> str:
    """The course's public address, empty until it has one."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["course"]["repository"]


def for_the_web(notebook: nbformat.NotebookNode, name: str = "", address: str = "") -> None:
    """Change what only a notebook needs, in place: set-up cells, pictures' public addresses, panels without a kernel.

    Where the course has a public `address`, the notebook `name` gets a button that opens it on Colab.
    """
    notebook.cells = [cell for cell in notebook.cells if "set-up" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = RAW_PICTURE.sub(r"../../\1", cell.source)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            # A panel, with the picture that it has on a page without widgets or without one.
            if set(data) <= {"text/plain", "image/svg+xml"} and (panel := PANEL_CALL.search(cell.source)):
                found = live_panel(panel[1])
                if "text/html" in found:
                    data.pop("image/svg+xml", None)
                data |= found
            if "text/html" in data:
                data["text/html"] = re.sub(r'(href="[\w.-]+)\.ipynb"', r'\1.html"', data["text/html"])
    if (found := GITHUB.fullmatch(address)) and notebook.cells:
        button = f'<a class="colab" href="{COLAB.format(path=found[1], name=name)}">Colab에서 실행하기</a>'
        title, _, rest = notebook.cells[0].source.partition("\n")
        notebook.cells[0].source = f"{title}\n\n{button}\n{rest}"


def live_panel(name: str) -> dict[str, str]:
    """A panel's output: its still picture, and where the script finds what was computed for it."""
    path = LIVE / f"{name}.json"
    if name == "planner_panel":  # a search; of the commonest ones the answers are a page of their own
        links = (ROOT / "image" / "answers.svg").read_text(encoding="utf-8").replace('href="#', f'href="{ANSWERS}#')
        html = f'<div class="linked">{links}</div><p>{escape(PLANNER_NOTE)}</p>'
        return {"text/html": html, "text/plain": PANEL_NOTE}
    if not path.exists():
        return {"text/plain": PANEL_NOTE}
    data = json.loads(path.read_text(encoding="utf-8"))
    status, picture = data["settings"][data["start"]][-2:]
    still = "".join(data["pieces"][piece] for piece in data["pictures"][picture])
    html = (
        f'<div class="live" id="{name}" data-panel="{name}" data-source="../../_static/{name}.js">'
        f'<div class="live-status" aria-live="polite">{data["statuses"][status]}</div>'
        f'<div class="live-picture">{still}</div><p class="live-note">{escape(LIVE_NOTE)}</p>'
        f'<p class="live-still">{escape(NO_SCRIPT)}</p></div>'
    )
    return {"text/html": html, "text/plain": PANEL_NOTE}


def in_korean(page: str) -> str:
    """A built page with Furo's own words in Korean; the article is left alone."""
    before, tag, rest = page.partition("<article")
    article, end, after = rest.rpartition("</article>")

    def said(part: str) -> str:
        return AROUND.sub(lambda found: found[1] + FURO[found[2]], part)

    return said(before) + tag + article + end + said(after)


def sections(folder: Path) -> list[list[str]]:
    """(address, page, heading, text) of every section of the built pages, for the search."""
    from bs4 import BeautifulSoup

    found = []
    for path in [
        folder / "index.html",
        *sorted(folder.glob("docs/*.html")),
        *sorted(folder.glob("notebooks/**/*.html")),
    ]:
        article = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser").find("article")
        for part in article.select("a.headerlink, script, style, svg, math, .live, .toctree-wrapper"):
            part.decompose()
        page = article.find("h1").get_text(" ", strip=True)
        for section in reversed(article.find_all("section")):  # the inner ones first: each text is told once
            heading = section.find(re.compile("h[1-6]")).extract().get_text(" ", strip=True)
            text = " ".join(section.extract().get_text(" ", strip=True).split())
            address = f"{path.relative_to(folder).as_posix()}#{section['id']}"
            found.append([address, page, heading, text])
    return found


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
    quiet = [] if sys.stderr.isatty() else ["-q"]  # to a terminal Sphinx tells how far it is
    status = sphinx([*quiet, "-W", "--keep-going", "-b", "html", str(source), str(arguments.to)])
    if status == 0:
        for path in arguments.to.rglob("*.html"):
            path.write_text(in_korean(path.read_text(encoding="utf-8")), encoding="utf-8")
        index = json.dumps(sections(arguments.to), ensure_ascii=False, separators=(",", ":"))
        (arguments.to / "_static" / "find_index.js").write_text(f"courseIndex({index});\n", encoding="utf-8")
        print(f"wrote {arguments.to / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
