"""What happens on a virtual GPU during training, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..trace.recorder import TimelineRecorder
from ..trace.timeline import Timeline
from .details import DetailRecorder

if TYPE_CHECKING:
    from .gpu import VirtualGPU


class VirtualRecord:
    """What happens on a virtual GPU during training, phase by phase."""

    def __init__(self, gpu: VirtualGPU, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.gpu, self.model, self.optimizer = gpu, model, optimizer
        self.recorder = (
            DetailRecorder(gpu, model, optimizer) if gpu.detailed else TimelineRecorder(gpu.meter.live_blocks())
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase: "forward", "backward" or "step"."""
        self.recorder.enter(name)
        # Tensors that forward and backward create are created next to their inputs, on the GPU. PyTorch's optimizers
        # keep their step counters on the CPU; the fused ones, bitsandbytes' and transformers' keep all on the GPU.
        theirs = type(self.optimizer).__module__.split(".")[0] in ("bitsandbytes", "transformers")
        beside = theirs or self.optimizer.defaults.get("fused")
        on_gpu = name != "step" or beside
        self.gpu.in_step = name == "step"
        try:
            with self.gpu if on_gpu else nullcontext():
                yield
        finally:
            self.gpu.in_step = False
            self.label_training()
            self.recorder.leave()

    def label_training(self) -> None:
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        self.gpu.label(gradients, "gradients")
        states = (v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
        self.gpu.label((v for v in states if self.gpu.owns(v)), "optimizer")

    def timeline(self) -> Timeline:
        """The bytes held at every operation of every phase so far."""
        return self.recorder.timeline()
