"""One rank of many: the program's own distributed code, in a process group whose messages go nowhere.

PyTorch's "fake" process group answers at once, as a group of that many ranks would. FSDP2, tensor parallelism and
ZeroRedundancyOptimizer run as they are. DistributedDataParallel's reducer is C++ and reads values, so its memory is
done here: one bucket for everything until the first backward, then buckets of 1 and 25 MiB. A full one is summed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from ..errors import WrongValue
from ..language import tr
from ..shards.fake_rank import forget_splits
from .device import ProgramGPU
from .patches import Patches
from .processes import more_processes
from .watch import Watch

_BROADCAST_BYTES = 250 * 2**20  # DistributedDataParallel.broadcast_bucket_size
_FIRST_BUCKET_BYTES = 2**20  # dist._DEFAULT_FIRST_BUCKET_BYTES


def install(patches: Patches, gpu: ProgramGPU, watch: Watch) -> None:
    """Make this process rank `gpu.rank` of `gpu.ranks`, as torchrun would; the program opens the group itself."""
    for name, value in {
        "RANK": gpu.rank, "LOCAL_RANK": gpu.index, "WORLD_SIZE": gpu.ranks,
        "LOCAL_WORLD_SIZE": 1 if gpu.several else gpu.count,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 29500, "GROUP_RANK": gpu.rank // gpu.count,
    }.items():  # fmt: skip
        patches.set_item(os.environ, name, str(value))
    _fake_groups(patches, gpu)
    _count_resizes(patches, gpu)
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def meta_of(propagator: Any, schema: Any) -> Any:
        # What fills its argument is as that; PyTorch would find out with a copy on "cuda", which has no kernels here.
        fills = schema.op._schema.is_mutable and torch.Tag.nondeterministic_seeded in schema.op.tags
        if fills:
            return schema.args_schema[0].tensor_meta
        with gpu.mode.uncounted():  # whole tensors, made for their shapes alone
            return propagate(propagator, schema)

    patches.set(ShardingPropagator, "_propagate_tensor_meta_non_cached", meta_of)
    reset = FSDPParam.reset_sharded_param

    def reset_sharded_param(parameter: FSDPParam) -> None:
        # transformers loads into a sharded model by assignment. PyTorch refuses that where modules are converted by
        # swapping, which is how they come to the virtual card, and not how the program set it.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            reset(parameter)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    patches.set(FSDPParam, "reset_sharded_param", reset_sharded_param)
    patches.set(dtensor_random, "OffsetBasedRNGTracker", RandomNumbers)
    patches.set(dtensor_random, "_rng_tracker", None)
    _take_the_place_of(patches, DistributedDataParallel.__base__)
    patches.set(nn.parallel, "DistributedDataParallel", DistributedDataParallel)
    patches.set(nn.parallel.distributed, "DistributedDataParallel", DistributedDataParallel)
    patches.set(DTensor, "device", property(lambda tensor: tensor._local_tensor.device))
    patches.set(DTensor, "is_cuda", property(lambda tensor: tensor._local_tensor.is_cuda))
    patches.set(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    if gpu.ranks > 1:
        each = gpu.count if gpu.count < gpu.ranks else 0  # of several machines
        watch.note(
            tr(
                ko=f"GPU {gpu.ranks}개{f'(컴퓨터마다 {each}개)' if each else ''} 가운데 rank {gpu.rank}. "
                "다른 rank에서 받는 것은 보내는 것과 크기가 같고, 아는 값이면 값도 같다고 본다",
                en=f"rank {gpu.rank} of {gpu.ranks}{f', {each} in a machine' if each else ''}; what it receives from "
                "others is taken to be as large as what it sends and, where that is known, equal to it",
            )
        )


def _fake_groups(patches: Patches, gpu: ProgramGPU) -> None:
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed import rendezvous
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    start, new_group, hook = dist.init_process_group, dist.new_group, sys.excepthook
    made = False  # else the group is somebody else's, from before

    @functools.wraps(start)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("world_size", -1) not in (-1, gpu.ranks):
            raise WrongValue(more_processes(kwargs["world_size"], gpu.ranks, len(gpu.meters)))
        nonlocal made
        start("fake", store=FakeStore(), rank=gpu.rank, world_size=gpu.ranks)
        made = True

    @functools.wraps(new_group)
    def fake_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("backend", None)
        return new_group(*args[:2], backend="fake", **{k: v for k, v in kwargs.items() if k != "pg_options"})

    def gather(everything: list, thing: Any, group: Any = None) -> None:
        everything[:] = [thing] * dist.get_world_size(group)

    def close() -> None:
        if made and dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook  # PyTorch puts one there that prints the rank before every line
        forget_splits()

    # Modules of PyTorch that took them by name call PyTorch's own, which would wait for the other ranks.
    replaced = {"init_process_group": (start, init_process_group), "new_group": (new_group, fake_group)}
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.")]:
        for name, (before, after) in replaced.items():
            if vars(module).get(name) is before:
                patches.set(module, name, after)
    patches.set(rendezvous, "_create_c10d_store", lambda *args, **kwargs: FakeStore())
    for module in (dist, c10d):
        patches.set(module, "is_nccl_available", lambda: True)
        patches.set(module, "all_gather_object", gather)
        patches.set(module, "broadcast_object_list", lambda *args, **kwargs: None)
    patches.set(c10d, "_set_pg_timeout", lambda *args, **kwargs: None)  # of NCCL's; nothing waits here
    patches.later(close)


def _count_resizes(patches: Patches, gpu: ProgramGPU) -> None:
    """FSDP2 gives back what it gathered by resizing the storage to nothing, which no operation shows."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        gpu.mode.resized(storage, "parameters")
        return result

    patches.set(torch.UntypedStorage, "resize_", resize_)


