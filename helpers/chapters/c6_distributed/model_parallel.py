"""What a rank runs (chapter 6) where the model itself is split: into stages (pipeline) or into slices (tensor)."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from virtual_gpu.language import tr
from virtual_gpu.shards.collectives import Collectives
from virtual_gpu.shards.layout import Layout
from virtual_gpu.units import choose, positive_int

from ...small_model import SmallLanguageModel, sentences
from .launcher import rank_device
from .ranks import next_token_loss, sentence_loss, small_model, tiny_batch, tiny_model, tiny_neox, weigh

# -- pipeline ------------------------------------------------------------------------------------------------------

SCHEDULES = ("GPipe", "1F1B")
DURATION = {"F": 1, "B": 2}  # a backward has two matrix products where the forward has one


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


@dataclass
class PipelineRun:
    """One stage's work on a batch, as it ran.

    order: ("F" or "B", micro-batch) one after another; spans: their seconds since the start; in_flight: the most
    micro-batches whose activations it held at once, kept_bytes: the bytes of these; loss: of the batch (last stage
    only); gradients: of its parameters, as one vector, which one stage after another make the whole model's.
    """

    order: list[tuple[str, int]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    in_flight: int = 0
    kept_bytes: int = 0
    loss: float | None = None
    gradients: torch.Tensor | None = None


def pipeline(schedule: str = "1F1B", micro_batches: int = 8, pause: float = 0.0) -> PipelineRun:
    """One batch of the 64 sentences through the small model, this rank's stage of it.

    pause: seconds that a forward of one micro-batch takes longer than it would (a backward twice that).
    """
    from torch.distributed import pipelining

    rank, n, device = dist.get_rank(), dist.get_world_size(), rank_device()
    whole, (tokens, labels) = small_model(), sentences()
    _check_pipeline(schedule, n, len(whole.blocks), micro_batches, len(tokens))
    part = PartOfModel(whole, rank, n).to(device)
    stage = pipelining.PipelineStage(part, rank, n, device)
    run = _record(stage, pause)
    kind = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}[schedule]
    work = kind(stage, micro_batches, loss_fn=sentence_loss)
    losses: list[torch.Tensor] = []
    inputs = [tokens.to(device).contiguous()] if rank == 0 else []  # PyTorch 2.11 wants them so
    targets = {"target": labels.to(device), "losses": losses} if rank == n - 1 else {}
    dist.barrier()
    work.step(*inputs, **targets)
    run.loss = float(torch.stack(losses).mean()) if losses else None
    run.gradients = torch.cat([p.grad.flatten() for p in part.parameters()]).cpu()
    return run


def _check_pipeline(schedule: str, stages: int, layers: int, micro_batches: int, rows: int) -> None:
    choose(schedule, SCHEDULES, tr(ko="순서", en="schedule"))
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


def _record(stage: Any, pause: float) -> PipelineRun:
    """Have the stage write down what it does, chunk by chunk, and how many bytes it keeps for the backward."""
    run, kept, start = PipelineRun(), {}, time.perf_counter()
    own = {p.untyped_storage().data_ptr() for p in stage.submod.parameters()}

    def recorded(kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            saved: list[torch.Tensor] = []
            time.sleep(pause * DURATION[kind])
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                result = work(chunk, *args, **kwargs)
            if kind == "F":
                kept[chunk] = weigh(t for t in saved if t.untyped_storage().data_ptr() not in own)
                run.in_flight = max(run.in_flight, len(kept))
                run.kept_bytes = max(run.kept_bytes, sum(kept.values()))
            else:
                del kept[chunk]
            run.order.append((kind, chunk))
            run.spans.append((begin - start, time.perf_counter() - start))
            return result

        return one_chunk

    stage.forward_one_chunk = recorded("F", stage.forward_one_chunk)
    stage.backward_one_chunk = recorded("B", stage.backward_one_chunk)
    return run


def timetable(runs: Sequence[PipelineRun]) -> list[list[tuple[str, int, int]]]:
    """For each stage (kind, micro-batch, start): the recorded order, if a forward takes 1 and a backward 2.

    Work begins when the stage is free and what it needs has come: a forward from the stage before, a backward from
    the stage after. Sending takes no time.
    """
    ends: dict[tuple[int, str, int], int] = {}
    rows: list[list[tuple[str, int, int]]] = [[] for _ in runs]
    free, waiting = [0] * len(runs), [list(run.order) for run in runs]
    while any(waiting):
        before = sum(map(len, waiting))
        for stage, order in enumerate(waiting):
            while order:
                kind, chunk = order[0]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < len(runs):
                    if (source, kind, chunk) not in ends:
                        break
                    free[stage] = max(free[stage], ends[source, kind, chunk])
                rows[stage].append((kind, chunk, free[stage]))
                free[stage] += DURATION[kind]
                ends[stage, kind, chunk] = free[stage]
                order.pop(0)
        if sum(map(len, waiting)) == before:
            raise ValueError("these orders wait for each other")
    return rows


def bubble(runs: Sequence[PipelineRun]) -> Fraction:
    """The share of all stages' time in which they wait, in the timetable."""
    rows = timetable(runs)
    length = max(start + DURATION[kind] for row in rows for kind, _, start in row)
    busy = sum(DURATION[kind] for row in rows for kind, _, _ in row)
    return 1 - Fraction(busy, length * len(rows))


