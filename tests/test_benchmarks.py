"""The virtual GPU beside PyTorch's MemTracker: what the README says of their bytes, for a small model."""

import os
import subprocess
import sys

import pytest

from benchmarks.children import ROOT


@pytest.mark.stress
def test_the_peak_is_memtrackers():
    command = [sys.executable, "benchmarks/speed.py", "--models", "openai-community/gpt2"]
    run = subprocess.run(
        [*command, "--repeats", "1", "--no-depth"],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    row = next(line for line in run.stdout.splitlines() if line.startswith("gpt2 ")).split()
    like_for_like, memtracker, equal = row[-5:-2]
    assert like_for_like == memtracker and equal == "yes"
