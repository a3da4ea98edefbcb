"""A step of a model whose layers lie on GPUs of their own, through which micro-batches go one after another (1F1B).

PyTorch's `torch.distributed.pipelining` on a card that it takes for a real one (`program`): `PipelineStage` and
`Schedule1F1B`, whose stages have equal parts of the layers, the first the embedding too, the last the norm and the
head. Each stage is split by FSDP2 over its GPUs, in mixed precision also where that is one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..cards import CATALOG, GPUSpec
from ..models.attention import kv_repeated
from ..models.build import build_model
from ..models.configs import load_config, running
from ..models.depth import from_shallow, kind_of_batch, text_config, with_depth
from ..program import pipeline, ranks
from ..program.context import cuda
from ..program.device import ProgramGPU
from ..remembered import remembered
from ..shards.fake_rank import Messages, refuse_other_groups
from ..shards.ledger import ConfigKey
from ..shards.stages import Part
from ..step.run import enable_checkpointing
from ..trace.edits import held_from, held_from_the_start
from ..trace.micro_batches import with_more_in_flight
from ..trace.trace import Trace
from ..units import MiB
from .on_cpu import Labels, split_parts


class StagedStep(NamedTuple):
    """What the fullest stage's GPUs need in a step, in bytes, and what those that send most send.

    stage: the fullest. needed: the least capacity in which the caching allocator gets through, to 1/128 of the peak.
    at_peak: category → bytes of the tensors' peak. sent: by FSDP2 to the GPUs of the stage; sent_to_next: hidden states
    and their gradients, to the stages on both sides.
    """

    stage: int
    needed: int
    at_peak: dict[str, int]
    sent: int
    sent_to_next: int


class _Way(NamedTuple):
    """All of a step but its micro-batches and length. model: of a stage's layers alone."""

    model: ConfigKey
    gpus: int
    stages: int
    zero: int
    spec: GPUSpec
    weights: torch.dtype
    half: torch.dtype
    checkpointing: bool
    repeat_kv: bool


def staged_step(
    model: str,
    gpus: int,
    stages: int,
    zero: int,
    spec: GPUSpec,
    *,
    weights: torch.dtype,
    half: torch.dtype,
    batch_size: int,
    sequence_length: int,
    micro_batches: int,
    checkpointing: bool = False,
    repeat_kv: bool = False,
    only: int | None = None,
) -> StagedStep:
    """A step of so many micro-batches on the fullest of the stages.

    That is the first, which holds most micro-batches, the second, in which more comes in, or the last, which has the
    logits: the others hold what the second does, of fewer micro-batches.

    zero: 3 gathers a layer's weights for each micro-batch anew, 2 keeps them. weights: the type of the shards and of
    what the optimizer keeps; half: in which they are gathered and computed with; gradients are added up and reduced in
    fp32. only: of that stage.
    """
    like = replace(CATALOG["T4"], compute_capability=spec.compute_capability)  # its size says nothing here
    way = _Way(_key(model, stages), gpus, stages, zero, like, weights, half, checkpointing, repeat_kv)
    which = sorted({0, 1, stages - 1}) if only is None else [only]
    found = [_at(way, stage, batch_size, sequence_length, micro_batches) for stage in which]
    fullest = max(found, key=lambda step: step.needed)
    most = max(found, key=lambda step: step.sent + step.sent_to_next)
    return fullest._replace(sent=most.sent, sent_to_next=most.sent_to_next)