def measured_bubble(runs: Sequence[PipelineRun]) -> float:
    """The same by the clock: from the first stage's first work to its last, the mean share of waiting."""
    length = runs[0].spans[-1][1] - runs[0].spans[0][0]
    busy = sum(end - begin for run in runs for begin, end in run.spans)
    return 1 - busy / (length * len(runs))


# -- tensor --------------------------------------------------------------------------------------------------------


@dataclass
class TensorRun:
    """One rank's slice of a model. forward, backward: calls by collective.

    difference: the largest between this loss and these gradients and those of the whole model. shapes: of this rank's
    weights in the first block (or the MLP). held: bytes of its parameters.
    """

    forward: Counter
    backward: Counter
    loss: float
    difference: float
    shapes: dict[str, tuple[int, ...]]
    held: int


def tensor_parallel_mlp(width: int = 8) -> TensorRun:
    """An MLP, its first matrix split by columns, the second by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def mlp() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        return torch.nn.Sequential(OrderedDict(up=up, gelu=torch.nn.GELU(), down=down)).double()

    x = torch.randn(4, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        return model(x.to(rank_device()).requires_grad_()).square().mean()

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return _split_and_compare(mlp, lambda model: [(model, plan)], loss_of)


def tensor_parallel() -> TensorRun:
    """The tiny GPT-NeoX of transformers, every block split between the ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    n = dist.get_world_size()
    Layout(n, 0, tensor_parallel=n).check_model(tiny_neox())
    plan = {
        "attention.query_key_value": ColwiseParallel(),
        "attention.dense": RowwiseParallel(),
        "mlp.dense_h_to_4h": ColwiseParallel(),
        "mlp.dense_4h_to_h": RowwiseParallel(),
    }
    tokens = tiny_batch().to(rank_device())
    return _split_and_compare(
        lambda: tiny_model(torch.float64),
        lambda model: [(block, plan) for block in model.base_model.layers],
        lambda model: next_token_loss(model, tokens),
    )


def _split_and_compare(build: Callable, splits: Callable, loss_of: Callable) -> TensorRun:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    device = rank_device()
    whole, model = build().to(device), build().to(device)
    expected = loss_of(whole)
    expected.backward()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module, plan in splits(model):
        parallelize_module(module, mesh, plan)
    with Collectives() as forward:
        loss = loss_of(model)
    with Collectives() as backward:
        loss.backward()
    differences = [float((loss - expected).detach().abs())]
    for split, full in zip(model.parameters(), whole.parameters(), strict=True):
        grad = split.grad.full_tensor() if hasattr(split.grad, "full_tensor") else split.grad
        differences.append(float((grad - full.grad).abs().max()))
    first = splits(model)[0][0]
    shapes = {
        name.removesuffix(".weight"): tuple(p.to_local().shape)
        for name, p in first.named_parameters()
        if name.endswith("weight") and hasattr(p, "to_local")
    }
    held = weigh(model.parameters())
    return TensorRun(forward.calls, backward.calls, float(loss.detach()), max(differences), shapes, held)
