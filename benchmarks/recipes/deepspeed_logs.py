"""What DeepSpeed prints of the card while it makes its optimizer: `see_memory_usage`, as a tutorial's log has it.

hwang2006/large-scale-lm-tutorials (Apache-2.0): GPT-2 in fp16 on four GPUs of a cluster, ZeRO-1, ZeRO-3, and ZeRO-3
with parameters and optimizer on the CPU. The program is DeepSpeed's own engine in the release that the log prints, on
one of four ranks. Not stated: transformers (here the release of the first log's month, which kept GPT-2's masks as
buffers), PyTorch.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.children import emit, run
from benchmarks.recipes.recipe import SIZE, Recipe, Refused, Row, from_source, gpu_of

SECONDS = 300
POINTS = (
    "Stage 3 initialize beginning", "DeepSpeedZeRoOffload initialize [begin]", "DeepSpeedZeRoOffload initialize [end]",
    "Before creating fp16 partitions", "After creating fp16 partitions", "Before creating fp32 partitions",
    "After creating fp32 partitions", "Before initializing optimizer states", "After initializing optimizer states",
    "After initializing ZeRO optimizer",
)  # fmt: skip


def predict(row: Row) -> int:
    """Bytes allocated, allocated at most since the point before, or reserved."""
    stated = row["settings"]
    asked = {name: stated[name] for name in ("gpus", "stage", "offload", "bucket", "optimizer")}
    points = _log(json.dumps(asked, sort_keys=True), gpu_of(row).spec.name)
    if stated.point not in points:
        raise Refused(f"this log has no point {stated.point!r}")
    return points[stated.point][stated.number]


@cache
def _log(asked: str, card: str) -> dict[str, dict[str, int]]:
    gpus = str(json.loads(asked)["gpus"])
    virtual = [sys.executable, "-m", "virtual_gpu", "run", "--no-advise", "--gpu", card, "--gpus", gpus]
    child = run([*virtual, "torchrun", "--nproc_per_node", gpus, __file__, asked], SECONDS, told=asked)
    points = {row["point"]: row for row in child.rows if "point" in row}
    if not points:
        raise RuntimeError(child.last_words or "it printed nothing")
    return points


def log(asked: dict[str, Any]) -> None:
    """Make the engine, and emit what it would print."""
    import torch
    from deepspeed.runtime import utils

    def see_memory_usage(message: str, force: bool = False) -> None:
        """As its own, which asks the driver too, which virtual cards have none of."""
        point = next((point for point in POINTS if message.startswith(point)), None)
        if point is None:
            return
        held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        emit({"point": point, "allocated": held, "peak": most, "reserved": torch.cuda.memory_reserved()})
        torch.cuda.reset_peak_memory_stats()

    utils.see_memory_usage = see_memory_usage
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, stage3, stage_1_and_2
    from transformers import GPT2Config, GPT2LMHeadModel

    for module in (parameter_offload, partition_parameters, stage3, stage_1_and_2):
        module.see_memory_usage = see_memory_usage  # which they have by name
    model = GPT2LMHeadModel(GPT2Config())
    on_cpu = asked["optimizer"] == "DeepSpeedCPUAdam"
    kind = DeepSpeedCPUAdam if on_cpu else torch.optim.Adam
    zero = {"stage": asked["stage"], "allgather_bucket_size": asked["bucket"], "reduce_bucket_size": asked["bucket"]}
    if asked["offload"] != "no":
        zero |= {name: {"device": "cpu", "pin_memory": True} for name in ("offload_param", "offload_optimizer")}
    config = {
        "train_batch_size": 4 * asked["gpus"],
        "fp16": {"enabled": True, "initial_scale_power": 32, "loss_scale_window": 1000, "hysteresis": 2},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=3e-5, weight_decay=3e-7), config=config)


RECIPES = (
    Recipe(
        name="DeepSpeed's logs",
        what="GPT-2 under DeepSpeed (ZeRO-1, ZeRO-3, offload) on four GPUs, what its optimizer takes as it is made",
        what_ko="DeepSpeed가 옵티마이저를 만드는 동안 (GPT-2)",
        handles=from_source("hwang2006/large-scale-lm-tutorials"),
        predict=predict,
        packages=lambda row: (
            f"deepspeed=={row['settings']['deepspeed']}",
            "transformers==4.44.2",
            "setuptools==80.9.0",
        ),
        settings={
            **dict.fromkeys(("gpus", "bucket"), SIZE),
            "stage": (1, 3),
            "offload": ("no", "parameters and optimizer"),
            "precision": ("fp16",),
            "optimizer": ("torch Adam", "DeepSpeedCPUAdam"),
            "deepspeed": ("0.15.1",),
            "point": POINTS,
            "number": ("allocated", "peak", "reserved"),
        },
    ),
)

if __name__ == "__main__":
    log(json.loads(sys.argv[1]))
