"""nvidia-smi, asked by a program on a virtual card."""

import os
import subprocess

import pytest
import torch

from virtual_gpu import cuda
from virtual_gpu.cards import CATALOG

CSV = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]


def test_the_card_says_what_it_holds():
    shipped, total = subprocess.Popen.__init__, CATALOG["T4"].memory_bytes // 2**20
    with cuda("T4"):
        before = subprocess.run(CSV, capture_output=True, text=True, check=True).stdout
        held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        after = subprocess.check_output(CSV).decode()
        read = [[int(number) for number in line.split(",")] for line in (before, after)]
        assert read[0][0] == read[1][0] == total and read[1][1] - read[0][1] == 1024
        free, _ = torch.cuda.mem_get_info()
        asked = "nvidia-smi -i 0 --query-gpu=name,memory.free,temperature.gpu --format=csv"
        with os.popen(asked) as pipe:
            assert pipe.read().splitlines() == [
                "name, memory.free [MiB], temperature.gpu",
                f"{torch.cuda.get_device_name()}, {free // 2**20} MiB, [N/A]",
            ]
        assert subprocess.getoutput("nvidia-smi -L").startswith("GPU 0: Tesla T4 (UUID: GPU-")
        assert f"{read[1][1]} MiB / {total} MiB" in subprocess.getoutput("nvidia-smi")
        assert held.is_cuda
    assert subprocess.Popen.__init__ is shipped


def test_what_it_does_not_answer_is_an_error():
    with cuda("T4", gpus=2, rank=1):
        rows = subprocess.check_output([*CSV[:1], "--query-gpu=index,memory.used", "--format=csv,noheader"], text=True)
        free, total = torch.cuda.mem_get_info()
        assert rows == f"0, [N/A]\n1, {(total - free) // 2**20} MiB\n"
        assert (
            subprocess.check_output(["nvidia-smi", "-i", "1, 0", *CSV[1:2], "--format=csv,noheader"]).count(b"\n") == 2
        )
        assert subprocess.check_output(["nvidia-smi", "--id=1", "-L"]).startswith(b"GPU 1: ")
        for words in (["-q"], ["--query-gpu=name"], ["-i", "7", *CSV[1:]], ["-i", "0,7", *CSV[1:]]):
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True)
            assert done.returncode and not done.stdout and done.stderr and done.args == ["nvidia-smi", *words]
        with pytest.raises(subprocess.CalledProcessError):
            subprocess.run(["nvidia-smi", "-l", "1"], check=True, capture_output=True)
        assert subprocess.check_output(["echo", "nvidia-smi"], text=True) == "nvidia-smi\n"
        assert subprocess.check_output("echo nvidia-smi | cat", shell=True, text=True) == "nvidia-smi\n"