def _at(way: _Way, stage: int, batch_size: int, sequence_length: int, micro_batches: int) -> StagedStep:
    in_flight = way.stages - stage
    few = min(micro_batches, 2 * in_flight + 3)  # until a turn releases what turns made, and one more that is like it
    trace, numbers = _trace(way, stage, batch_size, sequence_length, few)
    more = micro_batches - few
    longer = with_more_in_flight(trace, more)
    if longer is None:
        few, more = micro_batches, 0
        longer, numbers = _trace(way, stage, batch_size, sequence_length, few)
    # A micro-batch has its tokens there from the beginning, and where what comes in for it is put: `PipelineStage` has
    # a place for each one's hidden states and gradients (`args_recv_info`, `grad_recv_info`).
    tokens = batch_size * sequence_length
    hidden = tokens * text_config(way.model.config).hidden_size * way.half.itemsize
    neighbours = (stage > 0) + (stage < way.stages - 1)
    trace = held_from(longer, "forward", [tokens * torch.int64.itemsize] * more, "other")
    trace = held_from(trace, "forward", [hidden] * neighbours * more, "activations")
    trace = held_from_the_start(trace, _states(way, stage), "optimizer")
    at_peak = split_parts(trace.timeline().at_peak(), _held(way, stage)["parameters"])
    total = sum(at_peak.values())
    needed = trace.smallest_capacity(max(total // 128, 2 * MiB))
    at_peak["fragmentation"] = needed - total
    to_next = numbers["next"] * micro_batches // few
    return StagedStep(stage, needed, at_peak, numbers["sent"] + more * numbers["again"], to_next)


def states_of_stages(model: str, gpus: int, stages: int, weights: torch.dtype) -> dict[str, int]:
    """kind → bytes of parameters and optimizer state on each GPU of the stage that holds most.

    Gradients of several micro-batches are there whole, and split with the last one's: how many bytes at once, a run
    says.
    """
    key = _key(model, stages)
    way = _Way(key, gpus, stages, 3, CATALOG["T4"], weights, weights, False, False)
    return max((_held(way, stage) for stage in (0, stages - 1)), key=lambda held: sum(held.values()))


def _key(model: str, stages: int) -> ConfigKey:
    config = load_config(model)
    return ConfigKey.of(with_depth(config, text_config(config).num_hidden_layers // stages))


def _shapes(way: _Way, stage: int) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in _part(way.model.config, way, stage).parameters()]


def _held(way: _Way, stage: int) -> dict[str, int]:
    data = way.gpus // way.stages
    padded = sum(-(-rows // data) * math.prod(rest) for rows, *rest in _shapes(way, stage))
    return {"parameters": padded * way.weights.itemsize, "optimizer": sum(_states(way, stage))}


def _states(way: _Way, stage: int) -> list[int]:
    """Bytes of each tensor that AdamW keeps of the first of the stage's GPUs' shards."""
    data = way.gpus // way.stages
    owned = [-(-rows // data) * math.prod(rest) for rows, *rest in _shapes(way, stage)]
    return [n * way.weights.itemsize for n in owned for _ in ("exp_avg", "exp_avg_sq")]


@remembered
def _trace(
    way: _Way, stage: int, batch_size: int, sequence_length: int, micro_batches: int
) -> tuple[Trace, dict[str, int]]:
    def run(config: Any) -> tuple[Trace, dict[str, int]]:
        return _run(config, way, stage, batch_size, sequence_length, micro_batches)

    config = way.model.config
    like = "in_stages", way, stage, micro_batches, kind_of_batch(batch_size)
    return from_shallow(config, run, like, deeper=1, length=sequence_length) or run(config)


def _part(config: Any, way: _Way, stage: int) -> Part:
    model = build_model(config, way.weights)
    if way.checkpointing:
        enable_checkpointing(model)
    return Part(model, stage == 0, stage == way.stages - 1)


def _run(
    config: Any, way: _Way, stage: int, batch_size: int, sequence_length: int, micro_batches: int
) -> tuple[Trace, dict[str, int]]:
    """All micro-batches on the first of a stage's GPUs, and what it sends. RuntimeError where a group is open."""
    import transformers.modeling_utils  # noqa: F401  before there is a CUDA GPU: it looks for what it could use with one

    refuse_other_groups()
    data = way.gpus // way.stages
    repeated = kv_repeated() if way.repeat_kv else nullcontext()
    given = {"limited": False, "gpus": way.gpus, "rank": stage * data}
    with warnings.catch_warnings(), cuda(way.spec, **given) as gpu, repeated, running(config.model_type):
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        ranks.install(gpu.patches, gpu, gpu.watch)
        pipeline.install(gpu.patches, gpu.imports, _nobody)
        dist.init_process_group("cuda:nccl,cpu:gloo")
        mesh = init_device_mesh("cuda", (way.stages, data), mesh_dim_names=("stages", "data"))
        part = _part(config, way, stage)
        policy = MixedPrecisionPolicy(way.half, torch.float32, way.half)
        for group in (*part.groups(), part):
            fully_shard(group, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=way.zero == 3)
        part.to_empty(device="cuda").train()
        schedule = schedule_of(part, stage, way.stages, mesh["stages"].get_group(), batch_size, sequence_length,
                               micro_batches, way.half)  # fmt: skip
        ids = torch.zeros((batch_size * micro_batches, sequence_length), dtype=torch.int64).cuda()
        with Messages(Labels(gpu)) as messages:
            passed: list[int] = []  # bytes that were sent in the stage after each backward
            gpu.patches.set(pipelining.PipelineStage, "backward_one_chunk", _watched(part, gpu, messages, passed))
            targets = {"target": ids} if part.last else {}
            schedule.step(*([ids] if part.first else []), **targets, return_outputs=False)
        trace = gpu.watch.saved().trace
        del part, schedule, ids
    numbers = {"next": messages.nbytes["send"], "sent": _in_the_stage(messages), "again": passed[1] - passed[0]}
    return trace, numbers


def _in_the_stage(messages: Messages) -> int:
    return sum(nbytes for name, nbytes in messages.nbytes.items() if name not in ("send", "recv"))


def _watched(part: Part, gpu: ProgramGPU, messages: Messages, passed: list[int]) -> Callable[..., None]:
    """A stage's backward, after which gradients that wait for those of other micro-batches are known for what they are.

    Until the last one they are whole. passed: is told what was sent so far.
    """
    backward = pipelining.PipelineStage.backward_one_chunk

    def backward_one_chunk(stage: pipelining.PipelineStage, *which: Any, **how: Any) -> None:
        backward(stage, *which, **how)
        for module in part.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            parameters = group.fsdp_params if group else []
            whole = [g for p in parameters for g in (p.unsharded_accumulated_grad, p._unsharded_param.grad)]
            gpu.watch.claim([gradient for gradient in whole if gradient is not None], "gradients")
        passed.append(_in_the_stage(messages))

    return backward_one_chunk


def _nobody(rank: int, stage: int) -> tuple:
    raise NotImplementedError(f"stage {stage} is to know what it receives")  # it is told when it is made


def schedule_of(
    part: Part, stage: int, stages: int, group: Any, batch_size: int, length: int, micro_batches: int, half: torch.dtype
) -> pipelining.Schedule1F1B:
    """1F1B of a part, of micro-batches of that many texts."""
    config, device = part.model.config, torch.device("cuda", torch.cuda.current_device())
    tokens = torch.empty(batch_size, length, dtype=torch.int64, device="meta")
    hidden = torch.empty(batch_size, length, config.hidden_size, dtype=half, device="meta", requires_grad=True)
    logits = torch.empty(batch_size, length, config.vocab_size, dtype=half, device="meta", requires_grad=True)
    on_the_way = pipelining.PipelineStage(
        part, stage, stages, device, input_args=(tokens if part.first else hidden,),
        output_args=(logits if part.last else hidden,), group=group,
    )  # fmt: skip

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return part.model.loss_function(logits=logits, labels=ids, vocab_size=config.vocab_size)

    return pipelining.Schedule1F1B(on_the_way, micro_batches, loss_fn=loss)
