"""Whole training steps of CS336's language model (see cs336.py): what is held, and at most held, phase by phase.

EnzoDing's memory profile (forward, loss, backward and step, fp32 and bf16 autocast) and its steps with checkpointed
segments; Wedsonlin's snapshots from their beginning to their end; damek's and Wedsonlin's models of several ranks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from virtual_gpu.counting.gpu import VirtualGPU

from .cs336 import AdamW, Model, cross_entropy, forward_in_segments
from .recipe import Prediction, Recipe, Refused, Row, from_source, gpu_of

WARM_UP = 2  # steps; from the second on the optimizer's state and its last temporaries are there


class Training:
    """The model, its optimizer and a batch on a virtual card; `step` is one training step."""

    def __init__(self, gpu: VirtualGPU, s: SimpleNamespace):
        self.gpu, self.half, self.segment = gpu, s.half, s.segment
        with torch.device("meta"):
            self.model = Model(s.ctx, s.width, s.layers, s.heads, s.hidden, s.vocabulary)
        gpu.place(self.model)
        self.after_init = gpu.memory_allocated()
        self.optimizer = AdamW(self.model.parameters())
        self.ids, self.targets = (gpu.place(torch.zeros(s.batch, s.ctx, dtype=torch.int64)) for _ in range(2))

    def forward(self) -> torch.Tensor:
        """Logits, with or without checkpoints."""
        if self.segment is None:
            return self.model(self.ids)
        return forward_in_segments(self.model, self.ids, self.segment or None)

    def autocast(self):
        """bf16, where the row says so."""
        return self.gpu.autocast(torch.bfloat16 if self.half else None)

    def forwards(self, count: int) -> None:
        """Forward passes; the logits of one are held until those of the next are there."""
        for _ in range(count):
            with self.autocast():
                logits = self.forward()  # noqa: F841

    def step(self) -> None:
        """A step whose names end with it."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            logits = self.forward()
            loss = cross_entropy(logits, self.targets)
        loss.backward()
        self.optimizer.step()

    def phases(self) -> dict[str, int]:
        """The most held in each phase of one more step; what one phase names the next ones hold."""
        found = {}
        self.optimizer.zero_grad(set_to_none=True)
        self.gpu.reset_peak_memory_stats()
        with self.autocast():
            logits = self.forward()
        found["forward"] = self._peak()
        with self.autocast():
            loss = cross_entropy(logits, self.targets)
        found["loss"] = self._peak()
        loss.backward()
        found["backward"] = self._peak()
        self.optimizer.step()
        found["optimizer"] = self._peak()
        return found | {"step": max(found.values())}

    def _peak(self) -> int:
        peak = self.gpu.max_memory_allocated()
        self.gpu.reset_peak_memory_stats()
        return peak


@functools.lru_cache(8)
def enzoding(gpu_name: str, sizes: str, mode: str) -> Mapping[str, int]:
    """Phase → most bytes, of one card and setting; mode: "train", or "forward" (with its graph, and nothing after)."""
    gpu = gpu_of({"gpu": gpu_name})
    training = Training(gpu, SimpleNamespace(**json.loads(sizes)))
    with gpu:
        if mode == "forward":
            training.forwards(WARM_UP)
            gpu.empty_cache()
            gpu.reset_peak_memory_stats()
            training.forwards(1)
            return {"forward": gpu.max_memory_allocated(), "step": gpu.max_memory_allocated()}
        for _ in range(WARM_UP):
            training.step()
        gpu.empty_cache()
        return training.phases()


def _sizes(settings: Mapping) -> dict:
    """A row's settings in our names."""
    precision = settings.get("precision", settings.get("mixed_precision", "fp32"))
    segment = settings.get("segment")
    return {
        "ctx": settings["ctx"],
        "width": settings["d_model"],
        "layers": settings["layers"],
        "heads": settings["heads"],
        "hidden": settings["d_ff"],
        "vocabulary": settings["vocab"],
        "batch": settings["batch"],
        "half": "bf16" in precision,
        "segment": None if segment is None else 0 if segment == "none" else int(segment),
    }


def predict_enzoding(row: Row) -> int:
    """ "max_memory_allocated backward" and its kin."""
    phase = row["metric"].removeprefix("max_memory_allocated ")
    settings = row["settings"]
    mode = settings.get("mode", "train")
    if mode not in ("train", "forward"):
        raise Refused(f"mode {mode!r} is not written here")
    found = enzoding(row["gpu"], json.dumps(_sizes(settings)), mode)
    if phase not in found:
        raise Refused(f"the script does not print {row['metric']!r}")
    return found[phase]


# -- Wedsonlin's snapshots, from what was held at their start to what is held at their end -----------------------------

_SNAPSHOT = re.compile(r"medium_(?P<ctx>\d+)_(?P<kind>inference|training)_memory_snapshot")
_MEDIUM = {"width": 1024, "layers": 24, "heads": 16, "hidden": 4096, "vocabulary": 10_000, "batch": 4}
SNAPSHOT_WARM_UP = 5