class RandomNumbers:
    """What DTensor keeps ranks' random numbers apart with; here there are none, and nothing is read or sent."""

    distribute_region_enabled = False  # an operation is run as it is, on this rank's part

    def __init__(self, device_mesh: Any, run_state_sync: bool = True):
        pass

    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Any:
        return contextlib.nullcontext()


def _take_the_place_of(patches: Patches, theirs: type) -> None:
    """PyTorch's class makes ours: a program of one process has bound its name before it opens a group, or inherits."""
    ours = DistributedDataParallel

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        if kind is theirs:
            self.__class__ = ours
        elif not issubclass(kind, ours):
            self.__class__ = type(kind.__name__, (kind, ours), {"__module__": kind.__module__})
        ours.__init__(self, *args, **kwargs)

    patches.set(theirs, "__init__", __init__)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """`DistributedDataParallel` without its reducer: its buckets are made, filled and rebuilt as that does."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **_: Any,
    ):
        nn.Module.__init__(self)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        if not self._trained:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                "gradient."
            )
        self.module, self.device_ids = module, device_ids
        self.device = self._trained[0].device
        self.process_group = process_group or dist.group.WORLD
        self.require_backward_grad_sync = True
        self.gradient_as_bucket_view, self.static_graph = gradient_as_bucket_view, static_graph
        self.find_unused_parameters = find_unused_parameters
        self._bucket_bytes = int((25 if bucket_cap_mb is None else bucket_cap_mb) * 2**20)
        self._ready: list[torch.Tensor] = []  # the order of the first backward
        self._rebuilt = False
        if init_sync:
            _broadcast_states([*module.parameters(), *module.buffers()])
        one_bucket = static_graph or not find_unused_parameters
        self._make_buckets(self._trained[::-1], [sys.maxsize] if one_bucket else self._limits)
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    @property
    def _limits(self) -> list[int]:
        return [_FIRST_BUCKET_BYTES, self._bucket_bytes]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own, after the buckets have taken the order in which gradients become ready."""
        if torch.is_grad_enabled() and len(self._ready) == len(self._trained) and not self._rebuilt:
            self._make_buckets(self._ready, self._limits)
            self._rebuilt = True
        self._missing = list(self._members)
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are only added up."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Messages go nowhere, however they are packed."""

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _make_buckets(self, parameters: list[torch.Tensor], limits: list[int]) -> None:
        self.gradient_buckets: list[torch.Tensor] = []
        self._views: dict[int, torch.Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        groups, _ = dist._compute_bucket_assignment_by_size(parameters, limits, [False] * len(parameters))
        self._members = [len(group) for group in groups]
        self._missing = list(self._members)  # gradients of each bucket that this backward has not brought yet
        for number, group in enumerate(groups):
            members = [parameters[index] for index in group]
            self._bucket_of |= {id(p): number for p in members}
            bucket = members[0].new_empty(sum(p.numel() for p in members))
            self.gradient_buckets.append(bucket)
            views = bucket.split([p.numel() for p in members])
            self._views |= {id(p): view.view(p.shape) for p, view in zip(members, views, strict=True)}

    @torch.no_grad()
    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        if not self._rebuilt:
            self._ready.append(parameter)
        if self.gradient_as_bucket_view:
            parameter.grad = self._views[id(parameter)]
        bucket = self._bucket_of[id(parameter)]
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            dist.all_reduce(self.gradient_buckets[bucket], group=self.process_group)


def _broadcast_states(tensors: list[torch.Tensor]) -> None:
    """Every rank starts from rank 0's values: they are sent in flat pieces of 250 MiB."""
    piece, nbytes = [], 0
    for tensor in tensors:
        piece.append(tensor)
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _BROADCAST_BYTES:
            tensors[0].new_empty(nbytes, dtype=torch.uint8)
            piece, nbytes = [], 0
    if piece:
        tensors[0].new_empty(nbytes, dtype=torch.uint8)
