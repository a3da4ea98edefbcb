"""The website in a real browser: a phone and a desk, light and dark, with and without scripts."""

import importlib.util
import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

from tools import site

pytestmark = pytest.mark.browser
STORED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(site.LIVE.glob("*.json"))}
LOOKS = [(400, "light"), (400, "dark"), (1280, "light"), (1280, "dark")]
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Korean words of which a part stands on another line, in what is seen.
BROKEN = """() => {
    const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const text = walk.currentNode;
        if (text.parentElement.closest("svg, script, style, pre, code")) continue;
        for (const word of text.data.matchAll(/[가-힣]{2,}/g)) {
            const range = document.createRange();
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            const seen = [...range.getClientRects()].filter(box => box.width > 1);
            if (new Set(seen.map(box => Math.round(box.top))).size > 1) found.push(word[0]);
        }
    }
    return found;
}"""
LINKS = """() => [...document.querySelectorAll("a[href], img[src]")].map(one => one.href || one.src)"""
ROLES = {"menu": "combobox", "check": "checkbox", "slider": "slider"}
TIMEOUT_MS = 120_000


@contextmanager
def opened(browser, address, width=1280, scheme="light", **more):
    """A page, and what its console complained of, which has to be nothing."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, locale="ko-KR", **more)
    context.set_default_timeout(TIMEOUT_MS)
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    yield page
    assert complaints == []
    context.close()


# -- a page of panels alone -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def panels(tmp_path_factory):
    """A folder with a page for every panel, as the site has it: `live_panel` and the site's own script and style."""
    folder = tmp_path_factory.mktemp("live")
    site.write_static(folder / "_static")
    pages = folder / "notebooks" / "ko"
    pages.mkdir(parents=True)
    head = (
        '<!doctype html><html lang="ko"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        '<title>panel</title><link rel="stylesheet" href="../../_static/course.css">'
        '<script defer src="../../_static/live.js"></script>'
    )
    for name in STORED:
        html = site.live_panel(name)["text/html"]
        (pages / f"{name}.html").write_text(f"{head}<body><main>{html}</main></body></html>", encoding="utf-8")
    return pages


def picture_of(data, setting):
    return "".join(data["pieces"][piece] for piece in data["pictures"][setting[-1]])


def is_shown(page, data, setting):
    """Whether the page shows what is stored for the setting, parsed as the browser parses it."""
    page.wait_for_selector(".live-ready")
    return page.evaluate(
        """([status, picture]) => [[".live-status", status], [".live-picture", picture]].every(([place, html]) => {
            const parsed = document.createElement("div");
            parsed.innerHTML = html;
            return document.querySelector(place).innerHTML === parsed.innerHTML;
        })""",
        [data["statuses"][setting[-2]], picture_of(data, setting)],
    )


def setting_in_address(page, data):
    """The setting that the address says, as places of values."""
    said = dict(page.evaluate("() => [...new URLSearchParams(location.hash.slice(1))]"))
    words = [[json.dumps(value).strip('"') for value in control["values"]] for control in data["controls"]]
    places = zip(data["controls"], words, strict=True)
    return [values.index(said[control["name"]]) for control, values in places]


def row_of(data, places):
    return next(row for row in data["settings"] if row[: len(places)] == places)


@pytest.mark.parametrize("name", STORED)
def test_a_key_moves_a_control_to_what_is_stored(browser, panels, name):
    """Each control, by keyboard alone: picture, status and address are those of one stored setting."""
    data = STORED[name]
    with opened(browser, (panels / f"{name}.html").as_uri()) as page:
        assert is_shown(page, data, data["settings"][data["start"]])
        moved = 0
        for control in data["controls"]:
            place = page.locator(f"[name='{control['name']}']")
            if place.is_disabled():
                continue
            before = page.evaluate("() => location.hash")
            place.focus()
            for key in {"check": ["Space"], "menu": ["ArrowDown", "ArrowUp"]}.get(
                control["kind"], ["ArrowRight", "ArrowLeft"]
            ):
                place.press(key)
                if page.evaluate("() => location.hash") != before:
                    break
            assert page.evaluate("() => location.hash") != before
            assert is_shown(page, data, row_of(data, setting_in_address(page, data)))
            moved += 1
        assert moved > 0


