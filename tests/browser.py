"""A real browser on a real JupyterLab, for tests of what the reader sees.

The fixture `open_notebook` (in_browser/conftest.py) opens a chapter by name (a copy: nothing in the repository
changes) or any .ipynb by path:

    def test_chapter(open_notebook):
        notebook = open_notebook("03_memory_decomposition")
        notebook.run_all()
        notebook.press_slider(".course-batch", "ArrowRight")
        notebook.wait_until_text(".course-status", lambda text: "16" in text)
        notebook.screenshot("03_panel", ".course-panel")
        assert notebook.errors() == [] and notebook.console_errors == [] and notebook.broken_pictures() == []

Widgets are found by the CSS class that the panel gave them (`widget.add_class("course-batch")`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
ARTIFACTS = ROOT / "tmp" / "artifacts"
START_TIMEOUT_S = 90
RUN_TIMEOUT_S = 300
LOOK_TIMEOUT_S = 120  # beside two other browsers on two cores a look took more than 60

# Steps in the page, each given up after a time: a dialogue that waits for a click would wait for ever.
WITHIN = """async (step, what, timeout) => {
    const late = new Promise((_, reject) =>
        setTimeout(() => reject(new Error("after " + timeout / 1000 + " s still not: " + what)), timeout));
    return await Promise.race([step(), late]);
}"""
# What is open is closed without a question, its kernel ended first: a page that loses its kernel complains.
CLOSE = f"""async timeout => await ({WITHIN})(async () => {{
    for (const widget of [...window.jupyterapp.shell.widgets("main")]) {{
        await widget.sessionContext?.shutdown();
        widget.dispose();
    }}
}}, "everything is closed", timeout)"""
OPEN = f"""async ([path, timeout]) => await ({WITHIN})(async () => {{
    const app = window.jupyterapp;
    await app.restored;
    const widget = await app.commands.execute("docmanager:open", {{ path, factory: "Notebook" }});
    await widget.context.ready;
    await widget.sessionContext.ready;
    await widget.sessionContext.session.kernel.info;
    window.courseNotebook = widget;
}}, "the notebook is open and its kernel answers", timeout)"""
# Not Run > Run All in the menu: a click can come before the kernel listens.
RUN_ALL = f"""async timeout => await ({WITHIN})(async () => {{
    const app = window.jupyterapp;
    app.shell.activateById(window.courseNotebook.id);
    await app.commands.execute("notebook:run-all-cells");
    // The command ends at the first error, also at a wanted one; the kernel answers when the cells behind it are done.
    await window.courseNotebook.sessionContext.session.kernel.requestKernelInfo();
}}, "every cell has run", timeout)"""
RUN_CELLS = f"""async ([text, timeout]) => await ({WITHIN})(async () => {{
    const app = window.jupyterapp;
    app.shell.activateById(window.courseNotebook.id);
    const content = window.courseNotebook.content;
    const code = content.widgets.filter(cell => cell.model.type === "code");
    for (const cell of code.filter((cell, i) => i === 0 || cell.model.sharedModel.source.includes(text))) {{
        content.activeCellIndex = content.widgets.indexOf(cell);
        content.deselectAll();
        await app.commands.execute("notebook:run-cell");
    }}
}}, "the cells have run", timeout)"""
CELLS = "() => window.courseNotebook.content.model.sharedModel.toJSON().cells"

# Browser messages that say nothing about the course. JupyterLab asks for ../../image/… once as it stands, before it
# asks for it below /files: `broken_pictures` tells whether the picture came.
HARMLESS = re.compile(r"favicon|ERR_INTERNET_DISCONNECTED|ERR_NAME_NOT_RESOLVED|127\.0\.0\.1:\d+/image/")
BROKEN_PICTURES = """async () => {
    const pictures = [...window.courseNotebook.node.querySelectorAll("img")];
    await Promise.all(pictures.map(picture => picture.decode().catch(() => null)));
    return pictures.filter(picture => picture.naturalWidth === 0).map(picture => picture.alt || picture.src);
}"""


class OpenNotebook:
    """A notebook open in JupyterLab."""

    def __init__(self, page: Page):
        self.page = page
        self.console_errors: list[str] = []
        page.on("console", self._note_message)
        page.on("pageerror", self._note_error)

    def stop_listening(self) -> None:
        """What the page complains of from now on is another notebook's."""
        self.page.remove_listener("console", self._note_message)
        self.page.remove_listener("pageerror", self._note_error)

    def _note_error(self, error: Error) -> None:
        self._note(str(error))

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._note(f"{message.text} ({message.location.get('url', '')})")

    def _note(self, text: str) -> None:
        if not HARMLESS.search(text):
            self.console_errors.append(text)

    def run_all(self, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Run every cell and wait until the last one is done."""
        self.page.evaluate(RUN_ALL, timeout_s * 1000)

    def run_cells(self, text: str, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Run the first code cell (a chapter's imports) and every cell whose source contains `text`.

        nbval runs the whole of every chapter; in a page it would cost minutes once more.
        """
        self.page.evaluate(RUN_CELLS, [text, timeout_s * 1000])

    def find(self, css: str) -> Locator:
        """The first part of the page with this CSS selector, once it is there."""
        found = self.page.locator(css).first
        found.wait_for(state="attached", timeout=LOOK_TIMEOUT_S * 1000)
        return found

    def text(self, css: str) -> str:
        return self.find(css).inner_text()

    def html(self, css: str) -> str:
        return self.find(css).inner_html()

    def press_slider(self, css: str, key: str = "ArrowRight", times: int = 1) -> None:
        """Move the slider inside the element, once it can be moved: ArrowLeft, ArrowRight, PageUp, Home, End."""
        handle = self.find(f"{css} .noUi-target:not([disabled]) .noUi-handle")
        handle.scroll_into_view_if_needed()
        handle.focus()
        for _ in range(times):
            handle.press(key)

    def choose(self, css: str, label: str) -> None:
        """Pick an entry of the drop-down inside the element."""
        self.find(f"{css} select").select_option(label=label)

    def click(self, css: str) -> None:
        self.find(css).click()

    def wait_until(self, met: Callable[[], bool], what: str, timeout_s: float = LOOK_TIMEOUT_S) -> None:
        """Wait for a condition; the message says what was waited for."""
        end = time.monotonic() + timeout_s
        while not met():
            assert time.monotonic() < end, f"after {timeout_s} s still not: {what}"
            self.page.wait_for_timeout(100)

    def wait_until_text(self, css: str, met: Callable[[str], bool], timeout_s: float = LOOK_TIMEOUT_S) -> str:
        """Wait until the text of an element is as it should be, and return it."""
        end = time.monotonic() + timeout_s
        while not met(text := self.text(css)):
            assert time.monotonic() < end, f"after {timeout_s} s the text of {css} is still {text!r}"
            self.page.wait_for_timeout(100)
        return text

    def cells(self) -> list[dict]:
        """The notebook's cells as the page holds them, with their outputs."""
        return self.page.evaluate(CELLS)

    def errors(self) -> list[str]:
        """Errors and warnings that cells put out; those of cells tagged raises-exception are wanted."""
        found = []
        for number, cell in enumerate(self.cells(), start=1):
            wanted = "raises-exception" in cell["metadata"].get("tags", [])
            for output in cell.get("outputs", []):
                if output["output_type"] == "error" and not wanted:
                    found.append(f"cell {number}: {output['ename']}: {output['evalue']}")
                if output["output_type"] == "stream" and output["name"] == "stderr":
                    text = output["text"]
                    found.append(f"cell {number}: stderr: {text if isinstance(text, str) else ''.join(text)}")
        return found

    def broken_pictures(self) -> list[str]:
        """The alternative texts of pictures that are not shown."""
        return self.page.evaluate(BROKEN_PICTURES)

    def screenshot(self, name: str, css: str | None = None) -> Path:
        """A picture of the page, or of one element, in tmp/artifacts."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        if css:
            part = self.find(css)
            part.scroll_into_view_if_needed()
            part.screenshot(path=path)
        else:
            self.page.screenshot(path=path)
        return path


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's or Chrome's own binary if there is one, else the one Playwright installed, else skipped."""
    with sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome")
        binary = next(filter(None, map(shutil.which, names)), None)
        if not binary and not Path(playwright.chromium.executable_path).exists():
            why = f"no browser: install chromium, or run `{sys.executable} -m playwright install chromium`"
            if os.environ.get("CI"):
                pytest.fail(why)
            pytest.skip(why)
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=binary, args=[*sandbox, "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def jupyter_lab(root: Path, settings: Path, course: Path = ROOT) -> Iterator[str]:
    """A JupyterLab of our own on a free port, without the reader's settings; yields its address.

    course: the checkout that notebooks import.
    """
    write_settings(settings)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    log = settings / "jupyterlab.log"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser", "--allow-root"),
        *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"),
        *("--IdentityProvider.token=", "--PasswordIdentityProvider.hashed_password="),
        *("--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={root}"),
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")},
        **dict.fromkeys(("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), str(settings / "data")),
        "JUPYTERLAB_SETTINGS_DIR": str(settings / "user-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(settings / "workspaces"),
        "IPYTHONDIR": str(settings / "ipython"),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(course), os.environ.get("PYTHONPATH")])),
    }
    with log.open("w") as sink:
        server = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        wait_for_server(server, address, log)
        yield address
    finally:
        end(server)


def write_settings(settings: Path) -> None:
    """No news, and every cell in the page: by default those out of sight are not drawn."""
    for name, content in {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }.items():
        path = settings / "user-settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))


def wait_for_server(server: subprocess.Popen, address: str, log: Path) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/api", timeout=5):
                return
        except OSError:
            ended = server.poll() is not None
            assert not ended and time.monotonic() < give_up, f"JupyterLab did not start:\n{log.read_text()[-3000:]}"
            time.sleep(0.2)


def end_kernels(address: str) -> None:
    """End what an earlier notebook left running."""
    with urllib.request.urlopen(f"{address}/api/sessions", timeout=30) as answer:
        sessions = json.load(answer)
    for session in sessions:
        request = urllib.request.Request(f"{address}/api/sessions/{session['id']}", method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()


def end(server: subprocess.Popen) -> None:
    """End the server and every process that it started, kernels included."""
    try:
        started = psutil.Process(server.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    server.terminate()
    try:
        server.wait(timeout=20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    _, alive = psutil.wait_procs(started, timeout=5)
    for process in alive:
        process.kill()
