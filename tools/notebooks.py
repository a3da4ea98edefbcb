"""Build the course's notebooks from their text sources, and check that they are what the sources build.

    python tools/notebooks.py build [NAME ...] [--lang ko]
    python tools/notebooks.py check [NAME ...] [--lang ko]
    python tools/notebooks.py stamp [NAME ...] [--lang ko]

A source is `notebooks/src/NAME.py` (jupytext, py:percent). Its text cells say their language
(`# %% [markdown] lang="ko"`); cells of another language are left out, cells without one are kept. `build` runs the
cells as on a machine without a GPU or a network and writes `notebooks/LANG/NAME.ipynb` without anything that changes
from run to run: two builds are the same bytes.

Where `repository` of [tool.course] in pyproject.toml holds the course's public address, every notebook begins with a
Colab badge and a set-up cell, and its pictures come from there, so that it works when it is opened alone. `stamp` puts
the address into the notebooks that are built already, without running them; an empty address leaves them plain.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import statistics
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from virtual_gpu.terminal import tell

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# A machine without a GPU, a network and a compiler (torch.compile's); sets iterate in the same order every time.
QUIET_MACHINE = {
    "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
CELL_TIMEOUT_S = 300
# The output of such a cell is a time or a speed: nbval does not compare it, and a build keeps what is stored.
CHANGES_TAG = "nbval-ignore-output"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

HANGUL = re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
CODE_FENCE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
IMAGE_WITHOUT_ALT = re.compile(r"!\[\s*\]\([^)]*\)|<img\b(?![^>]*\balt\s*=\s*[\"']\s*[^\s\"'])[^>]*>")
LINK_TARGET = re.compile(r"\]\(\s*<?([^)\s>]+)|\b(?:src|href)\s*=\s*[\"']([^\"']+)[\"']")


# What a notebook that was opened alone needs first. Beside its repository, or where `helpers` is installed, it does
# nothing; elsewhere it fetches the course. What is installed then: helpers/environment.py.
SET_UP = """\
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("helpers") is None:
    course = Path("../..").resolve()
    if not (course / "helpers").is_dir():
        course = Path("gpu-memory-course").resolve()
        if not course.exists():
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", "{repository}", course], check=True)
    sys.path.insert(0, str(course))
    from helpers.environment import set_up
    set_up()"""
SET_UP_TEXT = {
    "ko": "Colab에서 이 노트북만 열었다면 다음 셀이 강의의 코드를 내려받고, 없는 패키지만 설치한다. "
    "이미 있는 torch는 그대로 둔다. 강의 전체를 내려받아 열었다면 아무 일도 하지 않는다.",
    "en": "Opened alone, on Colab say, this notebook fetches the course's code with the next cell and installs only "
    "the packages that are missing; the torch that is there stays. Beside the whole course the cell does nothing.",
}
SET_UP_TAG = "set-up"
BADGE = "[![{words}](https://colab.research.google.com/assets/colab-badge.svg)]({address})"
BADGE_WORDS = {"ko": "Colab에서 열기", "en": "Open in Colab"}
GITHUB = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+?)(?:\.git)?/?")
PICTURE = re.compile(r"(!\[[^\]]*\]\()(?:\.\./){2}(image/[^)\s]+\))")


class BuildError(Exception):
    """A chapter that cannot be built; its text says which cell and why."""


# ---- source -> notebook ---------------------------------------------------------------------------------------------


def repository_of(pyproject: Path) -> str:
    """The course's public address, "" until it is published; ValueError where it is none that git could clone."""
    address = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["course"]["repository"].strip()
    if address and not (GITHUB.fullmatch(address) or re.match(r"(https|file)://[^\s\"'{}]+$", address)):
        raise ValueError(f"{pyproject.name}, [tool.course] repository: not an address that git can clone: {address!r}")
    return address