@functools.lru_cache(8)
def wedsonlin_snapshot(ctx: int, training: bool, half: bool) -> Mapping[str, int]:
    """start, peak and end, allocated and reserved, of memory_profile() in cs336_systems/nsys_profile.py.

    Batches of every warm-up step and of the recorded one are there from the beginning, in one tensor each.
    """
    gpu = gpu_of({})
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
                found = _held(gpu, "start")
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
            found = _held(gpu, "start")
            gpu.reset_peak_memory_stats()
            with ours.autocast():
                output = ours.model(executed[0][0])
                loss = cross_entropy(output, executed[1][0])
            loss.backward()
            ours.optimizer.step()
        found |= {"peak_allocated": gpu.max_memory_allocated(), "peak_reserved": gpu.max_memory_reserved()}
        return found | _held(gpu, "end")


def _held(gpu: VirtualGPU, when: str) -> dict[str, int]:
    return {f"{when}_allocated": gpu.memory_allocated(), f"{when}_reserved": gpu.memory_reserved()}


def predict_snapshot(row: Row) -> int:
    """ "peak_allocated" and its kin, of the snapshot that the row's path names."""
    named = _SNAPSHOT.search(row["path"])
    if not named:
        raise Refused(f"the program of {row['path']!r} is not written here")
    half = "bf16 autocast" in row.get("note", "")
    return wedsonlin_snapshot(int(named["ctx"]), named["kind"] == "training", half)[row["metric"]]


# -- models of several ranks, and damek's 2.7B -------------------------------------------------------------------------


@functools.lru_cache(8)
def wedsonlin_rank(sizes: str, ranks: int, rank: int, sharded: bool) -> Mapping[str, int]:
    """sharded_optimizer.py's three moments of a rank: gradients are reduced in place, so that one rank shows them.

    Sharded, the parameters move into one flat tensor, of which a rank's optimizer has every piece in its half.
    """
    s = SimpleNamespace(**json.loads(sizes))
    s.batch //= ranks
    gpu = gpu_of({"gpu": "H100"})  # not stated; the workspaces in the same repository's attention rows are Hopper's
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
def damek_rank(sizes: str, ranks: int, sharded: bool) -> Mapping[str, int]:
    """optimizer_state_sharding_accounting.py: the model, and what is held when a step is done; expandable segments.

    Sharded, every second parameter has its state on a rank; the one with more is printed.
    """
    gpu = gpu_of({}, expandable_segments=True)
    ours = Training(gpu, SimpleNamespace(**json.loads(sizes)))
    found = {"memory_allocated after model init": ours.after_init}
    after = []
    for rank in range(ranks if sharded else 1):
        gpu = gpu_of({}, expandable_segments=True)
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
def damek_pass(sizes: str, train: bool) -> int:
    """benchmarking_script.py --memory: the most active after warm-up passes without optimizer steps.

    A forward pass without gradients; in training one with them after it, and the optimizer's first step.
    """
    gpu = gpu_of({})
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
    s = row["settings"]
    sizes = json.dumps(_sizes(s))
    if row["source"].startswith("damek"):
        found = [damek_rank(sizes, s["world_size"], s.get("mode") == "sharded")]
    else:
        ranks = range(s["world_size"]) if s.get("mode") == "sharded" else range(1)  # which one, no row says
        found = [wedsonlin_rank(sizes, s["world_size"], rank, s.get("mode") == "sharded") for rank in ranks]
    if row["metric"] not in found[0]:
        raise Refused(f"the script does not print {row['metric']!r}")
    each = sorted(one[row["metric"]] for one in found)
    return Prediction(each[-1], low=each[0], high=each[-1])


def predict_pass(row: Row) -> int:
    """Of damek's 2.7B model: width 2,560, as the row's model says."""
    shape = re.search(r"\((\d+)/(\d+)/(\d+)/(\d+), vocab (\d+)\)", row["model"])
    if not shape:
        raise Refused("states no sizes")
    names = ("d_model", "d_ff", "layers", "heads", "vocab")
    settings = row["settings"] | dict(zip(names, map(int, shape.groups()), strict=True))
    return damek_pass(json.dumps(_sizes(settings)), settings["mode"] == "train")


def _settings_have(*names: str):
    return lambda row: set(names) <= set(row.get("settings", {}))


RECIPES = (
    Recipe(
        name="CS336 training",
        what="training steps of a 3.4B model, by phase and by checkpointed segments",
        what_ko="34억 파라미터 모델의 학습 스텝: 단계별, 체크포인트 구간별",
        handles=lambda row: from_source("EnzoDing-rgb/cs336-assignment2-systems")(row) and "layers" in row["settings"],
        predict=predict_enzoding,
    ),
    Recipe(
        name="CS336 snapshots, end to end",
        what="a 0.4B model from an empty card to the end of a step: allocated and reserved",
        what_ko="4억 파라미터 모델, 빈 카드에서 스텝이 끝날 때까지: 할당과 예약",
        handles=from_source("Wedsonlin/assignment2-systems", kinds=("trace",)),
        predict=predict_snapshot,
    ),
    Recipe(
        name="CS336 ranks",
        what="one of two ranks, with and without sharded optimizer state",
        what_ko="GPU 둘 가운데 하나: 옵티마이저 상태를 나눌 때와 나누지 않을 때",
        handles=lambda row: (
            from_source("Wedsonlin/assignment2-systems", "damek/cs336-assignment2-systems")(row)
            and _settings_have("layers", "world_size")(row)
        ),
        predict=predict_ranks,
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
    ),
)