@pytest.mark.parametrize("name", STORED)
def test_an_address_opens_its_setting(browser, panels, name):
    data = STORED[name]
    last = data["settings"][-1]
    with opened(browser, (panels / f"{name}.html").as_uri()) as page:
        page.wait_for_selector(".live-ready")
        values = [[c["name"], c["values"][place]] for c, place in zip(data["controls"], last, strict=False)]
        text = page.evaluate("values => new URLSearchParams(values).toString()", values)
        page.evaluate("text => { location.hash = text }", text)
        page.wait_for_function("text => location.hash === '#' + text", arg=text)
        page.reload()
        assert is_shown(page, data, last)


def test_the_ring_plays_to_its_end_and_can_be_stopped(browser, panels):
    data = STORED["ring_panel"]
    with opened(browser, (panels / "ring_panel.html").as_uri()) as page:
        page.wait_for_selector(".live-ready")
        moment, end = page.get_by_role("slider", name="순간"), page.locator("[name=moment]").get_attribute("max")
        page.get_by_role("button", name="재생").press("Enter")
        page.get_by_role("button", name="멈춤").press("Enter")
        assert moment.input_value() != end
        page.get_by_role("button", name="재생").press("Enter")
        page.wait_for_function("end => document.querySelector('[name=moment]').value === end", arg=end)
        page.get_by_role("button", name="재생").wait_for()
        assert is_shown(page, data, row_of(data, setting_in_address(page, data)))
        page.get_by_role("button", name="재생").press("Enter")  # once more, from the start
        assert moment.input_value() == "0"


def test_nonsense_in_the_address_changes_nothing(browser, panels):
    name, data = next(iter(STORED.items()))
    first = data["controls"][0]["name"]
    with opened(browser, (panels / f"{name}.html").as_uri() + f"#{first}=%3Cb%3E&nothing=1&%E0%A4%A=2") as page:
        assert is_shown(page, data, data["settings"][data["start"]])


@pytest.mark.parametrize("name", STORED)
def test_a_panel_is_labelled_and_no_wider_than_the_page(browser, panels, name):
    with opened(browser, (panels / f"{name}.html").as_uri()) as page:
        page.wait_for_selector(".live-ready")
        for width, scheme in LOOKS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(WIDER) <= 0, (width, scheme)
        data = STORED[name]
        for control, place in zip(data["controls"], data["settings"][data["start"]], strict=False):
            found = page.get_by_role(ROLES[control["kind"]], name=control["label"], exact=True)
            assert found.count() == 1, control["label"]
            if control["kind"] == "slider":
                assert found.get_attribute("aria-valuetext") == control["words"][place]


def test_without_scripts_the_still_picture_is_there(browser, panels):
    for name, data in STORED.items():
        with opened(browser, (panels / f"{name}.html").as_uri(), java_script_enabled=False) as page:
            assert (
                page.locator(".live-picture")
                .inner_html()
                .startswith(picture_of(data, data["settings"][data["start"]])[:20])
            )
            assert page.get_by_text(site.NO_SCRIPT).is_visible()


# -- search -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """The search's page with two short pages to find."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "docs").mkdir()
    page = "<article><section id='{id}'><h1>{title}</h1><p>{text}</p>{more}</section></article>"
    inner = "<section id='in'><h2>5.2 구간</h2><p>그레이디언트체크포인팅을 켠다.</p></section>"
    (folder / "index.html").write_text(page.format(id="a", title="처음", text="배치와 길이", more=""), encoding="utf-8")
    (folder / "docs" / "b.html").write_text(
        page.format(id="b", title="체크포인트", text="a &lt;b&gt; c", more=inner), encoding="utf-8"
    )
    index = json.dumps(site.sections(folder), ensure_ascii=False)
    (folder / "index.js").write_text(f"courseIndex({index})", encoding="utf-8")
    shutil.copy(site.WEBSITE / "find.js", folder)
    body = re.search(
        r"{% block content %}(.*?){% endblock %}",
        (site.WEBSITE / "templates" / "search.html").read_text(encoding="utf-8"),
        re.S,
    )[1]
    scripts = '<script src="find.js"></script><script src="index.js"></script>'
    (folder / "search.html").write_text(f'<!doctype html><meta charset="utf-8">{body}{scripts}', encoding="utf-8")
    return folder


