"""A lever that cuts the model between its layers: one stage of a pipeline, by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import pipelining

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


def stage_of(schedule: str) -> Callable[[Program], nn.Module]:
    """This card's stage, each block checkpointed, and its schedule; every text of the batch is a micro-batch."""

    def load(program: Program) -> nn.Module:
        model = on_meta(program)
        checkpointed(model)
        vocabulary, width = model.get_output_embeddings().weight.shape
        number, stages = program.rank, program.gpus
        stage = Stage(model, number, stages).to_empty(device="cuda")

        def numbers(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(1, program.length, size, dtype=dtype, device="cuda", requires_grad=True)

        tokens = torch.empty(1, program.length, dtype=torch.int64, device="cuda")
        between = numbers(width, program.weights)
        built = pipelining.PipelineStage(
            stage, number, stages, torch.device("cuda", number),
            input_args=(tokens if number == 0 else between,),
            output_args=(between if number < stages - 1 else numbers(vocabulary, program.autocast or program.weights),),
        )  # fmt: skip
        stage.schedule = getattr(pipelining, schedule)(built, program.batch, loss_fn=loss_of_next)
        return stage

    return load


def loss_of_next(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def scheduled(program: Program, stage: nn.Module, batch: Batch, backward: Backward, ended: Ended) -> None:
    """Forward and backward of all micro-batches, in the schedule's order."""
    tokens = batch["input_ids"]
    last = {"target": tokens} if program.rank == program.gpus - 1 else {}
    with program.casting():
        stage.schedule.step(*([tokens] if program.rank == 0 else []), **last)
    ended("backward")
