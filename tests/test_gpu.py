"""Choosing a GPU, the book's line, and cleanup() in a script and in IPython."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import helpers.gpu
from helpers.gpu import cleanup, current_gpu, gpu_utilization_line, print_gpu_utilization, release_memory, use_gpu
from virtual_gpu.cards import CATALOG
from virtual_gpu.language import set_language

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """A machine without a GPU, on which none has been chosen yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(helpers.gpu, "_current", None)


@pytest.fixture
def english():
    set_language("en")
    yield
    set_language("ko")


@pytest.mark.parametrize("name", [name for name, spec in CATALOG.items() if spec.platform == "cuda"])
@pytest.mark.parametrize("write", [str, str.lower, str.upper])
def test_every_gpu_of_the_catalogue(name, write):
    gpu, spec = use_gpu(write(name)), CATALOG[name]
    assert (gpu.name, gpu.is_virtual, gpu.capacity_bytes) == (name, True, spec.capacity_bytes)
    assert spec.capacity_bytes <= spec.memory_bytes and spec.source
    assert gpu.memory_allocated() == gpu.max_memory_allocated() == 0
    assert current_gpu() is gpu


def test_the_default_is_a_t4():
    gpu = current_gpu()
    assert (gpu.name, gpu.is_virtual) == ("T4", True)
    assert current_gpu() is gpu
    assert use_gpu() is not gpu  # a new one, empty
    assert current_gpu().name == "T4"


@pytest.mark.parametrize(
    ("name", "near"), [("A100", "A100-40GB"), ("H20", "H200"), ("RTX3090", "RTX 3090"), ("cpu", "쓸 수 있는 값: cuda")]
)
def test_an_unknown_gpu(name, near):
    before = use_gpu("L4")
    with pytest.raises(ValueError, match=f"'{name}': 모르는 GPU 이름") as caught:
        use_gpu(name)
    assert near in str(caught.value)
    assert current_gpu() is before


def test_no_cuda_here():
    with pytest.raises(RuntimeError, match="CUDA GPU를 찾지 못했다"):
        use_gpu("cuda")
    assert current_gpu().is_virtual


def test_no_cuda_here_in_english(english):
    with pytest.raises(RuntimeError, match="No CUDA GPU found"):
        use_gpu("CUDA")


def test_the_books_line(capsys):
    gpu = use_gpu("T4")
    print_gpu_utilization()
    held = gpu.place(torch.empty(2**28, dtype=torch.float16, device="meta"))
    print_gpu_utilization()
    assert capsys.readouterr().out == "GPU 메모리 사용량: 0.000 GB\nGPU 메모리 사용량: 0.500 GB\n"
    del held


def test_the_books_line_in_english(english):
    assert gpu_utilization_line(2_663_620_608) == "GPU memory used: 2.481 GB"


def test_release_memory_gives_the_workspaces_back():
    gpu = use_gpu("T4")
    a = gpu.place(torch.ones(8, 8))
    a @ a
    assert gpu.memory_allocated() > 8 * 2**20
    release_memory(gpu)
    assert gpu.memory_allocated() == 512


def run(script):
    """Run a script of its own, so that `__main__` is the reader's: its lines, and the JSON that its last one is."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert result.returncode == 0, result.stderr
    *lines, last = result.stdout.splitlines()
    return lines, json.loads(last)


SCRIPT = """
import json
from types import SimpleNamespace
import torch
import helpers
from helpers import cleanup, use_gpu

gpu = use_gpu("T4")
model = gpu.place(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
loss = model(gpu.place(torch.ones(4, 64))).sum()
loss.backward()
optimizer.step()
batch = {"input_ids": gpu.place(torch.ones(4)), "names": ["a"]}
nested = [{"logits": (loss, 1)}]
layers = [model]
other_model = torch.nn.Linear(2, 2)
numbers, text, settings = [1, 2], "text", SimpleNamespace(batch_size=4)
real = torch.ones(3)
held = gpu.memory_allocated()
cleanup()
again = gpu.memory_allocated()
cleanup()
print(json.dumps([held, again, gpu.memory_allocated(), sorted(name for name in globals() if name[0] != "_")]))
"""


def test_cleanup_in_a_script():
    lines, (held, again, last, names) = run(SCRIPT)
    assert lines == ["지운 변수: model, optimizer, loss, batch, nested, layers"]  # once, the second time nothing
    assert held > 16 * 2**20
    assert again == last == 0
    kept = {"other_model", "numbers", "text", "settings", "real", "gpu", "helpers", "cleanup", "torch", "use_gpu"}
    assert kept <= set(names)
    assert not {"model", "optimizer", "loss", "batch", "nested", "layers"} & set(names)


NOTEBOOK = """
import gc, json, os, tempfile
os.environ["IPYTHONDIR"] = tempfile.mkdtemp()
import __main__
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(user_module=__main__)

def cell(code):
    result = shell.run_cell(code, store_history=True)
    gc.collect()
    return shell.user_ns["gpu"].memory_allocated(), type(result.error_in_exec).__name__

cell("import torch; from helpers import *; gpu = use_gpu('T4')")
seen = {
    "shown": cell("x = gpu.place(torch.ones(1000)); x"),
    "shown in a list": cell("[x * 2]"),
    "a number": cell("1 + 1"),
    "one more": cell("x * 3"),
    "deleted": cell("del x"),
    "cleaned": cell("cleanup()"),
    "still works": cell("Out, In, _, __, 7"),
    "out of memory": cell("def fill():\\n    held = []\\n    while True:\\n"
                          "        held.append(gpu.place(torch.empty(2**30, device='meta')))\\nfill()"),
    "cleaned after that": cell("cleanup()"),
    "chained": cell("try:\\n    fill()\\nexcept RuntimeError as error:\\n    raise ValueError('second') from error"),
    "cleaned again": cell("cleanup()"),
    "the last result": cell("gpu.place(torch.ones(1000))"),
    "and cleaned at once": cell("cleanup(); assert gpu.memory_allocated() == 0"),
}
names = [name for name in ("Out", "In", "exit", "gpu") if name in shell.user_ns]
print()
print(json.dumps([seen, names]))
"""


def test_cleanup_in_ipython():
    """`Out`, `_`, the numbered results, the last execution's and the last traceback hold tensors. All let go."""
    lines, (seen, names) = run(NOTEBOOK)
    assert seen["shown"] == [4096, "NoneType"]
    assert seen["one more"] == [3 * 4096, "NoneType"]
    assert seen["deleted"][0] == 3 * 4096  # the reader's own reference is gone, IPython's are not
    assert seen["cleaned"] == [0, "NoneType"]
    assert seen["still works"] == [0, "NoneType"]
    assert seen["out of memory"] == [3 * 2**32, "OutOfMemoryError"]
    assert seen["cleaned after that"] == [0, "NoneType"]
    assert seen["chained"] == [3 * 2**32, "ValueError"]
    assert seen["cleaned again"] == [0, "NoneType"]
    assert seen["the last result"][0] == 4096
    assert seen["and cleaned at once"] == [0, "NoneType"]
    assert names == ["Out", "In", "exit", "gpu"]
    assert not any("지운 변수" in line for line in lines)


def test_cleanup_names_what_it_deletes_in_english(english, monkeypatch, capsys):
    gpu = use_gpu("T4")
    monkeypatch.setitem(vars(sys.modules["__main__"]), "a_tensor", gpu.place(torch.ones(1)))
    cleanup()
    assert "Deleted: a_tensor\n" in capsys.readouterr().out
    assert gpu.memory_allocated() == 0
