"""What readers do to a notebook: run it twice, out of order, have no network, no home, a folder that cannot be written.

`make stress` does it to every notebook: run twice and then in random order.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks/ko").glob("*.ipynb"))

# The one question to the network that is wanted: chapter 0 looks whether the model hub can be reached.
ASKED = {"00_start_here": ["huggingface.co"]}

# Runs a notebook's cells in one kernel without a network: in order, again in order, then the first (imports) and the
# others at random in a fresh kernel. Prints a line for everything that is not as it should be. Arguments: the
# notebook, then the hosts that its cells ask for.
RUNNER = """
import random, sys, nbformat
from jupyter_client.manager import start_new_kernel

NO_NETWORK = '''
import socket as _socket, sys as _sys
_asked = []
_here = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", _socket.gethostname()}
def _hook(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in _here:
        _asked.append(host)
        raise OSError("no network here")
_sys.addaudithook(_hook)
try:  # the hook sees what it is there for
    _socket.getaddrinfo("example.com", 80)
except OSError:
    pass
assert _asked == ["example.com"], _asked
_asked.clear()
'''
MISSING = ("NameError",)  # a cell run before the one that makes its names: Python says which name

def run(client, source):
    failures = []
    def note(message):
        if message["msg_type"] == "error":
            content = message["content"]
            failures.append(f"{content['ename']}: {content['evalue']}")
    reply = client.execute_interactive(source, timeout=600, output_hook=note, allow_stdin=False)
    return failures

cells = [c for c in nbformat.read(sys.argv[1], as_version=4).cells if c.cell_type == "code"]
for order in ("twice", "at random"):
    manager, client = start_new_kernel()
    try:
        for failure in run(client, NO_NETWORK):
            print(f"{order}: the hook: {failure}")
        if order == "twice":
            chosen = cells + cells
        else:
            others = cells[1:]
            random.Random(0).shuffle(others)
            chosen = [cells[0], *others]
        for cell in chosen:
            wanted = "raises-exception" in cell.metadata.get("tags", ())
            for failure in run(client, cell.source):
                if wanted or (order == "at random" and failure.startswith(MISSING)):
                    continue
                print(f"{order}: {failure}\\n{cell.source}\\n---")
        for failure in run(client, f"assert sorted(set(_asked)) == {sys.argv[2:]}, _asked"):
            print(f"{order}: asked for other hosts than {sys.argv[2:]}: {failure}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
print("ran to the end")
"""


def run_badly(path, tmp_path):
    """What RUNNER prints of a notebook in a copy of the course that cannot be written, with no home and no network."""
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("only root can make a folder that root cannot write")
    course = tmp_path / "course"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (course / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, course / name)
    shutil.copy(path, course / "notebooks/ko")
    environment = {name: value for name, value in os.environ.items() if not re.match("HF_|XDG_|JUPYTER_", name)} | {
        "HOME": "/nonexistent",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(course),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "TMPDIR": str(tmp_path),
    }
    locked = f"mount --bind {course} {course} && mount -o remount,ro,bind {course} && cd {course}/notebooks/ko && exec "
    runner = [sys.executable, "-c", RUNNER, path.name, *ASKED.get(path.stem, ())]
    command = ["unshare", "--mount", "sh", "-c", f'{locked} "$@"', "sh", *runner]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    return ran.stdout + ran.stderr[-2000:] * (ran.returncode != 0)


@pytest.mark.stress
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_survives_its_reader(path, tmp_path):
    """Twice in one kernel, then in random order."""
    assert run_badly(path, tmp_path) == "ran to the end\n"


@pytest.mark.stress
@pytest.mark.kernel
@pytest.mark.parametrize(
    "ask", ['urllib.request.urlopen("http://example.com")', 'socket.create_connection(("203.0.113.1", 80), 1)']
)
def test_a_notebook_that_asks_the_network_is_found_out(ask, tmp_path):
    """Even where the cell passes over the error, as whoever looks for a file in a cache first does."""
    cells = ["import socket, urllib.request", f"try:\n    {ask}\nexcept OSError:\n    pass", "open('a', 'w')"]
    path = tmp_path / "asks.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells))), path)
    said = run_badly(path, tmp_path)
    host = re.search(r"[\w.]+\.(com|1)", ask)[0]
    for order in ("twice", "at random"):
        assert re.search(rf"^{order}: asked for other hosts than \[\]: AssertionError: \['{host}'", said, re.MULTILINE)
        assert f"{order}: OSError: [Errno 30] Read-only file system" in said
