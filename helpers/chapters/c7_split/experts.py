"""One rank of a mixture of experts (chapter 7), by transformers' own program on a virtual GPU."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO

from virtual_gpu.language import tr
from virtual_gpu.program.runner import run
from virtual_gpu.units import human_bytes

from ...environment import COURSE

PROGRAM = COURSE / "examples" / "train_experts.py"
RANKS = 8


def expert_ranks(*experts: int, layers: int = 8) -> None:
    """Print what one of eight H100s takes that train Qwen3-30B-A3B of so many layers.

    experts: how many ranks have experts of their own; 1: all weights are shared out by FSDP2. A rank's parameters, its
    temporaries at the peak and the peak are printed. Before transformers has expert parallelism with FSDP2 (`ep_size`
    of its `DistributedConfig`) that is said instead. The program's own error where it fails.
    """
    from transformers import __version__
    from transformers.distributed import DistributedConfig

    if "ep_size" not in {field.name for field in fields(DistributedConfig)}:
        print(
            tr(
                ko=f"transformers {__version__}에는 FSDP2와 함께 쓰는 전문가 병렬이 없다. 저장된 출력은 5.23의 것이다.",
                en=f"transformers {__version__} has no expert parallelism with FSDP2; the stored output is 5.23's.",
            )
        )
        return
    print("experts, parameters, temporaries, peak")
    for number in experts:
        with redirect_stdout(StringIO()):  # its losses, which have no values here
            options = ["--layers", f"{layers}", "--experts", f"{number}"]
            report = run(str(PROGRAM), options, gpu="H100", gpus=RANKS)
        if report.error is not None:
            raise report.error
        sizes = report.at_peak["parameters"], report.at_peak["temporaries"], report.allocated
        print(number, *map(human_bytes, sizes), sep=", ")
