"""Levers on what several cards share: DDP, ZeRO, FSDP2, tensors split between them, a text split between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.shards.adapters import Adapters
from virtual_gpu.shards.fake_rank import blocks_of, fsdp_groups, split_tensors
from virtual_gpu.shards.ledger import dealt_elements, local_shapes
from virtual_gpu.shards.sequence import plan_of_tokens

from .program import Backward, Batch, Ended, Program, once, shape, trained

PASSES = 4  # of a batch whose gradients are added up


def config_of(program: Program) -> Any:
    config = load_config(program.model_id)
    return config if program.layers is None else with_depth(config, program.layers)


def on_meta(program: Program) -> nn.Module:
    """The model without memory, until each card makes its own part."""
    return build_model(config_of(program), program.weights, program.attention)


def with_adapters(method: str, rank: int) -> Callable[[Program], nn.Module]:
    """The instrument's own LoRA and QLoRA for FSDP2, on meta; 4-bit weights lie in 16-bit numbers."""

    def load(program: Program) -> nn.Module:
        adapters = Adapters(method, rank, "all-linear", program.weights)
        return adapters.build(config_of(program), VIRTUAL)

    return load


class VIRTUAL:
    """All that the adapters ask of the card."""

    is_virtual = True


# -- what each card holds --------------------------------------------------------------------------------------------


def ddp(**settings: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: nn.parallel.DistributedDataParallel(model, **settings)


def fullest(program: Program) -> int:
    """The card to which ZeRO-1 deals most elements of whole tensors."""
    dealt = dealt_elements(local_shapes(program.model_id), program.gpus)
    return max(range(program.gpus), key=dealt.__getitem__)


def zero_1(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(trained(model), torch.optim.AdamW, lr=1e-5, fused=True)


def halves(half: torch.dtype) -> MixedPrecisionPolicy:
    """What accelerate sets: gathered, computed and reduced in 16 bits."""
    return MixedPrecisionPolicy(half, half, half)


def fsdp2(
    policy: MixedPrecisionPolicy | None,
    *,
    grid: tuple[int, ...] = (),
    on_cpu: bool = False,
    keep: bool = False,
    only_blocks: bool = False,
) -> Callable[[nn.Module], nn.Module]:
    """Each block a group, and embedding, and norm with head, as the instrument's ranks have it.

    grid: groups of cards, and cards in a group that shares a copy. keep: what forward has gathered stays for backward.
    only_blocks: embedding, norm and head fall to the model itself, which stays gathered.
    """

    def split(model: nn.Module) -> nn.Module:
        settings: dict[str, Any] = {"reshard_after_forward": not keep}
        if policy is not None:
            settings["mp_policy"] = policy
        if grid:
            settings["mesh"] = init_device_mesh("cuda", grid, mesh_dim_names=("copies", "parts"))
        if on_cpu:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        shard(model, only_blocks, **settings)
        return model.to_empty(device="cpu" if on_cpu else "cuda")

    return split


def shard(model: nn.Module, only_blocks: bool = False, **settings: Any) -> None:
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    groups = blocks_of(inside) if only_blocks else fsdp_groups(inside)
    for group in (*groups, model):
        fully_shard(group, **settings)


def by_transformers(**sizes: int) -> Callable[[Program], nn.Module]:
    """transformers' own FSDP2, tensor and expert parallelism, each rank loading its part; computed in bf16.

    A router's experts are taken in turn (`virtual_gpu.program.routing`): each rank's have equally many tokens.
    """

    def load(program: Program) -> nn.Module:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(**sizes, fsdp_mixed_precision=True)
        return AutoModelForCausalLM.from_pretrained(
            program.model_id, dtype=program.weights, distributed_config=config, **shape(program)
        )

    return load


# -- layers that several cards compute together ----------------------------------------------------------------------


def tensors(model: nn.Module) -> nn.Module:
    """transformers' own plan for the blocks; embedding and head by columns."""
    split_tensors(model, model.config, init_device_mesh("cuda", (dist.get_world_size(),)))
    return model.to_empty(device="cuda")


def tensors_and_fsdp2(policy: MixedPrecisionPolicy, together: int) -> Callable[[nn.Module], nn.Module]:
    """`together` cards compute a layer; FSDP2 over the groups of them."""

    def split(model: nn.Module) -> nn.Module:
        grid = (dist.get_world_size() // together, together)
        mesh = init_device_mesh("cuda", grid, mesh_dim_names=("data", "tensor"))
        split_tensors(model, model.config, mesh["tensor"])
        shard(model, mesh=mesh["data"], mp_policy=policy)
        return model.to_empty(device="cuda")

    return split


def tokens_too(logits_whole: bool) -> Callable[[nn.Module], nn.Module]:
    """Tensors split by the plan above, between all cards."""

    def split(model: nn.Module) -> nn.Module:
        plan = plan_of_tokens(logits_whole)
        parallelize_module(model, init_device_mesh("cuda", (dist.get_world_size(),)), plan)
        return model.to_empty(device="cuda")

    return split


def adamw_of_each(model: nn.Module) -> Any:
    """Whole parameters and those of each mesh in groups of their own: a fused step does not take them together."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in trained(model):
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=1e-5, fused=True)


# -- one text on several cards ---------------------------------------------------------------------------------------


def next_tokens(program: Program) -> Batch:
    """Targets are shifted before the text is cut: the last token of a part has its next one on another card."""
    tokens = torch.ones(program.batch, program.length, dtype=torch.int64)
    return {"input_ids": tokens, "shift_labels": tokens.clone(), "position_ids": torch.arange(program.length)[None]}


def without_masks(model: nn.Module) -> None:
    """accelerate's hooks: attention is causal by itself, a mask would be of the whole text."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model.gradient_checkpointing_enable({"use_reentrant": False})
    _attach_context_parallel_hooks(model)


def loss_of_part(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch, labels=batch["shift_labels"], use_cache=False).loss


def text_in_parts(program: Program, model: nn.Module, batch: Batch, backward: Backward, ended: Ended) -> torch.Tensor:
    """PyTorch's context parallelism: ring attention over all cards."""
    mesh, buffers = init_device_mesh("cuda", (dist.get_world_size(),)), [*batch.values()]
    split = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers))
    with split, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return once(program, model, batch, backward, ended)


# -- several passes before a step ------------------------------------------------------------------------------------


def accumulated(waits: Callable[[nn.Module, bool], contextlib.AbstractContextManager] | None = None) -> Any:
    """Gradients of four batches are added up; waits: sent by the last of them alone."""

    def passes(program: Program, model: nn.Module, batch: Batch, backward: Backward, ended: Ended) -> torch.Tensor:
        for number in range(PASSES):
            with contextlib.nullcontext() if waits is None else waits(model, number < PASSES - 1):
                loss = once(program, model, batch, backward, ended)
        return loss

    return passes


def ddp_waits(model: nn.Module, more: bool) -> contextlib.AbstractContextManager:
    return model.no_sync() if more else contextlib.nullcontext()


def fsdp2_waits(model: nn.Module, more: bool) -> contextlib.AbstractContextManager:
    model.set_requires_gradient_sync(not more)
    return contextlib.nullcontext()