def convert(source: Path, lang: str, repository: str = "") -> NotebookNode:
    """The notebook of one language that a source stands for, not yet run; with an address, stamped with it."""
    read = jupytext.read(source, fmt="py:percent")
    seen: Counter[str] = Counter()
    cells = set_up_cells(source.stem, lang, repository) if repository else []
    for cell in read.cells:
        metadata = dict(cell.metadata)
        if metadata.pop("lang", lang) != lang:
            continue
        make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}.get(
            cell.cell_type, nbformat.v4.new_raw_cell
        )
        # The id follows from the cell's own text, so that a new cell elsewhere changes no other.
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
        seen[digest] += 1
        cell_id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        text = with_pictures_from(repository, cell.source) if cell.cell_type == "markdown" else cell.source
        cells.append(make(source=text, metadata=metadata, id=cell_id))
    return nbformat.v4.new_notebook(cells=cells, metadata=NOTEBOOK_METADATA, nbformat_minor=5)


def set_up_cells(name: str, lang: str, repository: str) -> list[NotebookNode]:
    """The badge (Colab opens what is on GitHub, nothing else) with a sentence, and the set-up cell."""
    text, metadata = SET_UP_TEXT[lang], {"tags": [SET_UP_TAG]}
    if found := GITHUB.fullmatch(repository):
        path = f"{found[1]}/{found[2]}/blob/main/notebooks/{lang}/{name}.ipynb"
        address = f"https://colab.research.google.com/github/{path}"
        text = f"{BADGE.format(words=BADGE_WORDS[lang], address=address)}\n\n{text}"
    code = SET_UP.format(repository=repository)
    return [
        nbformat.v4.new_markdown_cell(text, metadata=metadata, id="set-up-text"),
        nbformat.v4.new_code_cell(code, metadata=metadata, id="set-up"),
    ]


def with_pictures_from(repository: str, text: str) -> str:
    """The text with the pictures of image/ by their public address: on Colab there is no file beside the notebook."""
    found = GITHUB.fullmatch(repository)
    if not found:
        return text
    return PICTURE.sub(rf"\1https://raw.githubusercontent.com/{found[1]}/{found[2]}/main/\2", text)


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run every cell in a fresh kernel whose working directory is `folder`."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--Application.log_level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    # A profile in the reader's home must not colour the outputs.
    with tempfile.TemporaryDirectory() as profile:
        client.execute(env={**os.environ, **QUIET_MACHINE, "IPYTHONDIR": profile})


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Take out of a notebook, in place, what changes from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    for cell in notebook.cells:
        for key in ("execution", "collapsed", "scrolled", "jupyter"):
            cell.metadata.pop(key, None)
        # A line that told how far a wait was is gone, and left an output without data.
        if "outputs" in cell:
            cell.outputs = [one for one in cell.outputs if one.output_type != "display_data" or one.data]
        for output in cell.get("outputs", []):
            output.pop("transient", None)
            if "data" in output:
                output.data.pop(WIDGET_VIEW, None)  # a widget's id is random; its text/plain is what nbval compares
            if output.output_type == "error":
                # Frames of libraries hold this machine's paths; the cell's own frame and the message stay.
                output.traceback = [part for part in output.traceback if not ANSI.sub("", part).startswith("File ")]
    return notebook


