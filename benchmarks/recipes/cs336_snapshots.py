"""Wedsonlin's memory snapshots, end to end: CS336's model from an empty card to the end of a recorded pass or step."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from virtual_gpu.allocator_blocks import Rising

from .cs336 import cross_entropy
from .cs336_training import Training
from .recipe import ANY, Recipe, Refused, Row, from_source, gpu_of

_SNAPSHOT = re.compile(r"medium_(?P<ctx>\d+)_(?P<kind>inference|training)_memory_snapshot")
_MEDIUM = {"width": 1024, "layers": 24, "heads": 16, "hidden": 4096, "vocabulary": 10_000, "batch": 4}
SNAPSHOT_WARM_UP = 5


@functools.lru_cache(8)
def wedsonlin_snapshot(card: str, ctx: int, training: bool, half: bool) -> Mapping[str, int]:
    """start, peak and end, allocated and reserved, of memory_profile() in cs336_systems/nsys_profile.py.

    Batches of every warm-up step and of the recorded one are there from the beginning, in one tensor each. The segments
    of these snapshots lie one above the other, from low addresses on, as under WSL.
    """
    gpu = gpu_of({"gpu": card}, place=Rising())
    sizes = _MEDIUM | {"ctx": ctx, "half": half, "segment": None}
    ours = Training(gpu, SimpleNamespace(**sizes))
    with gpu:
        del ours.ids, ours.targets
        warm, executed = (
            [torch.zeros(steps, sizes["batch"], ctx, dtype=torch.int64) for _ in range(1 + training)]
            for steps in (SNAPSHOT_WARM_UP, 1)
        )
        if not training:
            with torch.inference_mode():
                for step in range(SNAPSHOT_WARM_UP):
                    with ours.autocast():
                        ours.model(warm[0][step])
                found = held(gpu, "start")
                gpu.reset_peak_memory_stats()
                with ours.autocast():
                    ours.model(executed[0][0])
        else:
            for step in range(SNAPSHOT_WARM_UP):
                with ours.autocast():
                    output = ours.model(warm[0][step])
                    loss = cross_entropy(output, warm[1][step])
                loss.backward()
                ours.optimizer.step()
                ours.optimizer.zero_grad()
            del output, loss
            found = held(gpu, "start")
            gpu.reset_peak_memory_stats()
            with ours.autocast():
                output = ours.model(executed[0][0])
                loss = cross_entropy(output, executed[1][0])
            loss.backward()
            ours.optimizer.step()
        found |= {"peak_allocated": gpu.max_memory_allocated(), "peak_reserved": gpu.max_memory_reserved()}
        return found | held(gpu, "end")


def held(gpu: Any, when: str) -> dict[str, int]:
    """What is held now, of a virtual GPU or of `torch.cuda`."""
    return {f"{when}_allocated": gpu.memory_allocated(), f"{when}_reserved": gpu.memory_reserved()}


def predict_snapshot(row: Row) -> int:
    """ "peak_allocated" and its kin, of the snapshot that the row's path names."""
    named = _SNAPSHOT.search(row["path"])
    if not named:
        raise Refused(f"the program of {row['path']!r} is not written here")
    half = "bf16 autocast" in row.get("note", "")
    found = wedsonlin_snapshot(row["gpu"], int(named["ctx"]), named["kind"] == "training", half)
    return said(found, row)


def said(found: Mapping[str, int], row: Row) -> int:
    """The row's metric among these; Refused where it is none of them."""
    if row["metric"] not in found:
        raise Refused(f"the snapshot does not say {row['metric']!r}")
    return found[row["metric"]]


RECIPES = (
    Recipe(
        name="CS336 snapshots, end to end",
        what="a 0.4B model from an empty card to the end of a step: allocated and reserved",
        what_ko="4억 파라미터 모델, 빈 카드에서 스텝이 끝날 때까지: 할당과 예약",
        handles=from_source("Wedsonlin/assignment2-systems", kinds=("trace",)),
        predict=predict_snapshot,
        settings={"torch": ANY, "allocator_settings": ("default",)},
    ),
)
