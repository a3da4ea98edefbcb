"""A step whose parameters, gradients and optimizer state wait in the CPU's RAM: FSDP2's own `CPUOffloadPolicy`.

The shards are copied to the card for each gathering and their gradients back, and the optimizer steps on the CPU. All
of it is PyTorch's own code on a card that it takes for a real one (`program`), since what lies on which device is what
matters here. Split in the groups that accelerate makes, as the files of a plan do it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from ..cards import CATALOG, GPUSpec
from ..models.attention import kv_repeated
from ..models.build import build_model
from ..models.configs import load_config, running
from ..models.depth import from_shallow, kind_of_batch
from ..models.fused_head import fused_head
from ..models.offloaded import Moved, offloading, pinned_bytes
from ..program import ranks
from ..program.context import cuda
from ..program.device import ProgramGPU
from ..program.traffic import Traffic
from ..remembered import remembered
from ..shards.fake_rank import Messages, refuse_other_groups, split_by_fsdp2
from ..shards.layout import Layout
from ..shards.ledger import ConfigKey, elements_sent, owned_elements
from ..step.run import enable_checkpointing
from ..trace.trace import Trace
from ..units import MiB


@dataclass(frozen=True)
class StepOnCPU:
    """What one of N cards needs in a micro-batch, in bytes, and what passes between it and the RAM.

    needed: the least capacity in which the caching allocator gets through, to 1/128 of the peak. at_peak: category →
    bytes of the tensors' peak. sent: what this rank's collectives work on. to_card, to_cpu: copies of shards and of
    their gradients. offloaded, pinned: checkpoints on the CPU, and what they take of pinned RAM.
    """

    needed: int
    at_peak: dict[str, int]
    sent: int
    to_card: int
    to_cpu: int
    offloaded: int
    pinned: int


class _Way(NamedTuple):
    """All of a step but its micro-batch and length. weights: the shards' type; half: what is gathered and computed."""

    model: ConfigKey
    gpus: int
    spec: GPUSpec
    weights: torch.dtype
    half: torch.dtype
    checkpointing: bool
    offload: bool
    fused_lm_head: bool
    repeat_kv: bool


