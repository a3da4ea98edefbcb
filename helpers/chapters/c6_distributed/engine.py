"""Which engine trains, and what each rank holds: what was asked for beside what really came.

accelerate (seen with 1.15) does less than asked, without a word, in these cases:
`accelerate launch --cpu` starts one process, whatever `--num_processes` and the file say; without a GPU `Accelerator()`
leaves every rank alone, under DeepSpeed too; `Accelerator(cpu=True)` ignores `fsdp_config` and DeepSpeed and takes DDP,
and computes in fp32 where fp16 was asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from virtual_gpu.language import tr
from virtual_gpu.real import storage_bytes

ALONE, DDP, FSDP2 = tr(ko="프로세스 하나", en="single process"), "DDP", "FSDP2"


class EngineError(RuntimeError):
    """What was asked for cannot come, or something else came."""


@dataclass(frozen=True)
class Asked:
    """engine: ALONE, DDP, FSDP2 or "DeepSpeed ZeRO-2" and so on. offload: optimizer state in CPU memory."""

    engine: str
    ranks: int
    offload: bool = False

    @property
    def deepspeed(self) -> bool:
        return self.engine.startswith("DeepSpeed")


def what_was_asked(
    env: Mapping[str, str] = os.environ, *, fully_shard: bool = False, expect_ranks: int | None = None
) -> Asked:
    """What torchrun's or accelerate's environment asks for; EngineError where it cannot lead there.

    fully_shard: FSDP2 is wanted in any case. expect_ranks: the number of ranks that must come.
    """
    ranks = int(env.get("WORLD_SIZE", 1))
    # accelerate's launcher for a CPU tells where to meet, and starts nobody to be met.
    if "LOCAL_RANK" not in env and "MASTER_ADDR" in env and expect_ranks != 1:
        raise EngineError(
            tr(
                ko="프로세스를 여러 개 요청했는데 하나만 떴다. accelerate launch --cpu는 --num_processes와 설정 파일의 "
                "엔진을 무시한다. --cpu를 빼거나 torchrun을 쓴다. 하나로 충분하면 --expect-ranks 1을 준다.",
                en="Several processes were asked for and one was started: accelerate launch --cpu ignores "
                "--num_processes and the file's engine. Leave --cpu out, or use torchrun. If one will do: "
                "--expect-ranks 1.",
            )
        )
    if expect_ranks not in (None, ranks):
        raise EngineError(
            tr(
                ko=f"rank {expect_ranks}개를 기대했는데 {ranks}개가 떴다. torchrun의 --nnodes와 --nproc-per-node, "
                "또는 설정 파일의 num_processes를 확인한다.",
                en=f"{expect_ranks} ranks were expected and {ranks} came: look at torchrun's --nnodes and "
                "--nproc-per-node, or at the file's num_processes.",
            )
        )
    if _is_true(env.get("ACCELERATE_USE_DEEPSPEED")):
        if fully_shard:
            raise EngineError(
                tr(ko="--fully-shard는 DeepSpeed와 함께 쓸 수 없다.", en="--fully-shard does not go with DeepSpeed.")
            )
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        offload = env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu"
        return Asked(f"DeepSpeed ZeRO-{stage}", ranks, offload)
    if _is_true(env.get("ACCELERATE_USE_FSDP")) or fully_shard:
        if not fully_shard and env.get("FSDP_VERSION") != "2":
            raise EngineError(
                tr(
                    ko="설정 파일이 FSDP 1을 요청한다. fsdp_config에 fsdp_version: 2를 쓴다.",
                    en="The file asks for FSDP 1: write fsdp_version: 2 into fsdp_config.",
                )
            )
        if "LOCAL_RANK" not in env:
            raise EngineError(
                tr(
                    ko="FSDP2는 torchrun이나 accelerate launch로 시작해야 한다.",
                    en="FSDP2 must be started by torchrun or accelerate launch.",
                )
            )
        return Asked(FSDP2, ranks)
    return Asked(DDP if "LOCAL_RANK" in env else ALONE, ranks)


def _is_true(value: str | None) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def check_machine(asked: Asked, env: Mapping[str, str] = os.environ) -> None:
    """EngineError where this machine lacks DeepSpeed, or GPUs for its ranks."""
    if asked.deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise EngineError(
            tr(
                ko=f"{asked.engine}: DeepSpeed가 설치되어 있지 않다. 'pip install deepspeed'로 설치하거나 "
                "configs/fsdp2.yaml을 쓴다.",
                en=f"{asked.engine}: DeepSpeed is not installed. 'pip install deepspeed', or use configs/fsdp2.yaml.",
            )
        )
    here, gpus = int(env.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if 0 < gpus < here:
        raise EngineError(
            tr(
                ko=f"이 노드에는 GPU가 {gpus}개인데 rank가 {here}개 떴다. rank마다 GPU가 하나씩 있어야 한다.",
                en=f"{here} ranks on a node with {gpus} GPUs: every rank needs one of its own.",
            )
        )


def check_group(asked: Asked, known: int) -> None:
    """EngineError unless all ranks that were asked for communicate, and accelerate knows (`known`) of all of them."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not world == known == asked.ranks:
        raise EngineError(
            tr(
                ko=f"rank {asked.ranks}개를 요청했는데 서로 통신하는 rank는 {world}개, accelerate가 아는 rank는 "
                f"{known}개다. 이대로면 rank가 데이터를 나누지 않고 따로 학습한다.",
                en=f"{asked.ranks} ranks were asked for, {world} communicate, and accelerate knows of {known}: they "
                "would not divide the data, each would train on its own.",
            )
        )


