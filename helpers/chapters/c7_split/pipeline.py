"""What a rank runs (chapter 7) where the model is cut between its layers: pipeline parallelism."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from virtual_gpu.language import tr
from virtual_gpu.units import choose, positive_int

from ...ranks.launcher import rank_device
from ...ranks.training import sentence_loss, small_model, weigh
from ...small_model import SmallLanguageModel, sentences

LAYERS = 8
# How the stages lie on ranks 0…n - 1, two a rank where a schedule has it so: in turns, or down and back up (a V).
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
# A backward has two matrix products where the forward has one: for the input's gradient (I) and the weight's (W).
DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


class PartOfModel(torch.nn.Module):
    """The blocks of one stage; the first stage has the embeddings too, the last one norm and head."""

    def __init__(self, model: SmallLanguageModel, stage: int, stages: int):
        super().__init__()
        share = [len(part) for part in torch.arange(len(model.blocks)).tensor_split(stages)]
        first = sum(share[:stage])
        if stage == 0:
            self.embedding, self.position = model.embedding, model.position
        self.blocks = model.blocks[first : first + share[stage]]
        if stage == stages - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class Work(NamedTuple):
    """One micro-batch through one stage: forward (F), backward (B), or its two halves (I, W)."""

    kind: str
    stage: int
    micro_batch: int


@dataclass
class PipelineRun:
    """One rank's work on a batch, as it ran.

    order: one piece of work after another; spans: their seconds since the start; layers: of each stage; in_flight: the
    most micro-batches whose activations it held at once (one of two stages' is half a one), kept_bytes: the most bytes
    of these; loss: of the batch (the last stage's rank only); gradients: stage → those of its parameters as one vector.
    """

    order: list[Work] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    layers: int = 1
    in_flight: float = 0
    kept_bytes: int = 0
    loss: float | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


def pipeline(schedule: str = "1F1B", micro_batches: int = 8, pause: float = 0.0) -> PipelineRun:
    """One batch of the 64 sentences through the small model of eight layers, this rank's stages of it.

    pause: seconds that a layer's forward of one micro-batch takes longer than it would (a backward twice that).
    """
    from torch.distributed import pipelining

    rank, n, device = dist.get_rank(), dist.get_world_size(), rank_device()
    whole, (tokens, labels) = small_model(LAYERS), sentences()
    mine = stages_of(schedule, rank, n)
    stages = n * len(mine)
    _check_pipeline(schedule, stages, len(whole.blocks), micro_batches, len(tokens))
    parts = {stage: PartOfModel(whole, stage, stages).to(device) for stage in mine}
    built = [pipelining.PipelineStage(part, stage, stages, device) for stage, part in parts.items()]
    run = _record(built, pause)
    work = getattr(pipelining, f"Schedule{schedule}")(
        built if len(mine) > 1 else built[0], micro_batches, loss_fn=sentence_loss
    )
    losses: list[torch.Tensor] = []
    inputs = [tokens.to(device).contiguous()] if 0 in mine else []  # PyTorch 2.11 wants them so
    targets = {"target": labels.to(device), "losses": losses} if stages - 1 in mine else {}
    dist.barrier()
    work.step(*inputs, **targets)
    run.loss = float(torch.stack(losses).mean()) if losses else None
    run.gradients = {
        stage: torch.cat([p.grad.flatten() for p in part.parameters()]).cpu() for stage, part in parts.items()
    }
    return run


def stages_of(schedule: str, rank: int, n: int) -> list[int]:
    """The stages of a rank; UnknownName for a schedule that is not tried here."""
    return {
        "GPipe": [rank],
        "1F1B": [rank],
        "Interleaved1F1B": [rank, n + rank],
        "ZBVZeroBubble": [rank, 2 * n - 1 - rank],
    }[choose(schedule, SCHEDULES, tr(ko="순서", en="schedule"))]


def gradients_of(runs: Sequence[PipelineRun]) -> torch.Tensor:
    """The whole model's gradients as one vector, stage after stage."""
    by_stage = {stage: vector for run in runs for stage, vector in run.gradients.items()}
    return torch.cat([by_stage[stage] for stage in sorted(by_stage)])


def _check_pipeline(schedule: str, stages: int, layers: int, micro_batches: int, rows: int) -> None:
    if stages > layers:
        raise ValueError(
            tr(
                ko=f"층이 {layers}개인 모델을 {stages}단계로 자를 수 없다. 한 단계에 적어도 한 층이 있어야 한다.",
                en=f"A model of {layers} layers does not make {stages} stages: each needs a layer at least.",
            )
        )
    if rows % positive_int(micro_batches, tr(ko="마이크로 배치 수", en="number of micro-batches")):
        raise ValueError(
            tr(
                ko=f"{rows}행을 마이크로 배치 {micro_batches}개로 똑같이 나눌 수 없다.",
                en=f"{rows} rows do not divide into {micro_batches} equal micro-batches.",
            )
        )
    if micro_batches < stages:
        raise ValueError(
            tr(
                ko=f"마이크로 배치가 {micro_batches}개인데 단계는 {stages}개다. 마이크로 배치를 단계 수 이상으로 한다.",
                en=f"{micro_batches} micro-batches for {stages} stages: use at least as many as there are stages.",
            )
        )


def _record(stages: Sequence[Any], pause: float) -> PipelineRun:
    """Have the stages write down what they do, chunk by chunk, and how many bytes they keep for the backward."""
    run, start = PipelineRun(layers=len(stages[0].submod.blocks)), time.perf_counter()
    kept: dict[tuple[int, int], int] = {}
    own = {p.untyped_storage().data_ptr() for stage in stages for p in stage.submod.parameters()}

    def recorded(stage: Any, name: str) -> None:
        work = getattr(stage, name)

        def one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
            kind = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(name)
            kind = kind or ("B" if kwargs.get("full_backward", True) else "I")
            begin = time.perf_counter()
            saved: list[torch.Tensor] = []
            time.sleep(pause * run.layers * DURATION[kind])
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                result = work(chunk, *args, **kwargs)
            if kind == "F":
                kept[stage.stage_index, chunk] = weigh(t for t in saved if t.untyped_storage().data_ptr() not in own)
                run.in_flight = max(run.in_flight, len(kept) / len(stages))
                run.kept_bytes = max(run.kept_bytes, sum(kept.values()))
            elif kind in "BW":
                del kept[stage.stage_index, chunk]
            run.order.append(Work(kind, stage.stage_index, chunk))
            run.spans.append((begin - start, time.perf_counter() - start))
            return result

        setattr(stage, name, one_chunk)

    for stage in stages:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            recorded(stage, name)
    return run


def timetable(runs: Sequence[PipelineRun]) -> list[list[tuple[Work, int, int]]]:
    """For each rank (work, start, duration): the recorded order, if a layer's forward takes 1 and its backward 2.

    Work begins when the rank is free and what it needs has come: a forward from the stage before, a backward from the
    stage after. Sending takes no time. ValueError where the orders wait for each other.
    """
    ends: dict[tuple[str, int, int], int] = {}
    rows: list[list[tuple[Work, int, int]]] = [[] for _ in runs]
    free, waiting = [0] * len(runs), [list(run.order) for run in runs]
    last = max(work.stage for run in runs for work in run.order)
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, order in enumerate(waiting):
            while order:
                work = order[0]
                direction, source = ("F", work.stage - 1) if work.kind == "F" else ("B", work.stage + 1)
                if work.kind != "W" and 0 <= source <= last:
                    if (direction, source, work.micro_batch) not in ends:
                        break
                    free[rank] = max(free[rank], ends[direction, source, work.micro_batch])
                duration = DURATION[work.kind] * runs[rank].layers
                rows[rank].append((work, free[rank], duration))
                free[rank] += duration
                if work.kind != "W":  # nobody waits for a weight's gradient
                    ends["F" if work.kind == "F" else "B", work.stage, work.micro_batch] = free[rank]
                order.pop(0)
        if sum(map(len, waiting)) == before:
            raise ValueError("these orders wait for each other")
    return rows


def bubble(runs: Sequence[PipelineRun]) -> Fraction:
    """The share of all ranks' time in which they wait, in the timetable."""
    rows = timetable(runs)
    length = max(start + duration for row in rows for _, start, duration in row)
    busy = sum(duration for row in rows for _, _, duration in row)
    return 1 - Fraction(busy, length * len(rows))


def measured_bubble(runs: Sequence[PipelineRun]) -> float:
    """The same by the clock: from the first rank's first work to its last, the mean share of waiting."""
    length = runs[0].spans[-1][1] - runs[0].spans[0][0]
    busy = sum(end - begin for run in runs for begin, end in run.spans)
    return 1 - busy / (length * len(runs))
