"""CS336's models on two cards, with and without sharded optimizer state, and damek's 2.7B model on one."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from virtual_gpu.counting.gpu import VirtualGPU

from .cs336 import AdamW, cross_entropy
from .cs336_training import SETTINGS, WARM_UP, Training, sizes_of
from .recipe import SIZE, Prediction, Recipe, Refused, Row, Stated, from_source, gpu_of


@functools.lru_cache(8)
def wedsonlin_rank(card: str, sizes: str, ranks: int, rank: int, sharded: bool) -> Mapping[str, int]:
    """sharded_optimizer.py's three moments of a rank: gradients are reduced in place, so that one rank shows them.

    Sharded, the parameters move into one flat tensor, of which a rank's optimizer has every piece in its half.
    """
    s = SimpleNamespace(**json.loads(sizes))
    s.batch //= ranks
    gpu = gpu_of({"gpu": card}, "H100")  # where none is stated; the same repository's attention has Hopper's workspaces
    ours = Training(gpu, s)
    found = {
        "memory_allocated after_model_init": ours.after_init,
        "max_memory_allocated after_model_init": ours.after_init,
    }
    with gpu:
        parameters = list(ours.model.parameters())
        optimized = _flattened(parameters, ranks, rank) if sharded else [(p, p, 0, p.numel()) for p in parameters]
        gpu.reset_peak_memory_stats()
        optimizer = torch.optim.AdamW([local for local, *_ in optimized], lr=1e-3, foreach=False)
        with ours.autocast():
            loss = cross_entropy(ours.forward(), ours.targets)
        loss.backward()
        found |= _moment(gpu, "before_optimizer_step")
        for local, parameter, start, end in optimized if sharded else ():
            local.grad = parameter.grad.view(-1)[start:end]
        optimizer.step()
        return found | _moment(gpu, "after_optimizer_step")


def _moment(gpu: VirtualGPU, when: str) -> dict[str, int]:
    found = {
        f"memory_allocated {when}": gpu.memory_allocated(),
        f"max_memory_allocated {when}": gpu.max_memory_allocated(),
    }
    gpu.reset_peak_memory_stats()
    return found


@torch.no_grad()
def _flattened(parameters: list, ranks: int, rank: int) -> list[tuple]:
    """(piece of the flat tensor, its parameter, from, to within it) of a rank; the parameters become views of it."""
    total = sum(p.numel() for p in parameters)
    flat = torch.empty(total, dtype=parameters[0].dtype)
    first, last = rank * (total // ranks), (rank + 1) * (total // ranks)
    offset, pieces = 0, []
    for p in parameters:
        flat[offset : offset + p.numel()].copy_(p.data.view(-1))
        p.data = flat[offset : offset + p.numel()].view_as(p)
        start, end = max(offset, first), min(offset + p.numel(), last)
        if start < end:
            pieces.append((flat[start:end], p, start - offset, end - offset))
        offset += p.numel()
    return pieces


@functools.lru_cache(8)
def damek_rank(card: str, sizes: str, ranks: int, sharded: bool) -> Mapping[str, int]:
    """optimizer_state_sharding_accounting.py: the model, and what is held when a step is done; expandable segments.

    Sharded, every second parameter has its state on a rank; the one with more is printed.
    """
    gpu = gpu_of({"gpu": card}, expandable_segments=True)
    ours = Training(gpu, SimpleNamespace(**json.loads(sizes)))
    found = {"memory_allocated after model init": ours.after_init}
    after = []
    for rank in range(ranks if sharded else 1):
        gpu = gpu_of({"gpu": card}, expandable_segments=True)
        ours = Training(gpu, SimpleNamespace(**json.loads(sizes)))
        parameters = list(ours.model.parameters())
        optimizer = AdamW(parameters[rank::ranks] if sharded else parameters)
        with gpu:
            for _ in range(WARM_UP):
                logits = ours.forward()
                loss = cross_entropy(logits, ours.targets)
                loss.backward()
                optimizer.step()
            after.append(gpu.memory_allocated())
            del logits, loss
    return found | {"memory_allocated before/after step": max(after)}


@functools.lru_cache(8)
def damek_pass(card: str, sizes: str, train: bool) -> int:
    """benchmarking_script.py --memory: the most active after warm-up passes without optimizer steps.

    A forward pass without gradients; in training one with them after it, and the optimizer's first step.
    """
    gpu = gpu_of({"gpu": card})
    ours = Training(gpu, SimpleNamespace(**json.loads(sizes)))
    with gpu:
        for _ in range(WARM_UP):
            _damek_step(ours, train)
        gpu.reset_peak_memory_stats()
        _damek_step(ours, False)
        if train:
            _damek_step(ours, True)
            ours.optimizer.step()
        return gpu.max_memory_allocated()


def _damek_step(ours: Training, gradients: bool) -> None:
    if gradients:
        ours.model.zero_grad()
    with torch.set_grad_enabled(gradients), ours.autocast():
        logits = ours.forward()
        loss = cross_entropy(logits, ours.targets)
        del logits
    if gradients:
        loss.backward()


def predict_ranks(row: Row) -> Prediction:
    """Of Wedsonlin's and damek's models on two cards; from the rank that holds least to the one that holds most."""
    s, card = row["settings"], row["gpu"]
    sizes = json.dumps(sizes_of(s))
    if s["batch"] % s["world_size"]:
        raise Refused(f"a batch of {s['batch']} on {s['world_size']} ranks")
    if row["source"].startswith("damek"):
        found = [damek_rank(card, sizes, s["world_size"], s.get("mode") == "sharded")]
    else:
        ranks = range(s["world_size"]) if s.get("mode") == "sharded" else range(1)  # which one, no row says
        found = [wedsonlin_rank(card, sizes, s["world_size"], rank, s.get("mode") == "sharded") for rank in ranks]
    if row["metric"] not in found[0]:
        raise Refused(f"the script does not print {row['metric']!r}")
    each = sorted(one[row["metric"]] for one in found)
    return Prediction(each[0]) if each[0] == each[-1] else Prediction(each[-1], low=each[0], high=each[-1])


def predict_pass(row: Row) -> int:
    """Of damek's 2.7B model: width 2,560, as the row's model says."""
    shape = re.search(r"\((\d+)/(\d+)/(\d+)/(\d+), vocab (\d+)\)", row["model"])
    if not shape:
        raise Refused("states no sizes")
    names = ("d_model", "d_ff", "layers", "heads", "vocab")
    settings = row["settings"] | dict(zip(names, map(int, shape.groups()), strict=True))
    return damek_pass(row["gpu"], json.dumps(sizes_of(Stated(settings))), settings["mode"] == "train")


def _settings_have(*names: str):
    return lambda row: set(names) <= set(row.get("settings", {}))


RECIPES = (
    Recipe(
        name="CS336 ranks",
        what="one of two ranks, with and without sharded optimizer state",
        what_ko="GPU 둘 가운데 하나: 옵티마이저 상태를 나눌 때와 나누지 않을 때",
        handles=lambda row: (
            from_source("Wedsonlin/assignment2-systems", "damek/cs336-assignment2-systems")(row)
            and _settings_have("layers", "world_size")(row)
        ),
        predict=predict_ranks,
        settings=SETTINGS | {"world_size": SIZE, "mode": ("baseline", "unsharded", "sharded")},
    ),
    Recipe(
        name="CS336 passes",
        what="a 2.7B model, the most active in a memory timeline",
        what_ko="27억 파라미터 모델의 메모리 타임라인에서 가장 높은 곳",
        handles=lambda row: (
            from_source("damek/cs336-assignment2-systems")(row)
            and _settings_have("ctx", "precision", "mode")(row)
            and "layers" not in row["settings"]
        ),
        predict=predict_pass,
        settings=SETTINGS | {"mode": ("train", "forward_no_grad")},
    ),
)
