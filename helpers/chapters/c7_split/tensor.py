"""What a rank runs (chapter 7) where every layer is split: tensor parallelism."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.shards.collectives import Collectives
from virtual_gpu.shards.layout import Layout
from virtual_gpu.units import choose

from ...ranks.launcher import rank_device
from ...ranks.training import next_token_loss, tiny_batch, tiny_model, tiny_neox, weigh


@dataclass
class TensorRun:
    """One rank's slice of a model. forward, backward: calls by collective.

    difference: the largest between this loss and these gradients and those of the whole model. shapes: of this rank's
    weights in the first block (or the MLP). held: bytes of its parameters; kept: of what it keeps for the backward.
    """

    forward: Counter
    backward: Counter
    loss: float
    difference: float
    shapes: dict[str, tuple[int, ...]]
    held: int
    kept: int


def tensor_parallel_mlp(sequence_parallel: bool = False, width: int = 8, length: int = 16) -> TensorRun:
    """Norm and MLP: the first matrix split by columns, the second by rows; between them and outside, all tokens.

    sequence_parallel: outside of the two matrices each rank has its own part of the tokens.
    """

    def mlp() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        norm = torch.nn.LayerNorm(width)
        return torch.nn.Sequential(OrderedDict(norm=norm, up=up, gelu=torch.nn.GELU(), down=down)).double()

    x = torch.randn(1, length, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss_of(out: torch.Tensor) -> torch.Tensor:
        return (out.full_tensor() if isinstance(out, DTensor) else out).square().mean()

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence_parallel:
        tokens = Shard(1)
        plan = {
            "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(tokens,)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=tokens),
            "down": RowwiseParallel(output_layouts=tokens, use_local_output=False),
        }
    return _split_and_compare(mlp, lambda model: [(model, plan)], lambda model: model(x.to(rank_device())), loss_of)


def tensor_parallel() -> TensorRun:
    """The tiny GPT-NeoX of transformers, every block split between the ranks."""
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


LLAMA_LAYERS = 2
HOMES = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn") | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), "mlp"
)
STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


def known_plan(plan: dict[str, str]) -> dict[str, str]:
    """`plan` with names as they are written in a Llama block; UnknownName for a matrix or a direction there is not."""
    matrix, direction = tr(ko="행렬", en="matrix"), tr(ko="방향", en="direction")
    return {choose(name, HOMES, matrix): choose(how, STYLES, direction) for name, how in plan.items()}


def tensor_parallel_llama(plan: dict[str, str]) -> TensorRun:
    """A tiny Llama of transformers, its blocks' matrices split as `plan` says: "columns" or "rows" by name."""
    config = with_depth(load_config("meta-llama/Llama-3.2-1B"), LLAMA_LAYERS)
    config.hidden_size, config.intermediate_size, config.vocab_size = 64, 128, 1000
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    by_path = {f"{HOMES[name]}.{name}": STYLES[how]() for name, how in known_plan(plan).items()}

    def build() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_model(config, torch.float64, device="cpu").train()

    tokens = tiny_batch().to(rank_device())
    return _split_and_compare(
        build,
        lambda model: [(block, by_path) for block in model.base_model.layers],
        lambda model: next_token_loss(model, tokens),
    )


def _split_and_compare(
    build: Callable, splits: Callable, forward_of: Callable, loss_of: Callable = lambda loss: loss
) -> TensorRun:
    device = rank_device()
    whole, model = build().to(device), build().to(device)
    expected = loss_of(forward_of(whole))
    expected.backward()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module, plan in splits(model):
        parallelize_module(module, mesh, plan)
    kept: list[torch.Tensor] = []
    with Collectives() as forward, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = forward_of(model)
    loss = loss_of(out)
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
    held, whole_kept = weigh(model.parameters()), weigh([*model.parameters(), *kept])
    return TensorRun(
        forward.calls, backward.calls, float(loss.detach()), max(differences), shapes, held, whole_kept - held
    )
