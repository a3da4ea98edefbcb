"""The benchmarks print what they measure: each with one small model."""

import os
import subprocess
import sys

import pytest

from benchmarks import fragmentation
from benchmarks.children import ROOT


@pytest.mark.stress
def test_the_peak_is_memtrackers():
    """The virtual GPU beside PyTorch's MemTracker: what the README says of their bytes."""
    command = [sys.executable, "benchmarks/speed.py", "--models", "openai-community/gpt2"]
    run = subprocess.run(
        [*command, "--repeats", "1", "--no-depth"],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    row = next(line for line in run.stdout.splitlines() if line.startswith("gpt2 ")).split()
    like_for_like, memtracker, equal = row[-5:-2]
    assert like_for_like == memtracker and equal == "yes"


def test_fragmentation(monkeypatch, capsys):
    only = "gpt2', 'batch_size': 1, 'gradient_checkpointing': False"
    monkeypatch.setattr(sys, "argv", ["fragmentation.py", "--only", only])
    fragmentation.main()
    _, line, middle, worst, count = capsys.readouterr().out.splitlines()
    needed, reserved, _ = (float(share.rstrip("%")) for share in line.split("{")[0].split())
    assert 0 <= needed <= reserved < 100 and only in line
    assert middle.split()[:3] == worst.split()[:3] == line.split()[:3]
    assert count.endswith("of 1 settings need at most 5 % more than their tensors")