def test_the_index_has_every_section_once(search):
    assert site.sections(search) == [
        ["index.html#a", "처음", "처음", "배치와 길이"],
        ["docs/b.html#in", "체크포인트", "5.2 구간", "그레이디언트체크포인팅을 켠다."],
        ["docs/b.html#b", "체크포인트", "체크포인트", "a <b> c"],
    ]


def test_a_part_of_a_korean_word_is_found(browser, search):
    with opened(browser, (search / "search.html").as_uri() + "?q=%EC%B2%B4%ED%81%AC%ED%8F%AC%EC%9D%B8") as page:
        links = page.locator("#find-results a")
        assert links.all_inner_texts() == ["체크포인트", "5.2 구간"]  # a heading before a text
        assert page.locator("mark").all_inner_texts() == ["체크포인"]
        page.fill("#find-words", "길이 배치")
        assert links.all_inner_texts() == ["처음"]
        page.fill("#find-words", "<b>")
        assert links.all_inner_texts() == ["체크포인트"]
        page.fill("#find-words", "없는말")
        assert links.count() == 0 and "찾은 것이 없다" in page.inner_text("#find-count")
        assert "q=" in page.url


# -- the table of answers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The table's script on four rows, and a table on a page that has no place for it."""
    folder = tmp_path_factory.mktemp("answers")
    shutil.copy(site.WEBSITE / "answers.js", folder)
    rows = [("A", "T4", 512, "LoRA"), ("A", "L4", 512, "전체"), ("A", "L4", 2048, "QLoRA"), ("B", "T4", 512, "없음")]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{name}</th>" for name in ("모델", "GPU", "길이", "방법"))
    html = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    start = '<!doctype html><meta charset="utf-8"><script src="answers.js"></script>'
    page = f'{start}<section><div id="answers"></div>{html}</section>'
    (folder / "answers.html").write_text(page, encoding="utf-8")
    (folder / "other.html").write_text(f"{start}<section>{html}</section>", encoding="utf-8")
    return folder


def rows_shown(page):
    return ["/".join(row.split()) for row in page.locator("tbody tr:visible").all_inner_texts()]


def test_answers_are_filtered_by_menus_and_words(browser, table):
    with opened(browser, (table / "answers.html").as_uri()) as page:
        assert len(rows_shown(page)) == 4
        page.get_by_label("GPU").select_option("L4")
        page.get_by_label("길이").select_option("2048")
        assert rows_shown(page) == ["A/L4/2048/QLoRA"]
        assert page.evaluate("() => location.hash") == "#gpu=L4&length=2048"
        page.reload()
        assert rows_shown(page) == ["A/L4/2048/QLoRA"] and page.get_by_label("GPU").input_value() == "L4"
        page.get_by_label("찾을 말").fill("없는 말")
        assert rows_shown(page) == [] and "맞는 줄이 없다" in page.inner_text("#answers-count")
        page.evaluate("() => { location.hash = '#gpu=nonsense&q=lora' }")
        page.wait_for_function("() => document.querySelector('[name=q]').value === 'lora'")
        assert rows_shown(page) == ["A/T4/512/LoRA", "A/L4/2048/QLoRA"]


def test_other_tables_stay_as_they_are(browser, table):
    with opened(browser, (table / "other.html").as_uri()) as page:
        assert page.locator("select").count() == 0 and len(rows_shown(page)) == 4


# -- the whole site ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    missing = [name for name in site.NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"requirements-site.txt is not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("whole") / "site"
    assert site.main(["--to", str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_every_page_is_whole(browser, whole, width, scheme):
    """No page scrolls sideways, breaks a word or complains, and every link between pages leads to something."""
    known = {}
    for path in [whole / "index.html", *whole.glob("docs/*.html"), *whole.glob("notebooks/ko/*.html")]:
        with opened(browser, path.as_uri(), width, scheme) as page:
            assert page.evaluate(WIDER) <= 0 and page.evaluate(BROKEN) == [], path.name
            for link in page.evaluate(LINKS):
                address, _, anchor = link.partition("#")
                if address.startswith("file://"):
                    known.setdefault(address, set()).add(anchor if "=" not in anchor else "")

    for address, anchors in known.items():
        target = unquote(address.removeprefix("file://"))
        text = Path(target).read_bytes().decode("utf-8", "replace")
        for anchor in filter(None, anchors):
            assert f'id="{unquote(anchor)}"' in text, f"{target}#{anchor}"