def check_precision(asked: Asked, mixed_precision: str, autocast: bool) -> None:
    """EngineError where accelerate will not compute in the mixed precision that it names; DeepSpeed checks its own."""
    if mixed_precision != "no" and not autocast and not asked.deepspeed:
        raise EngineError(
            tr(
                ko=f"혼합 정밀도 {mixed_precision}을(를) 요청했는데 이 장치에서는 적용되지 않고 fp32로 계산한다. "
                "--mixed_precision bf16이나 no를 준다.",
                en=f"Mixed precision {mixed_precision} was asked for and this device would compute in fp32: "
                "--mixed_precision bf16 or no.",
            )
        )


def check_engine(asked: Asked, model: torch.nn.Module) -> None:
    """EngineError unless the prepared model is what was asked for."""
    got = engine_of(model)
    if got == asked.engine or (asked.ranks == 1 and {got, asked.engine} == {ALONE, DDP}):
        return
    advice = ""
    if asked.engine == FSDP2:
        advice = tr(
            ko=" accelerate는 CPU에서 fsdp_config를 무시한다. GPU에서 돌리거나 --fully-shard를 준다(스크립트가 "
            "직접 나눈다).",
            en=" accelerate ignores fsdp_config on a CPU. Run on GPUs, or let the script shard: --fully-shard.",
        )
    raise EngineError(
        tr(
            ko=f"요청한 엔진은 {asked.engine}인데 실제로 쓰인 것은 {got}다.{advice}",
            en=f"{asked.engine} was asked for and {got} came.{advice}",
        )
    )


def engine_of(model: torch.nn.Module) -> str:
    """The engine by what has become of the model, not by what a setting says."""
    if type(model).__module__.startswith("deepspeed"):
        return f"DeepSpeed ZeRO-{model.zero_optimization_stage()}"
    if isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters()):
        return FSDP2
    return DDP if isinstance(model, DistributedDataParallel) else ALONE


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """FSDP2 without accelerate: each layer is a group, gathered for its computation and let go after it (ZeRO-3).

    The model lies on the CPU; one layer after the other goes to `device`, where only this rank's shard of it stays.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len, default=())
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class FirstStep:
    """What this rank holds at its first optimizer step, in bytes, distinct storages once.

    Counted where the innermost optimizer steps, whatever an engine wraps around it: the gradients are those that this
    optimizer gets, and weights of its own (DeepSpeed's fp32 copies, in fp32 too) count as optimizer state. Buckets for
    sending do not count.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any):
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self._model, self._optimizer = model, optimizer
        self._gradients = self._weights = 0
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        of_model = {p.untyped_storage().data_ptr() for p in self._parameters()}
        own = (p for p in map(_local, stepped) if p.untyped_storage().data_ptr() not in of_model)
        # ZeRO-3 may step several times, for one group of parameters after the other.
        self._gradients += storage_bytes(_local(p.grad) for p in stepped if p.grad is not None)
        self._weights += storage_bytes(own)

    def _parameters(self) -> list[torch.Tensor]:
        return [_local(getattr(p, "ds_tensor", p)) for p in self._model.parameters()]

    def read(self) -> dict:
        """To be called after the step: parameters, gradients, optimizer (bytes), optimizer_on (device types)."""
        self._hook.remove()
        values = (v for state in self._optimizer.state.values() for v in state.values())
        states = [_local(v) for v in values if isinstance(v, torch.Tensor) and v.dim() > 0]  # no step counters
        return {
            "parameters": storage_bytes(self._parameters()),
            "gradients": self._gradients,
            "optimizer": storage_bytes(states) + self._weights,
            "optimizer_on": sorted({v.device.type for v in states}),
        }


def check_offload(asked: Asked, rows: list[dict]) -> None:
    """EngineError where the optimizer state was to lie in CPU memory and does not."""
    places = sorted({place for row in rows for place in row["optimizer_on"]})
    if asked.offload and places != ["cpu"]:
        raise EngineError(
            tr(
                ko=f"옵티마이저 상태를 CPU 메모리에 두도록 요청했는데 {', '.join(places)}에 있다.",
                en=f"The optimizer state was to lie in CPU memory and lies on {', '.join(places)}.",
            )
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
