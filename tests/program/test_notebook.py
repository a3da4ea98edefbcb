"""The magics of a notebook, in IPython itself."""

import torch
from IPython.testing.globalipapp import start_ipython

from virtual_gpu.program import cuda, notebook
from virtual_gpu.program.phases import peaks_by_phase


def test_a_kernel_gets_a_card_and_gives_it_back():
    shell = start_ipython()
    shell.run_line_magic("load_ext", "virtual_gpu")
    try:
        assert "T4" in shell.run_line_magic("virtual_gpu", "T4")
        shell.run_cell_magic("gpu_memory", "", "import torch\nx = torch.zeros(2**20, device='cuda')")
        assert shell.user_ns["x"].is_cuda and torch.cuda.memory_allocated() == 2**22
    finally:
        shell.run_line_magic("virtual_gpu", "off")
    assert not torch.cuda.is_available()


def test_a_cell_is_shown_with_its_phases(capsys):
    with cuda("T4"), peaks_by_phase() as peaks:
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), foreach=False)
        x = torch.empty(1024, 1024, device="cuda")
        layer(x).sum().backward()
        optimizer.step()
    assert list(peaks) == ["between", "forward", "backward", "step"]
    assert 2**23 < peaks["forward"] < peaks["backward"] and peaks["step"] >= 3 * 2**22
    shown = notebook.bars(0, 2**30, {"between": 0, "forward": 2**31}, 2**32)
    assert "최대 2.00 GiB / 4.00 GiB" in shown and "순전파 2.00 GiB" in shown
