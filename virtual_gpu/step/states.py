"""Bytes of parameters, gradients and optimizer state of a setting, without a run."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn

from ..cards import CATALOG
from ..counting.gpu import VirtualGPU
from ..models.build import build_on_gpu
from ..models.configs import cached_by_model, checkpoint_dtype, load_config
from ..models.depth import linear_in_depth
from ..real import storage_bytes
from ..turns import in_turn
from .optimizers import estimate_memory_of_optimizer, make_optimizer
from .predict import model_bytes, reference_on
from .setting import Setting


@cached_by_model
def states_of(setting: Setting) -> dict[str, int]:
    """kind → bytes of "parameters" (DPO's reference with them), "gradients" and "optimizer", whatever batch and GPU.

    The optimizer's state of a tensor follows from its shape, and from whether it is an embedding: it is made for each
    kind that the model has, for one and for two of them, so that what they share counts once.
    """
    config = load_config(setting.model_id)
    dtype, _ = setting.dtypes
    dtype = checkpoint_dtype(setting.model_id, config) if dtype == "auto" else dtype
    return dict(linear_in_depth(config, lambda config: _states(setting, config, dtype), setting.module_names))


@in_turn
def _states(setting: Setting, config: Any, dtype: torch.dtype) -> dict[str, int]:
    gpu = VirtualGPU(CATALOG["A100-80GB"], limited=False)
    model = build_on_gpu(config, dtype, setting.attention, setting.peft, gpu, **setting.adapters)
    if setting.peft == "qlora":
        _cast_biases(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    apart = [module for module in model.modules() if setting.fp32_embedding_state and isinstance(module, nn.Embedding)]
    embeddings = {id(module.weight) for module in apart}
    kinds = Counter((tuple(p.shape), p.dtype, id(p) in embeddings) for p in trained)
    one, two = ({kind: _state(*kind, copies, setting.optimizer) for kind in kinds} for copies in (1, 2))
    own = sum(count * (two[kind] - one[kind]) for kind, count in kinds.items())
    shared = max(2 * one[kind] - two[kind] for kind in kinds)  # bitsandbytes' code tables
    reference = reference_on(gpu, setting, config, dtype)
    parameters = model_bytes(model) + (model_bytes(reference) if reference else 0)
    return {"parameters": parameters, "gradients": storage_bytes(trained), "optimizer": own + shared}


def _cast_biases(model: nn.Module) -> None:
    """Hold the biases of 4-bit layers as they are held from the first product on.

    Those of int8 layers stay as they were loaded: of which type their input is, only a step shows.
    """
    from ..models.quantized import VirtualLinear4bit
    from ..rules.bitsandbytes import compute_bias

    for layer in model.modules():
        if isinstance(layer, VirtualLinear4bit):
            compute_bias(layer, layer.compute_dtype)


@functools.lru_cache(maxsize=4096)
def _state(shape: tuple[int, ...], dtype: torch.dtype, embedding: bool, copies: int, optimizer: str) -> int:
    """Bytes that the optimizer keeps for so many parameters of a shape, after one step on them.

    embedding: of embeddings whose state stays in fp32.
    """
    gpu = VirtualGPU(CATALOG["A100-80GB"], limited=False)
    kind = (lambda: nn.Embedding(*shape, device="meta")) if embedding else nn.Module
    holder = nn.ModuleList(kind() for _ in range(copies))
    for module in holder:
        module.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    gpu.place(holder)
    made = make_optimizer(optimizer, holder, gpu=gpu, fp32_embedding_state=embedding)
    for parameter in holder.parameters():
        parameter.grad = torch.empty_like(parameter)
    with gpu.record(holder, made) as record, record.phase("step"):
        made.step()
    return estimate_memory_of_optimizer(made)
