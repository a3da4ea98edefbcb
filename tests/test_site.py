"""The website, built from what is committed, and the files of .github."""

import importlib.util
import json
import re
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
import yaml
from pygments.lexers import get_lexer_by_name
from pygments.token import Token

from tools import site

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks" / "ko").glob("*.ipynb"))
TEXTS = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def test_without_its_libraries_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(site, "NEEDED", ("json", "no_such_library"))
    assert site.main(["--to", str(tmp_path / "site")]) == 1
    said = capsys.readouterr().out
    assert "no_such_library not installed" in said and "requirements-site.txt" in said
    assert not (tmp_path / "site").exists()


def test_a_notebook_for_the_web():
    new = nbformat.v4
    raw = "https://raw.githubusercontent.com/a/b/main/image/x.svg"
    panel = new.new_output("display_data", data={"text/plain": "NewPanel()"})
    drawn = new.new_output("display_data", data={"text/plain": "RingPanel()", "image/svg+xml": "<svg/>"})
    table = new.new_output("display_data", data={"text/html": '<a href="01_x.ipynb">x</a>', "text/plain": "x"})
    notebook = new.new_notebook(
        cells=[
            new.new_code_cell("import sys", metadata={"tags": ["set-up"]}),
            new.new_markdown_cell(f"![그림]({raw})"),
            new.new_code_cell("new_panel()", outputs=[panel]),
            new.new_code_cell("number_panel()", outputs=[deepcopy(panel)]),
            new.new_code_cell("ring_panel()", outputs=[drawn]),
            new.new_code_cell("planner_panel()", outputs=[deepcopy(panel)]),
            new.new_code_cell("course_map()", outputs=[table]),
        ]
    )
    site.for_the_web(notebook)
    text, without, live, ring, planner, table = notebook.cells
    assert text.source == "![그림](../../image/x.svg)"
    assert without.outputs[0].data == {"text/plain": site.PANEL_NOTE}
    html = live.outputs[0].data["text/html"]
    assert 'data-source="../../_static/number_panel.js"' in html and 'aria-label="0.1의 비트"' in html
    assert (
        'data-panel="ring_panel"' in ring.outputs[0].data["text/html"] and "image/svg+xml" not in ring.outputs[0].data
    )
    assert '<a href="../../docs/answers.html#model=' in planner.outputs[0].data["text/html"]
    assert table.outputs[0].data["text/html"] == '<a href="01_x.html">x</a>'


@pytest.mark.parametrize("path", [*TEXTS, *NOTEBOOKS], ids=lambda path: path.name)
def test_code_in_a_text_can_be_read(path):
    """Sphinx warns of what is none, and the site is not built."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, nbformat.NO_CONVERT).cells
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    else:
        texts = [path.read_text(encoding="utf-8")]
    for language, code in FENCED.findall("\n\n".join(texts)):
        wrong = [text for kind, text in get_lexer_by_name(language).get_tokens(code) if kind is Token.Error]
        assert not wrong, f"no {language}: {wrong}"


def test_what_the_theme_says_is_korean_and_the_article_is_left_alone():
    page = (
        '<nav><label aria-label="Toggle site navigation sidebar">Menu</label></nav><article><p>Next</p></article>'
        "<span>\n Next </span><a>Nextcloud</a>"
    )
    assert site.in_korean(page) == (
        '<nav><label aria-label="장 목록 여닫기">메뉴</label></nav><article><p>Next</p></article>'
        "<span>\n 다음 </span><a>Nextcloud</a>"
    )
    assert site.in_korean("<p>Next</p>") == "<p>다음</p>"


def test_a_picture_with_links_becomes_a_part_of_the_page():
    page = site.LINKED.sub(site.inlined, (ROOT / "docs" / "answers.md").read_text(encoding="utf-8"))
    assert "image/answers.svg" not in page and "\n\n" not in page[page.index("<svg") : page.index("</svg>")]
    assert '<a href="#model=' in page


def test_a_pages_links_lead_to_what_the_site_has():
    """The pages of docs: a link out of what `prepare` lays out would end the build."""
    there = [ROOT / name for name in ("docs", "image", "notebooks/ko", *site.FILES)]
    for page in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            assert target.exists() and any(target.is_relative_to(place) for place in there), (page.name, link)


def test_a_course_with_an_address_has_a_button_to_colab():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 3장\n\n글")])
    site.for_the_web(notebook, "03_x")
    assert notebook.cells[0].source == "# 3장\n\n글"
    site.for_the_web(notebook, "03_x", "https://github.com/a/b")
    address = "https://colab.research.google.com/github/a/b/blob/main/notebooks/ko/03_x.ipynb"
    assert notebook.cells[0].source == f'# 3장\n\n<a class="colab" href="{address}">Colab에서 실행하기</a>\n\n글'


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in site.NEEDED), reason="requirements-site.txt is not installed"
)
def test_the_site_is_built_and_whole(tmp_path):
    assert site.main(["--to", str(tmp_path / "site")]) == 0
    for notebook in (ROOT / "notebooks" / "ko").glob("*.ipynb"):
        page = (tmp_path / "site" / "notebooks" / "ko" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', page), "fetched from elsewhere"
        icon = re.search(r'<link rel="(?:shortcut )?icon" href="([^"?]+)', page)[1]
        assert (tmp_path / "site" / "notebooks" / "ko" / icon).exists()
    index = (tmp_path / "site" / "searchindex.js").read_text(encoding="utf-8")
    assert json.dumps("그레이디언트").strip('"') in index


# ---- .github -------------------------------------------------------------------------------------------------------


def load(name):
    return yaml.safe_load((ROOT / ".github" / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_checks_on_every_supported_python():
    jobs = load("workflows/checks.yml")["jobs"]
    supported = re.findall(r"3\.\d+", (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[1])
    pythons = jobs["course"]["strategy"]["matrix"]["python"]
    assert [pythons[0], pythons[-1]] == supported
    assert any(step.get("run") == ".ci/run" for step in jobs["course"]["steps"])
    assert "notebooks/ko" in jobs["colab"]["steps"][-1]["run"]


@pytest.mark.parametrize("form", ["problem", "measurement"])
def test_the_forms_ask_for_gpu_versions_and_the_reports_text(form):
    fields = {field["id"]: field for field in load(f"ISSUE_TEMPLATE/{form}.yml")["body"]}
    asked = ["gpu", "versions", "said" if form == "problem" else "measured"]
    assert all(fields[name]["validations"]["required"] for name in asked)
