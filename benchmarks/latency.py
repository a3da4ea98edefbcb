"""How long a reader waits: from the last change of a control to the last change of what the panel shows.

    python benchmarks/latency.py [PANEL ...] [--moves 5] [--pause 0.8] [--before CHECKOUT]

In JupyterLab and Chromium, with the keyboard, on every control of every panel (`memory_panel`, …). `pause`: seconds
between two moves, in which a reader looks. With another checkout both are measured in one run, panel after panel, so
that what else the machine does falls on both. Times are the page's own clock, in ms: the median and the worst of the
moves that changed what is shown; a move that brings an error counts too. A planner's search is not a control: it is
begun by its button, and shows what it has found while it goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import OPEN, OpenNotebook, chromium, end_kernels, jupyter_lab  # noqa: E402
from playwright.sync_api import Page  # noqa: E402

import helpers  # noqa: E402
from virtual_gpu.terminal import tell  # noqa: E402

PANELS = [name for name in helpers.__all__ if name.endswith("_panel")]
LONGEST_S = 120
PATIENCE_MS = 5000
QUIET_MS = 350  # nothing has changed for so long, and the panel is not busy: the move is over

# What a hand does is noted in the capturing phase, before any handler; what is shown by an observer of the places.
WATCH = """() => {
    const panel = document.querySelector("[class*='-panel'].course-panel, .widget-vbox[class*='-panel']");
    const watch = (window.watch = { input: 0, shown: 0, panel });
    const note = () => { watch.input = performance.now(); };
    for (const kind of ["keydown", "change", "click"]) panel.addEventListener(kind, note, true);
    const seen = new MutationObserver(() => { watch.shown = performance.now(); });
    for (const place of panel.querySelectorAll("[class$='-picture'], [class*='-picture '], [class*='-status'], " +
                                               ".course-shown"))
        seen.observe(place, { childList: true, subtree: true, characterData: true });
}"""
CONTROLS = """() => [...window.watch.panel.querySelectorAll(".widget-hslider, .widget-dropdown, .widget-checkbox, " +
                                                            ".widget-text, .widget-button")]
    .map((part, place) => {
        part.dataset.place = place;
        const kind = ["hslider", "dropdown", "checkbox", "text", "button"]
            .find(kind => part.classList.contains("widget-" + kind));
        const input = part.querySelector("input, select, button") || part;
        const name = [...part.classList].find(name => /^[a-z]+-[a-z0-9_-]+$/.test(name) &&
            !/^(widget|jupyter|lm|p|mod|jp)-/.test(name)) || kind;
        return { place, kind, name, disabled: !!input.disabled, options: part.querySelectorAll("option").length };
    })"""
# A kernel that computes something else hears of a move late: nothing has changed is only said after a while.
SETTLED = """([quiet, patience]) => {
    const { input, shown, panel } = window.watch;
    const still = performance.now() - Math.max(input, shown);
    return !panel.classList.contains("course-busy") && still > (shown > input ? quiet : patience);
}"""


def measure(page: Page, moves: int, pause_s: float) -> dict[str, list[float]]:
    """control → ms of each move that changed what is shown."""
    page.evaluate(WATCH)
    found: dict[str, list[float]] = {}
    for control in page.evaluate(CONTROLS):
        if control["disabled"] or control["kind"] == "button":
            continue
        part = page.locator(f"[data-place='{control['place']}']")
        for number in range(moves):
            if part.locator(":disabled").count():
                break  # another control has put it out of use
            move(page, part, control, number)
            page.wait_for_function(SETTLED, arg=[QUIET_MS, PATIENCE_MS], timeout=LONGEST_S * 1000)
            waited = page.evaluate("() => window.watch.shown - window.watch.input")
            if waited > 0:
                found.setdefault(control["name"], []).append(waited)
            page.wait_for_timeout(1000 * pause_s)
    return found


def move(page: Page, part: object, control: dict, number: int) -> None:
    """The move with that number: sliders go up, then down again; a menu goes through its list in leaps."""
    if control["kind"] == "hslider":
        handle = part.locator(".noUi-handle").first
        handle.focus()
        handle.press("ArrowLeft" if number % 4 == 3 else "ArrowRight")
    elif control["kind"] == "dropdown":
        options = control["options"]
        part.locator("select").select_option(index=(1 + number * max(1, options // 4)) % options)
    elif control["kind"] == "checkbox":
        part.locator("input").focus()
        page.keyboard.press("Space")
    else:
        box = part.locator("input, textarea").first
        box.fill(str(2 + number))
        box.press("Tab")


def table(results: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """One line a control: for each checkout the median and the worst, in ms."""
    names = [*results]
    lines = [f"{'panel, control':<44}" + "".join(f"{name + ': median':>16}{'worst':>9}" for name in names)]
    everything: dict[str, list[float]] = {name: [] for name in names}
    for panel in results[names[-1]]:
        controls = dict.fromkeys(c for name in names for c in results[name].get(panel, {}))
        for control in controls:
            cells = ""
            for name in names:
                times = results[name].get(panel, {}).get(control, [])
                everything[name] += times
                cells += f"{statistics.median(times):>16.0f}{max(times):>9.0f}" if times else f"{'-':>16}{'-':>9}"
            lines.append(f"{panel + ', ' + control:<44}{cells}")
    for name, times in everything.items():
        if times:
            slow = sum(one > 300 for one in times)
            lines.append(f"{name}: {len(times)} moves, median {statistics.median(times):.0f} ms, over 300 ms: {slow}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("panels", nargs="*", metavar="PANEL", help=", ".join(PANELS))
    parser.add_argument("--moves", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.8)
    parser.add_argument("--before", type=Path, help="another checkout of the course")
    arguments = parser.parse_args()
    if unknown := set(arguments.panels) - set(PANELS):
        parser.error(f"no panel: {', '.join(sorted(unknown))}; choose from {', '.join(PANELS)}")
    checkouts = {"before": arguments.before.resolve()} if arguments.before else {}
    checkouts["now"] = ROOT
    results: dict = {name: {} for name in checkouts}
    with ExitStack() as stack:
        browser = stack.enter_context(chromium())
        places = {}
        for name, checkout in checkouts.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "home").mkdir()
            places[name] = stack.enter_context(jupyter_lab(folder / "home", folder, checkout)), folder / "home"
        for number, panel in enumerate(chosen := arguments.panels or [*PANELS], 1):
            tell(f"{number} of {len(chosen)}: {panel} … Ctrl+C stops")
            for name, (address, home) in places.items():
                kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
                cells = [new_code_cell(f"from helpers import {panel}\n\n{panel}()")]
                nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), home / "panel.ipynb")
                page = browser.new_page(viewport={"width": 1280, "height": 1400}, locale="ko-KR")
                page.goto(f"{address}/lab?reset", timeout=90_000)
                page.wait_for_function("() => window.jupyterapp !== undefined", timeout=90_000)
                page.evaluate(OPEN, ["panel.ipynb", 90_000])
                OpenNotebook(page).run_all()
                page.wait_for_selector("[class*='-status'] p", timeout=60_000)
                time.sleep(1)
                results[name][panel] = measure(page, arguments.moves, arguments.pause)
                page.close()
                end_kernels(address)
            print(table({name: {panel: found[panel]} for name, found in results.items()}), flush=True)
    print()
    print(table(results))


if __name__ == "__main__":
    main()
