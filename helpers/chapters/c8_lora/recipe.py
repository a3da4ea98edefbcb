"""Chapter 8: examples/qlora_t4.py unchanged, on a virtual GPU and for real, each in a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.models.configs import load_config

from ...environment import COURSE
from ...models import byte_tokenizer
from ...watched import telling
from .fine_tuning import TASKS, pretrained_model, small_tokenizer

RECIPE = COURSE / "examples" / "qlora_t4.py"


def write_text(folder: Path, task: str = "short", times: int = 60) -> Path:
    """A text file to learn: the task's 32 sentences, `times` over, each time in another order."""
    sentences = ["".join(pair) for pair in TASKS[task]]
    shuffle = random.Random(0)
    path = folder / f"{task}.txt"
    path.write_text("\n".join("\n".join(shuffle.sample(sentences, 32)) for _ in range(times)), encoding="utf-8")
    return path


def train_small(folder: Path, text: Path) -> Path:
    """Run the program on the small model; the folder of the adapter that it wrote. Seconds, on a CPU."""
    model, adapter = folder / "small", folder / "qlora_t4"
    pretrained_model().float().save_pretrained(model)
    small_tokenizer().save_pretrained(model)
    sizes = ["--length", "24", "--batch", "16", "--accumulate", "2", "--steps", "40", "--lr", "1e-2"]
    _run([str(RECIPE), "--model", str(model), "--text", str(text), "--output", str(adapter), *sizes])
    return adapter


def rehearse(model_id: str, gpu: str, folder: Path, text: Path) -> dict[str, Any]:
    """Run two steps of the program on a virtual GPU; `virtual-gpu run --json`'s report.

    The model's folder holds its configuration and a tokenizer of bytes: nothing is downloaded.
    """
    model = folder / model_id.split("/")[-1]
    load_config(model_id).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    program = [str(RECIPE), "--model", str(model), "--text", str(text), "--accumulate", "1"]
    return json.loads(_run(["-m", "virtual_gpu", "run", "--gpu", gpu, "--steps", "2", "--json", *program]))


def _run(command: list[str]) -> str:
    """Standard output of this Python with the command; RuntimeError with the end of its errors where it fails."""
    with telling() as told:
        told(tr(ko="프로그램을 실행한다", en="running the program"))
        done = subprocess.run(
            [sys.executable, *command], cwd=COURSE, env={**os.environ, "PYTHONPATH": str(COURSE)},
            capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout
