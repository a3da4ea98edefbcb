"""A step of a mixture of experts whose experts lie on GPUs of their own, to which their tokens travel.

transformers' own expert parallelism (`DistributedConfig`) on a card that it takes for a real one (`program`): the
experts of each layer lie whole on the GPUs of a group, or are split by FSDP2 over those that have the same ones, and
FSDP2 splits the rest over all GPUs. A router's experts are taken in turn (`program.routing`), so that each has equally
many tokens; on a card some have more, and its activations grow with them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..cards import CATALOG, GPUSpec
from ..models.attention import kv_repeated
from ..models.build import build_model
from ..models.configs import load_config, running
from ..models.depth import from_shallow, kind_of_batch
from ..program import ranks
from ..program.context import cuda
from ..remembered import remembered
from ..shards.experts import dispatched
from ..shards.fake_rank import Messages, refuse_other_groups
from ..shards.ledger import ConfigKey
from ..step.run import enable_checkpointing
from ..trace.edits import accumulating as accumulating_trace
from ..trace.edits import held_from_the_start
from ..trace.trace import Trace
from ..units import MiB
from .on_cpu import Labels, split_parts


class ExpertsStep(NamedTuple):
    """What one of N GPUs needs in a micro-batch, and what it sends, in bytes.

    needed: the least capacity in which the caching allocator gets through, to 1/128 of the peak. at_peak: category →
    bytes of the tensors' peak. sent: what FSDP2's collectives work on over all GPUs, sent_experts over those that have
    the same experts. sent_tokens: hidden states and their gradients, to the experts and back.
    """

    needed: int
    at_peak: dict[str, int]
    sent: int
    sent_experts: int
    sent_tokens: int


class _Way(NamedTuple):
    """All of a step but its micro-batch and length."""

    model: ConfigKey
    gpus: int
    experts: int
    spec: GPUSpec
    weights: torch.dtype
    mixed: bool
    checkpointing: bool
    repeat_kv: bool


def experts_step(
    model: str,
    gpus: int,
    experts: int,
    spec: GPUSpec,
    *,
    weights: torch.dtype,
    mixed: bool,
    batch_size: int,
    sequence_length: int,
    accumulating: bool = False,
    checkpointing: bool = False,
    repeat_kv: bool = False,
) -> ExpertsStep:
    """A micro-batch on the first of `gpus` cards, of which groups of `experts` have all experts between them.

    weights: the type of the shards and of what AdamW keeps. mixed: bf16 is gathered and computed with, and gradients
    are reduced in fp32 (transformers' fsdp_mixed_precision). accumulating: those of earlier micro-batches are there.
    Run at a few layers where a deeper model is found to do the same (`models.depth`), in full otherwise.
    """
    config = load_config(model)
    like = replace(CATALOG["T4"], compute_capability=spec.compute_capability)  # its size says nothing here
    way = _Way(ConfigKey.of(config), gpus, experts, like, weights, mixed, checkpointing, repeat_kv)
    trace, numbers = _trace(way, batch_size, sequence_length)
    if accumulating:
        trace = accumulating_trace(trace)
    trained, frozen = _shards(way.model, gpus, experts, weights)
    states = [nbytes for nbytes in trained for _ in ("exp_avg", "exp_avg_sq")]
    trace = held_from_the_start(trace, states, "optimizer")
    at_peak = split_parts(trace.timeline().at_peak(), sum(trained + frozen))
    total = sum(at_peak.values())
    needed = trace.smallest_capacity(max(total // 128, 2 * MiB))
    at_peak["fragmentation"] = needed - total
    of_experts = numbers.get(gpus // experts, 0) if experts > 1 else 0
    return ExpertsStep(needed, at_peak, numbers.get(gpus, 0), of_experts, numbers["tokens"])


def states_of_experts(model: str, gpus: int, experts: int, weights: torch.dtype) -> dict[str, int]:
    """kind → bytes of parameters, gradients and optimizer state on each GPU."""
    trained, frozen = map(sum, _shards(ConfigKey.of(load_config(model)), gpus, experts, weights))
    return {"parameters": trained + frozen, "gradients": trained, "optimizer": 2 * trained}


@remembered
def _shards(key: ConfigKey, gpus: int, experts: int, weights: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of what the first GPU holds of each parameter that is trained, and of each that is not.

    A dense parameter's rows are split over all GPUs; an expert parameter's experts over the group, then over those that
    share them.
    """
    with running(key.config.model_type):
        model = build_model(key.config, weights)
    own = {id(p) for module in dispatched(model) for p in module.parameters()}
    found: dict[bool, list[int]] = {True: [], False: []}
    for parameter in model.parameters():
        among = experts if id(parameter) in own else 1
        rows = -(-(parameter.shape[0] // among) // (gpus // among))
        found[parameter.requires_grad].append(rows * parameter[0].numel() * parameter.itemsize)
    return tuple(found[True]), tuple(found[False])


@remembered
def _trace(way: _Way, batch_size: int, sequence_length: int) -> tuple[Trace, dict[str, int]]:
    def run(config: Any) -> tuple[Trace, dict[str, int]]:
        return _run(config, way, batch_size, sequence_length)

    config = way.model.config
    like = "in_experts", way, kind_of_batch(batch_size)
    return from_shallow(config, run, like, deeper=1, length=sequence_length) or run(config)


def _run(config: Any, way: _Way, batch_size: int, sequence_length: int) -> tuple[Trace, dict[str, int]]:
    """Forward and backward of the first rank, and what it sends. RuntimeError where a process group is open."""
    import transformers.modeling_utils  # noqa: F401  before there is a CUDA GPU: it looks for what it could use with one
    from transformers import initialization
    from transformers.distributed import DistributedConfig

    refuse_other_groups()
    repeated = kv_repeated() if way.repeat_kv else nullcontext()
    with warnings.catch_warnings(), cuda(way.spec, limited=False, gpus=way.gpus) as gpu, repeated:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        ranks.install(gpu.patches, gpu, gpu.watch)
        dist.init_process_group("cuda:nccl,cpu:gloo")
        # What `from_pretrained` does with a `distributed_config` before it reads the weights; it ties them after that.
        with initialization.no_tie_weights():
            model = build_model(config, way.weights)
        shared = DistributedConfig(fsdp_size=way.gpus, ep_size=way.experts, fsdp_mixed_precision=way.mixed)
        shared, _, mesh = model.prepare_distribute_model(shared)
        model = model.maybe_distribute_model(model, shared, mesh).to_empty(device="cuda")
        model.tie_weights()
        if way.checkpointing:
            enable_checkpointing(model)
        model.train()
        ids = torch.zeros((batch_size, sequence_length), dtype=torch.int64).cuda()
        with running(config.model_type), _ByGroup(Labels(gpu)) as messages:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gpu.watch.claim([gradient.to_local() for gradient in gradients], "gradients")
        trace = gpu.watch.saved().trace
        del model, ids, gradients
    return trace, {**messages.of_group, "tokens": messages.functional_nbytes["all_to_all_single"]}


class _ByGroup(Messages):
    """Tells apart what is gathered and reduced by how many ranks do it: bytes, by their number."""

    def __init__(self, gpu: Labels):
        super().__init__(gpu)
        self.of_group: Counter[int] = Counter()

    def count(self, func: Any, args: Any) -> None:
        super().count(func, args)
        if func in (torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default):
            small, large = sorted(tensor.nbytes for tensor in args[:2])
            self.of_group[large // small] += large
