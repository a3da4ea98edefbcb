"""A lever that cuts the model between its layers: a card's stages of a pipeline, by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from .program import Backward, Batch, Ended, Program, checkpointed
from .ranks import on_meta


class Stage(nn.Module):
    """An equal part of the blocks; the first stage has the embedding too, the last one norm and head."""

    def __init__(self, model: nn.Module, number: int, stages: int):
        super().__init__()
        self.body, first, last = model.base_model, number == 0, number == stages - 1
        each = len(self.body.layers) // stages
        self.body.layers = self.body.layers[number * each : (number + 1) * each]
        self.head = model.get_output_embeddings() if last else nn.Identity()
        if not first:
            self.body.embed_tokens = None
        if not last:
            self.body.norm = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"inputs_embeds" if x.is_floating_point() else "input_ids": x}
        return self.head(self.body(**given, use_cache=False).last_hidden_state)


class Stages(nn.Module):
    """A card's stages and the schedule that runs them."""

    def __init__(self, program: Program, schedule: type, numbers: Sequence[int], of: int):
        super().__init__()
        self.parts = nn.ModuleList()
        built = [self._built(program, number, of) for number in numbers]
        one = built if issubclass(schedule, PipelineScheduleMulti) else built[0]
        self.schedule = schedule(one, program.batch, loss_fn=loss_of_next)
        self.has_first, self.has_last = 0 in numbers, of - 1 in numbers

    def _built(self, program: Program, number: int, of: int) -> pipelining.PipelineStage:
        model = on_meta(program)
        checkpointed(model)
        vocabulary, width = model.get_output_embeddings().weight.shape
        part = Stage(model, number, of).to_empty(device="cuda")
        self.parts.append(part)

        def numbers(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(1, program.length, size, dtype=dtype, device="cuda", requires_grad=True)

        tokens = torch.empty(1, program.length, dtype=torch.int64, device="cuda")
        between = numbers(width, program.weights)
        return pipelining.PipelineStage(
            part, number, of, torch.device("cuda", program.rank),
            input_args=(tokens if number == 0 else between,),
            output_args=(between if number < of - 1 else numbers(vocabulary, program.autocast or program.weights),),
        )  # fmt: skip


def stages_of(schedule: type) -> Callable[[Program], nn.Module]:
    """This card's stages, each block checkpointed, and their schedule; every text of the batch is a micro-batch."""

    def load(program: Program) -> nn.Module:
        rank, ranks = program.rank, program.gpus
        numbers = {
            pipelining.ScheduleInterleaved1F1B: (rank, rank + ranks),
            pipelining.ScheduleZBVZeroBubble: (rank, 2 * ranks - 1 - rank),  # down one side of the V and up the other
        }.get(schedule, (rank,))
        return Stages(program, schedule, numbers, len(numbers) * ranks)

    return load


def loss_of_next(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def scheduled(program: Program, stage: nn.Module, batch: Batch, backward: Backward, ended: Ended) -> None:
    """Forward and backward of all micro-batches, in the schedule's order."""
    tokens = batch["input_ids"]
    last = {"target": tokens} if stage.has_last else {}
    with program.casting():
        stage.schedule.step(*([tokens] if stage.has_first else []), **last)
    ended("backward")
