"""Bytes of parameters, gradients and optimizer state of a setting, without a run."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch

from ..cards import CATALOG
from ..counting.gpu import VirtualGPU
from ..models.build import build_on_gpu
from ..models.configs import cached_by_model, checkpoint_dtype, load_config
from ..models.depth import linear_in_depth
from ..real import storage_bytes
from ..turns import in_turn
from .optimizers import estimate_memory_of_optimizer, make_optimizer
from .predict import model_bytes
from .setting import Setting


@cached_by_model
def states_of(setting: Setting) -> dict[str, int]:
    """kind → bytes of "parameters", "gradients" and "optimizer", whatever batch, length and GPU.

    The optimizer's state of a tensor follows from its shape: it is made for each shape that the model has, for one and
    for two of them, so that what they share counts once.
    """
    config = load_config(setting.model_id)
    dtype, _ = setting.dtypes
    dtype = checkpoint_dtype(setting.model_id, config) if dtype == "auto" else dtype
    return dict(linear_in_depth(config, lambda config: _states(setting, config, dtype)))


@in_turn
def _states(setting: Setting, config: Any, dtype: torch.dtype) -> dict[str, int]:
    gpu = VirtualGPU(CATALOG["A100-80GB"], limited=False)
    model = build_on_gpu(config, dtype, setting.attention, setting.peft, gpu, **setting.adapters)
    if setting.peft == "qlora":
        _cast_biases(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shapes = Counter((tuple(parameter.shape), parameter.dtype) for parameter in trained)
    one, two = ({shape: _state(*shape, copies, setting.optimizer) for shape in shapes} for copies in (1, 2))
    own = sum(count * (two[shape] - one[shape]) for shape, count in shapes.items())
    shared = max(2 * one[shape] - two[shape] for shape in shapes)  # bitsandbytes' code tables
    return {"parameters": model_bytes(model), "gradients": storage_bytes(trained), "optimizer": own + shared}


def _cast_biases(model: torch.nn.Module) -> None:
    """Hold the biases of 4-bit layers as they are held from the first product on."""
    from ..models.four_bit import VirtualLinear4bit
    from ..rules.bitsandbytes import compute_bias

    for layer in model.modules():
        if isinstance(layer, VirtualLinear4bit):
            compute_bias(layer, layer.compute_dtype)


@functools.lru_cache(maxsize=4096)
def _state(shape: tuple[int, ...], dtype: torch.dtype, copies: int, optimizer: str) -> int:
    """Bytes that the optimizer keeps for so many parameters of a shape, after one step on them."""
    gpu = VirtualGPU(CATALOG["A100-80GB"], limited=False)
    holder = torch.nn.Module()
    for i in range(copies):
        setattr(holder, f"weight_{i}", torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    gpu.place(holder)
    made = make_optimizer(optimizer, holder, gpu=gpu)
    for parameter in holder.parameters():
        parameter.grad = torch.empty_like(parameter)
    with gpu.record(holder, made) as record, record.phase("step"):
        made.step()
    return estimate_memory_of_optimizer(made)