def step_on_cpu(
    model: str,
    gpus: int,
    spec: GPUSpec,
    *,
    weights: torch.dtype,
    half: torch.dtype,
    batch_size: int,
    sequence_length: int,
    checkpointing: bool = False,
    offload_checkpoints: bool = False,
    fused_lm_head: bool = False,
    repeat_kv: bool = False,
) -> StepOnCPU:
    """The first micro-batch on the first of `gpus` cards; those after it find its cache, and a workspace of cuBLAS's.

    weights: the type of the shards and of what the optimizer keeps. half: in which they are gathered, computed with
    and reduced. Run at a few layers where a deeper model is found to do the same (`models.depth`), in full otherwise.
    """
    config = load_config(model)
    like = replace(CATALOG["T4"], compute_capability=spec.compute_capability)  # its size says nothing here
    way = _Way(
        ConfigKey.of(config), gpus, like, weights, half, checkpointing, offload_checkpoints, fused_lm_head, repeat_kv
    )
    trace, copied = _trace(way, batch_size, sequence_length)
    at_peak, tokens = split_parts(trace.timeline().at_peak(), 0), batch_size * sequence_length
    total = sum(at_peak.values())
    needed = trace.smallest_capacity(max(total // 128, 2 * MiB))
    moved = Moved({size: times for size, times in copied.items() if isinstance(size, Fraction)})
    sent = sum(elements_sent(model, Layout(gpus, 3, as_accelerate=True)).values()) * half.itemsize
    return StepOnCPU(
        needed, at_peak | {"fragmentation": needed - total}, sent, copied["to_card"], copied["to_cpu"],
        moved.nbytes(tokens), moved.pinned(tokens),
    )  # fmt: skip


def split_parts(live: Mapping[str, int], shards: int) -> dict[str, int]:
    """A trace's bytes by category, where so many of the parameters' are the own shards and the others gathered."""
    rest = {kind: live[kind] for kind in ("gradients", "optimizer", "activations", "other")}
    return {"parameters": shards, "gathered": live["parameters"] - shards} | rest


class InRAM(NamedTuple):
    """Bytes of RAM that the first rank takes. loading: at most, as long as the whole model is there too."""

    loading: int
    training: int


def states_in_ram(model: str, gpus: int, weights: torch.dtype, accumulating: bool) -> InRAM:
    """What parameters, gradients and AdamW's states take of the RAM.

    Parameters and gradients are pinned, which PyTorch rounds up (`models.offloaded.pinned_bytes`); the states are not,
    nor is a gradient that is added to what is there already (`foreach_reduce` in FSDP2's _fsdp_collectives.py).
    """
    sizes = [n * weights.itemsize for n in owned_elements(model, Layout(gpus, 3))]
    pinned = sum(map(pinned_bytes, sizes))
    return InRAM(sum(sizes) + pinned, 2 * pinned + 2 * sum(sizes) + (max(sizes) if accumulating else 0))


@remembered
def _trace(way: _Way, batch_size: int, sequence_length: int) -> tuple[Trace, dict[Any, int]]:
    def run(config: Any) -> tuple[Trace, dict[Any, int]]:
        return _run(config, way, batch_size, sequence_length)

    config = way.model.config
    deeper = way.gpus > 1 or not way.checkpointing  # as in `rank_step`: what FSDP2 copies ahead
    like = "on_cpu", way, kind_of_batch(batch_size)
    return from_shallow(config, run, like, deeper=int(deeper), length=sequence_length) or run(config)


def _run(config: Any, way: _Way, batch_size: int, sequence_length: int) -> tuple[Trace, dict[Any, int]]:
    """Forward and backward of the first rank, and what was copied. RuntimeError where a process group is open."""
    import transformers.modeling_utils  # noqa: F401  before there is a CUDA GPU: it looks for what it could use with one

    refuse_other_groups()
    layout, moved, traffic = Layout(way.gpus, 3, as_accelerate=True), Counter(), Traffic()
    repeated = kv_repeated() if way.repeat_kv else nullcontext()
    with warnings.catch_warnings(), cuda(way.spec, limited=False, gpus=way.gpus) as gpu, repeated:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        ranks.install(gpu.patches, gpu, gpu.watch)
        dist.init_process_group("cuda:nccl,cpu:gloo")
        with running(config.model_type):
            model = build_model(config, way.weights)
            split_by_fsdp2(
                model, model, layout,
                mesh=init_device_mesh("cuda", (way.gpus,)),
                mp_policy=MixedPrecisionPolicy(way.half, way.half, way.half),
                # Pinned they would be written, and take the RAM of whoever asks; on the card it is the same.
                offload_policy=CPUOffloadPolicy(pin_memory=False),
            )  # fmt: skip
            model.to_empty(device="cpu")
            model.tie_weights()  # FSDP2 keeps ties, to_empty does not
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.cuda()
            if way.checkpointing:
                enable_checkpointing(model, offload=way.offload)
            model.train()
            ids = torch.zeros((batch_size, sequence_length), dtype=torch.int64).cuda()
            head = fused_head(model, virtual=False) if way.fused_lm_head else nullcontext()
            more = {"fused_lm_head": True} if way.fused_lm_head else {}
            away = offloading(None, moved) if way.offload else nullcontext()
            with traffic, Messages(Labels(gpu)), head, away:
                loss = model(input_ids=ids, labels=ids, use_cache=False, **more).loss
                loss.backward()
            trace = gpu.watch.saved().trace
            del model, loss, ids
    checkpoints = sum(nbytes * times for nbytes, times in moved.items())
    copied = {"to_card": traffic.to_card - checkpoints, "to_cpu": traffic.to_cpu - checkpoints}
    return trace, copied | Moved.of(moved, batch_size * sequence_length, 1).sizes


class Labels:
    """What is gathered and what only serves to send, told to the program's recorder."""

    def __init__(self, gpu: ProgramGPU):
        self.gpu = gpu
        init = FSDPParam.init_unsharded_param

        def init_unsharded_param(parameter: FSDPParam) -> None:
            init(parameter)
            gpu.watch.claim(parameter.all_gather_outputs, "parameters")

        gpu.patches.set(FSDPParam, "init_unsharded_param", init_unsharded_param)

    def label(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """These tensors are this; of a program's categories "inputs" is what the step calls "other"."""
        self.gpu.watch.claim(tensors, "inputs" if category == "other" else category)
