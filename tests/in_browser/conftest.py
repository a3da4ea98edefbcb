"""One JupyterLab, one Chromium and one page for all tests in this folder.

For the folder, not the session: Playwright holds an event loop while it is open, and other tests want theirs.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CLOSE, LOOK_TIMEOUT_S, OPEN, ROOT, START_TIMEOUT_S, OpenNotebook, chromium, end_kernels, jupyter_lab
from playwright.sync_api import Browser, Error

SIZE = {"width": 1280, "height": 1400}


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """A JupyterLab over a copy of the course: its address and the copy's folder."""
    home = tmp_path_factory.mktemp("course")
    for part in ("image", "notebooks/ko"):
        shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    with jupyter_lab(home, tmp_path_factory.mktemp("jupyter")) as address:
        yield address, home


@pytest.fixture(scope="package")
def open_notebook(lab, browser) -> Iterator[Callable[[str | Path], OpenNotebook]]:
    """Opens chapters: `open_notebook("03_memory_decomposition")`, or a notebook by its path; one at a time."""
    address, home = lab
    before: OpenNotebook | None = None

    def page_without_notebooks():
        if before is not None:
            before.stop_listening()
            try:
                before.page.evaluate(CLOSE, LOOK_TIMEOUT_S * 1000)
                return before.page
            except Error:  # what befell the page was told by the test that had it
                before.page.close()
        page = browser.new_page(locale="ko-KR")
        page.goto(f"{address}/lab?reset", timeout=START_TIMEOUT_S * 1000)
        page.wait_for_function("() => window.jupyterapp !== undefined", timeout=START_TIMEOUT_S * 1000)
        return page

    def open_(notebook: str | Path) -> OpenNotebook:
        nonlocal before
        path = Path(notebook)
        if path.suffix != ".ipynb":
            path = ROOT / "notebooks" / "ko" / f"{notebook}.ipynb"
        page = page_without_notebooks()
        page.set_viewport_size(SIZE)
        end_kernels(address)
        shutil.copy(path, home / "notebooks" / "ko")  # anew: an earlier test may have run it
        before = OpenNotebook(page)
        page.evaluate(OPEN, [f"notebooks/ko/{path.stem}.ipynb", START_TIMEOUT_S * 1000])
        return before

    yield open_
    end_kernels(address)