def build(source: Path, folder: Path, lang: str, repository: str = "") -> Path:
    """Convert, run, normalise and write one chapter."""
    notebook = convert(source, lang, repository)
    target = folder / f"{source.stem}.ipynb"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        execute(notebook, folder)
    except CellExecutionError as error:
        raise BuildError(f"{source.name}: a cell failed\n{error}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise BuildError(f"{source.name}: {error}") from None
    normalise(notebook)
    keep_measured_outputs(notebook, target)
    stderr = [problem for problem in problems_in_outputs(notebook) if "stderr" in problem]
    if stderr:
        raise BuildError("\n".join(f"{source.name}: {problem}" for problem in stderr))
    target.write_text(serialise(notebook), encoding="utf-8")
    return target


def stamp(source: Path, folder: Path, lang: str, repository: str) -> Path:
    """Write a chapter's notebook anew for this address (or none), with the outputs that it holds; nothing is run."""
    target = folder / f"{source.stem}.ipynb"
    notebook = convert(source, lang, repository)
    stored = {}
    if target.exists():
        stored = {cell.id: cell for cell in nbformat.read(target, as_version=4).cells if cell.cell_type == "code"}
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        if cell.id not in stored and cell.id != SET_UP_TAG:
            raise BuildError(f"{source.name}: the notebook is not what the source builds: build it")
        if cell.id in stored:
            cell.outputs = renumbered(stored[cell.id].outputs, stored[cell.id].execution_count, number)
        cell.execution_count = number
    target.write_text(serialise(normalise(notebook)), encoding="utf-8")
    return target


def renumbered(outputs: list[NotebookNode], old: int | None, new: int) -> list[NotebookNode]:
    """Outputs of cell `old` as those of cell `new`: what counts them, and the place that a traceback names."""
    for output in outputs:
        if "execution_count" in output:
            output.execution_count = new
        if output.output_type == "error":
            output.traceback = [part.replace(f"In[{old}]", f"In[{new}]") for part in output.traceback]
    return outputs


def keep_measured_outputs(notebook: NotebookNode, stored_at: Path) -> None:
    """A time that is stored stays while its cell does: otherwise no two builds would be alike."""
    if not stored_at.exists():
        return
    stored = {cell.id: cell for cell in nbformat.read(stored_at, as_version=4).cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if CHANGES_TAG in cell.metadata.get("tags", []) and cell.id in stored:
            cell.outputs = stored[cell.id].outputs


def serialise(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


# ---- check ----------------------------------------------------------------------------------------------------------


def problems_of(source: Path, folder: Path, lang: str, repository: str = "") -> Iterator[str]:
    """Everything that is wrong with one chapter, as sentences; nothing is run."""
    expected = convert(source, lang, repository)
    yield from problems_in_cells(convert(source, lang), folder)
    target = folder / f"{source.stem}.ipynb"
    if not target.exists():
        yield "has no notebook: build it"
        return
    text = target.read_text(encoding="utf-8")
    stored = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    yield from differences(expected, stored)
    yield from problems_in_outputs(stored)
    if text != serialise(normalise(nbformat.from_dict(stored))):
        yield "holds volatile data or was saved by an editor: build it again"


def differences(expected: NotebookNode, stored: NotebookNode) -> Iterator[str]:
    if len(expected.cells) != len(stored.cells):
        yield f"differs from its source: {len(stored.cells)} cells, the source has {len(expected.cells)}"
    for number, (ours, theirs) in enumerate(zip(expected.cells, stored.cells, strict=False), start=1):
        for key in ("cell_type", "source", "id", "metadata"):
            if ours.get(key) != theirs.get(key):
                yield f"cell {number} differs from its source ({key})"
                return  # one shifted cell makes all that follow differ
    if stored.metadata != expected.metadata:
        yield "the notebook's metadata differ from what a build writes"


def problems_in_cells(notebook: NotebookNode, folder: Path) -> Iterator[str]:
    """What a cell's text can have wrong: language in code, code without prose, pictures without words, dead links."""
    before = None
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code":
            if not cell.source.strip():
                yield f"code cell {number} is empty"
            if found := HANGUL.search(cell.source):
                line = cell.source[: found.start()].count("\n") + 1
                yield f"code cell {number}, line {line}: Korean text in code (it belongs in a text cell or in helpers)"
            if before is None or before.cell_type != "markdown":
                yield f"code cell {number} has no text cell before it"
        elif cell.cell_type == "markdown":
            prose = CODE_FENCE.sub("", cell.source)
            for match in IMAGE_WITHOUT_ALT.finditer(prose):
                yield f"text cell {number}: picture without alternative text: {match[0][:60]}"
            for match in LINK_TARGET.finditer(prose):
                link = (match[1] or match[2]).split("#")[0]
                if link and not re.match(r"[a-z][a-z0-9+.-]*:", link) and not (folder / link).exists():
                    yield f"text cell {number}: the link leads nowhere: {link}"
        before = cell


def problems_in_outputs(notebook: NotebookNode) -> Iterator[str]:
    """What a run can have left behind: missing outputs, warnings, errors, addresses and paths of this machine."""
    order = 0
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type != "code":
            continue
        order += 1
        if cell.execution_count is None:
            yield f"code cell {number} was not run"
        elif cell.execution_count != order:
            yield f"code cell {number} was not run in order (In [{cell.execution_count}], expected [{order}])"
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                yield f"code cell {number} wrote to stderr: {output.text.strip()[:200]}"
            if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", []):
                yield f"code cell {number} ended in {output.ename}"
            if found := next((volatile(text) for text in texts_of(output) if volatile(text)), None):
                yield f"code cell {number} shows what differs on another machine: {found}"


def texts_of(output: NotebookNode) -> Iterator[str]:
    yield from (output[key] for key in ("text", "evalue") if key in output)
    yield from output.get("traceback", [])
    for kind, data in output.get("data", {}).items():
        if isinstance(data, str) and not (kind.startswith("image/") and kind != "image/svg+xml"):
            yield data


def volatile(text: str) -> str | None:
    """An object's address or a path of this machine in an output, if there is one."""
    for pattern in (r" at 0x[0-9a-f]{6,}", re.escape(str(ROOT)) + r"\S*", r"\S*/site-packages/\S*", r"/tmp/\S+"):
        if found := re.search(pattern, text):
            return found[0].strip()[:80]
    return None


def lengths(notebooks: list[NotebookNode]) -> str:
    """One line about the length of code cells: the course wants a median of 4 and nine in ten under 15."""
    lines = sorted(len(cell.source.splitlines()) for nb in notebooks for cell in nb.cells if cell.cell_type == "code")
    if not lines:
        return "no code cells"
    nine_in_ten = lines[min(len(lines) - 1, int(len(lines) * 0.9))]
    return (
        f"{len(lines)} code cells; lines a cell: median {statistics.median(lines):g}, "
        f"nine in ten up to {nine_in_ten}, longest {lines[-1]}"
    )


# ---- command line ---------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "check", "stamp"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="chapters by name (default: all)")
    parser.add_argument("--lang", default="ko", help="the edition (default: ko)")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help=argparse.SUPPRESS)
    parser.add_argument("--pyproject", type=Path, default=ROOT / "pyproject.toml", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)

    folder = arguments.notebooks / arguments.lang
    every = sorted((arguments.notebooks / "src").glob("*.py"))
    names = [Path(name).stem for name in arguments.names]
    sources = [source for source in every if not names or source.stem in names]
    if unknown := sorted(set(names) - {source.stem for source in every}):
        parser.error(f"no such chapter: {', '.join(unknown)} (there are: {', '.join(s.stem for s in every) or 'none'})")

    try:
        repository = repository_of(arguments.pyproject)
    except ValueError as error:
        parser.error(str(error))
    sources.sort(key=lambda source: source.stem.startswith("00_"))  # last: its map reads the other notebooks
    if arguments.command == "check":
        return check_all(sources, folder, arguments.lang, repository, None if names else every)
    return write_all(build if arguments.command == "build" else stamp, sources, folder, arguments.lang, repository)


def write_all(write: Callable[..., Path], sources: list[Path], folder: Path, lang: str, repository: str) -> int:
    failed = 0
    for source in sources:
        tell(f"{source.stem} … Ctrl+C stops")
        try:
            print(f"wrote {write(source, folder, lang, repository)}")
        except BuildError as error:
            failed += 1
            print(error, file=sys.stderr)
    return 1 if failed else 0


def check_all(sources: list[Path], folder: Path, lang: str, repository: str, every: list[Path] | None) -> int:
    problems = [
        f"{source.stem}: {problem}" for source in sources for problem in problems_of(source, folder, lang, repository)
    ]
    if every is not None:
        strays = {path.stem for path in folder.glob("*.ipynb")} - {source.stem for source in every}
        problems += [f"{name}: a notebook without a source" for name in sorted(strays)]
    for problem in problems:
        print(problem)
    print(f"notebooks ({lang}): {len(sources)} chapters, {lengths([convert(source, lang) for source in sources])}")
    print("every notebook is what its source builds" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
