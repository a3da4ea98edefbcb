"""The magics of a notebook, in IPython itself."""

import torch
from IPython.testing.globalipapp import start_ipython

from virtual_gpu.program import notebook


def test_a_kernel_gets_a_card_and_gives_it_back():
    shell = start_ipython()
    notebook.load_ipython_extension(shell)
    try:
        assert "Tesla T4" in shell.run_line_magic("virtual_gpu", "T4")
        shell.run_cell_magic("gpu_memory", "", "import torch\nx = torch.zeros(2**20, device='cuda')")
        assert shell.user_ns["x"].is_cuda and torch.cuda.memory_allocated() == 2**22
    finally:
        shell.run_line_magic("virtual_gpu", "off")
    assert not torch.cuda.is_available()


def test_the_bar_says_its_numbers():
    assert "highest 2.00 GiB of 4.00 GiB" in notebook.bar(0, 2**30, 2**31, 2**32)
