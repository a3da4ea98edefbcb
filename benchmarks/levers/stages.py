"""Levers that cut the model between its layers: a card's stages of a pipeline, by `torch.distributed.pipelining`.

Each stage may be cut further: its matrices and tokens between cards that compute a layer together, and what each of
these holds by FSDP2 over the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from virtual_gpu.shards.sequence import plan_of_tokens

from .program import Backward, Batch, Ended, Program, checkpointed
from .ranks import on_meta

Prepare = Callable[[nn.Module], None]
SUMS_32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Grid:
    """Cards by number: the pipeline's stages outermost, within one FSDP2's parts, within one those of a layer.

    policy, keep: of FSDP2, whether what was gathered for forward stays. ends: layers that the embedding, and norm with
    head, count for where the layers are dealt to the stages.
    """

    pipeline: int
    data: int = 1
    tensor: int = 1
    policy: MixedPrecisionPolicy = SUMS_32
    keep: bool = True
    ends: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.pipeline, self.data, self.tensor

    @property
    def shared(self) -> bool:
        """Whether a stage is of several cards."""
        return self.data * self.tensor > 1

    def place_of(self, rank: int) -> int:
        """The place in the pipeline."""
        return rank // (self.data * self.tensor)

    def first_of(self, place: int) -> int:
        """The first rank of a place in the pipeline."""
        return place * self.data * self.tensor

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cuda", self.sizes, mesh_dim_names=("pipeline", "data", "tensor"))

    def split(self, stage: Stage, mesh: DeviceMesh) -> None:
        """Tensors and tokens between the cards of a layer, then each group of parameters by FSDP2."""
        plan = {name.removeprefix("model."): style for name, style in plan_of_tokens(logits_whole=False).items()}
        plan |= {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))}
        if stage.embed_tokens is None:
            del plan["layers.0"]  # what comes from the stage before is this card's part already
        parallelize_module(stage, mesh["tensor"], plan)
        for group in stage.groups():
            fully_shard(group, mesh=mesh["data"], mp_policy=self.policy, reshard_after_forward=not self.keep)


class Stage(nn.Module):
    """A part of the blocks; the first stage has the embedding too, the last one norm and head.

    length: tokens of a text, of which cards that share a layer send on a part each. ends: as `Grid` has it.
    """

    def __init__(self, model: nn.Module, number: int, stages: int, length: int, ends: int = 0):
        super().__init__()
        body, first, last = model.base_model, number == 0, number == stages - 1
        each, rest = divmod(len(body.layers) + 2 * ends, stages)
        if rest:
            raise ValueError(f"{len(body.layers)} layers and twice {ends} are not equal parts of {stages} stages")
        start = number * each - ends
        self.embed_tokens = body.embed_tokens if first else None
        self.layers = body.layers[max(start, 0) : start + each]
        self.norm, self.head = (body.norm, model.get_output_embeddings()) if last else (None, None)
        self.rotary, self.length = body.rotary_emb, length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        turns = self.rotary(x, torch.arange(self.length, device=x.device)[None])
        for block in self.layers:
            x = block(x, position_embeddings=turns)
        return x if self.head is None else self.head(self.norm(x))

    def groups(self) -> list:
        """What FSDP2 gathers together."""
        first = [] if self.embed_tokens is None else [self.embed_tokens]
        last = [] if self.head is None else [[self.norm, self.head]]
        return [*first, *self.layers, *last, self]


class Stages(nn.Module):
    """A card's stages and the schedule that runs them."""

    def __init__(self, program: Program, schedule: type, grid: Grid, prepare: Prepare):
        super().__init__()
        self.parts = nn.ModuleList()
        self.mesh = grid.mesh() if grid.shared else None
        place, places = grid.place_of(program.rank), grid.pipeline
        numbers = {
            pipelining.ScheduleInterleaved1F1B: (place, place + places),
            pipelining.ScheduleZBVZeroBubble: (place, 2 * places - 1 - place),  # down one side of the V, up the other
        }.get(schedule, (place,))
        of = len(numbers) * places
        built = [self._built(program, grid, prepare, number, of) for number in numbers]
        one = built if issubclass(schedule, PipelineScheduleMulti) else built[0]
        self.schedule = schedule(one, program.batch, loss_fn=self._loss)
        self.has_first, self.has_last = 0 in numbers, of - 1 in numbers

    def _built(self, program: Program, grid: Grid, prepare: Prepare, number: int, of: int) -> pipelining.PipelineStage:
        model = on_meta(program)
        prepare(model)
        vocabulary, width = model.get_output_embeddings().weight.shape
        part = Stage(model, number, of, program.length, grid.ends)
        if self.mesh is not None:
            grid.split(part, self.mesh)
        self.parts.append(part.to_empty(device="cuda"))
        dtype = grid.policy.param_dtype if self.mesh is not None else program.weights

        def numbers(length: int, size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(1, length, size, dtype=dtype, device="cuda", requires_grad=True)

        tokens = torch.empty(1, program.length, dtype=torch.int64, device="cuda")
        between = numbers(program.length // grid.tensor, width, dtype)
        logits = numbers(program.length, vocabulary // grid.tensor, program.autocast or dtype)
        return pipelining.PipelineStage(
            part, number, of, torch.device("cuda", torch.cuda.current_device()),
            input_args=(tokens if number == 0 else between,), output_args=(between if number < of - 1 else logits,),
            group=None if self.mesh is None else self.mesh["pipeline"].get_group(),
        )  # fmt: skip

    def _loss(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of_next(logits if self.mesh is None else of_whole_vocabulary(logits, self.mesh), tokens)


def of_whole_vocabulary(logits: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """What this card has for its part of the vocabulary, as the part that it is: `loss_parallel` takes it."""
    return DTensor.from_local(logits, mesh["tensor"], [Shard(-1)], run_check=False)


def loss_of_next(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def stages_of(
    schedule: type, grid: Grid | None = None, prepare: Prepare = checkpointed
) -> Callable[[Program], nn.Module]:
    """This card's stages and their schedule; every text of the batch is a micro-batch.

    grid: what the cards share beside; the pipeline alone without one. prepare: of the model, before it is cut.
    """
    return lambda program: Stages(program, schedule, grid or Grid(program.gpus), prepare)


def scheduled(program: Program, stage: nn.Module, batch: Batch, backward: Backward, ended: Ended) -> None:
    """Forward and backward of all micro-batches, in the schedule's order."""
    tokens = batch["input_ids"]
    last = {"target": tokens} if stage.has_last else {}
    with program.casting():
        stage.schedule.step(*([tokens] if stage.has_first else []), **last)
    ended("backward")
