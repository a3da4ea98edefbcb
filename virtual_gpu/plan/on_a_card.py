"""A step whose optimizer is a library's own code (`step.own_code`): on a card that it takes for a real one.

All of the step is `step.run`'s, on the card of a program (`program`), where tensors are on CUDA: so torchao's step is
compiled, optimi's launches its Triton kernels, GrokAdamW's copies its states to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..cards import GPUSpec
from ..counting.record import VirtualRecord
from ..errors import NotSupported
from ..models.configs import cached_by_model, load_config, running
from ..real import CudaGPU
from ..step import predict, states
from ..step.optimizers import needs_cuda, states_of_optimizer
from ..step.predict import Need, Run, like_any
from ..step.setting import Setting
from ..trace.recorder import TimelineRecorder
from ..turns import in_turn, refuse_in_a_block

if TYPE_CHECKING:
    from ..program.device import ProgramGPU


def predict_need(setting: Setting, compute_capability: tuple[int, int], ddp: bool = False) -> Need:
    """What the experiment takes on any GPU with this compute capability, whatever its optimizer."""
    if not needs_cuda(setting.optimizer, setting.optim_args):
        return predict.predict_need(setting, compute_capability, ddp)
    return _need(setting, compute_capability, ddp)


def states_of(setting: Setting) -> dict[str, int]:
    """As `step.states.states_of`, whatever the optimizer."""
    if not needs_cuda(setting.optimizer, setting.optim_args):
        return states.states_of(setting)
    held = _need(replace(setting, batch_size=1, gradient_accumulation_steps=1, sequence_length=1), (8, 0), False).states
    return {**held}


@cached_by_model
def _need(setting: Setting, compute_capability: tuple[int, int], ddp: bool) -> Need:
    anything = like_any(compute_capability)
    config = load_config(setting.model_id)
    setting.check_length(config)
    run = predict.predicted_run(setting, config, anything, run_on_a_card, "on a card")
    tokens = setting.rows * setting.sequence_length
    held = {name: getattr(run, name) for name in ("parameters", "gradients", "optimizer")}
    sent = run.offloaded.nbytes(tokens) * setting.gradient_accumulation_steps
    return predict.of_trace(Need(0, 0, held, {}, sent, run.offloaded.pinned(tokens), run.paged), run.trace, ddp=ddp)


@in_turn
def run_on_a_card(setting: Setting, config: Any, spec: GPUSpec, later: int | None = None) -> Run:
    """`virtual_run` where a program finds CUDA. NotSupported where what has to be compiled is not."""
    import transformers.modeling_utils  # noqa: F401  before there is a CUDA GPU: it looks for what it could use with one
    from transformers import Trainer  # noqa: F401

    from ..program.context import cuda  # brings all of a program's card

    refuse_in_a_block()
    with cuda(spec, limited=False) as gpu, running(setting.model_id):
        found = predict.run_on(ProgramCard(gpu), setting, config, later)
        if eager := [note for note in gpu.watch.notes if note.startswith("torch.compile")]:
            raise NotSupported(f"optimizer={setting.optimizer!r}: {eager[0]}")
    return found


class ProgramCard(CudaGPU):
    """A program's card, as a step takes a GPU: a real one, but that models have no values and all is recorded."""

    def __init__(self, gpu: ProgramGPU):
        super().__init__()
        self.gpu, self.device, self.answers = gpu, torch.device("meta"), gpu.answers  # built there, and then placed

    def memory_allocated(self) -> int:
        """Bytes held by tensors (and library workspaces) now."""
        return torch.cuda.memory_allocated()

    def place(self, thing: Any) -> Any:
        """Put a module (in place), a tensor or a mapping of tensors on the card."""
        if isinstance(thing, Mapping):
            return {name: self.place(value) for name, value in thing.items()}
        if isinstance(thing, torch.nn.Module):
            self.gpu.label(thing.cuda().parameters(), "parameters")
            return thing
        return thing.cuda() if isinstance(thing, torch.Tensor) else thing

    @contextmanager
    def record(self, model: torch.nn.Module, optimizer: Any) -> Iterator[VirtualRecord]:
        """As `VirtualGPU.record`."""
        record, meter = _Record(self.gpu, model, optimizer), self.gpu.meter
        before, meter.recorder = meter.recorder, record.recorder
        try:
            yield record
        finally:
            record.label_training()
            meter.recorder = before


class _Record(VirtualRecord):
    """beside: the recorders of the process's other cards."""

    def __init__(self, *of: Any):
        super().__init__(*of)
        self.beside: list[TimelineRecorder] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase: the program's modes are on already."""
        recorders = self.recorder, *self.beside
        for recorder in recorders:
            recorder.enter(name)
        try:
            yield
        finally:
            self.label_training()
            for recorder in recorders:
                recorder.leave()

    def label_training(self) -> None:
        self.gpu.label((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
        self.gpu.label(states_of_optimizer(self.optimizer), "optimizer")
