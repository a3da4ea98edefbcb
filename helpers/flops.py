"""Floating-point operations of a training step, counted by PyTorch on a virtual GPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .experiment import Setting
from .gpu_catalog import CATALOG
from .models import build_model, load_config
from .training import set_checkpointing
from .virtual_gpu import VirtualGPU


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products (attention among them) of one forward and one backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __repr__(self) -> str:
        return f"Flops(forward={self.forward / 1e12:.3f} T, backward={self.backward / 1e12:.3f} T)"


def count_flops(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Flops:
    """The FLOPs of `model(**inputs).loss` and its backward, counted by PyTorch's FlopCounterMode on a virtual GPU."""
    gpu = VirtualGPU(CATALOG["A100-80GB"], limited=False)
    model, inputs = gpu.place(model), gpu.place(inputs)
    with FlopCounterMode(display=False) as counter, gpu:
        loss = model(**inputs).loss
        forward = counter.get_total_flops()
        loss.backward()
    return Flops(forward, counter.get_total_flops() - forward)


def training_flops(setting: Setting | None = None, **settings: Any) -> Flops:
    """The FLOPs of one micro-batch of the experiment's setting. They are linear in depth: run at 2 and 3 layers.

    Where a model's layers are of several kinds, all of them are run.
    """
    setting = setting or Setting(**settings)
    return _training_flops(
        setting.model_id, setting.batch_size, setting.sequence_length, setting.gradient_checkpointing
    )


@lru_cache(maxsize=512)
def _training_flops(model_id: str, batch_size: int, sequence_length: int, checkpointing: bool) -> Flops:
    config = load_config(model_id)
    depth = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["layer"]
    if len(set(kinds)) > 1 or depth <= 3:
        return flops_of_config(config, batch_size, sequence_length, checkpointing)
    runs = []
    for layers in (2, 3):
        shallow = copy.deepcopy(config)
        shallow.num_hidden_layers = layers
        if getattr(shallow, "layer_types", None):
            shallow.layer_types = shallow.layer_types[:layers]
        runs.append(flops_of_config(shallow, batch_size, sequence_length, checkpointing))
    two, three = runs
    more = depth - 2
    return Flops(
        two.forward + more * (three.forward - two.forward), two.backward + more * (three.backward - two.backward)
    )


def flops_of_config(config: Any, batch_size: int, sequence_length: int, checkpointing: bool) -> Flops:
    """The FLOPs of one micro-batch with every layer run, under whatever `set_checkpoint_early_stop` says."""
    model = set_checkpointing(build_model(config, torch.float16).train(), checkpointing)
    model.config.use_cache = False
    ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    return count_flops(model, {"input_ids": ids, "labels": ids})
