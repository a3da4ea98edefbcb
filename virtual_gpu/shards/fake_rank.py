"""One rank of N on the virtual GPU: PyTorch's own engines, under a process group whose messages go nowhere.

The process group is PyTorch's "fake" one: it answers as N ranks would and sends nothing. What FSDP2 allocates, gathers
and frees on that rank is counted by the virtual GPU, operation by operation.
"""

from __future__ import annotations

import operator
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from numbers import Integral
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.adamw import adamw
from torch.overrides import TorchFunctionMode

from ..cards import CATALOG, GPUSpec
from ..counting.gpu import VirtualGPU
from ..errors import WrongValue
from ..language import tr
from ..models.attention import kv_repeated
from ..models.build import build_model
from ..models.configs import running
from ..models.fused_head import fused_head
from ..models.offloaded import leaving, offloading
from ..real import storage_bytes
from ..step.completions import Learner, learning
from ..step.pairs import OF_THE_HEAD, preference_loss, without_dropout
from ..step.rollout import hand_over
from ..step.run import enable_checkpointing
from ..step.watched import ResultsWatch
from ..trace.trace import Trace
from ..trace.twice import Mark
from ..turns import in_turn, refuse_in_a_block
from .adapters import Adapters, unsplit_tensors
from .collectives import Collectives, of_dtensors
from .context import forget_masks, in_parts
from .generated import Generated
from .layout import Convention, Layout
from .second_model import Pairs, split_second
from .sequence import loss_of_parts, plan_of_tokens


@dataclass
class RankRun:
    """What one rank held and sent in a step: bytes by kind, forward and backward, elements by collective.

    sent: parameters and gradients; sent_bytes: the same in bytes, with adapters all messages. sent_activations: tensor
    or context parallelism's messages, which grow with batch and length; sent_activation_bytes: the same in bytes.
    offloaded: bytes of a tensor → how often one went to the CPU. whole: kind → bytes of one piece, of those that are as
    large as DPO's second model (`_whole`); whole_at: kind → the trace's entries that allocate such pieces.
    """

    held: dict[str, int]
    sent: Counter
    sent_bytes: Counter
    sent_activations: Counter
    trace: Trace
    offloaded: Counter = field(default_factory=Counter)
    whole: dict[str, int] = field(default_factory=dict)
    whole_at: dict[str, np.ndarray] = field(default_factory=dict)
    sent_activation_bytes: Counter = field(default_factory=Counter)
    twice: Counter = field(default_factory=Counter)


class MasterAdamW(torch.optim.AdamW):
    """AdamW that updates an fp32 copy of each parameter, kept in its state ("mixed": 12 bytes a parameter)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One tensor at a time (no temporaries of the model's size), each rank on its own piece of it."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, (mine, gradient) = self.state[p], _locals([p, p.grad])
                if not state:
                    master = mine.detach().float()
                    zeros = (torch.zeros_like(master), torch.zeros_like(master))
                    state.update(step=torch.zeros(()), master=master, exp_avg=zeros[0], exp_avg_sq=zeros[1])
                adamw(
                    [state["master"]], [gradient.float()], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                    [state["step"]], foreach=False, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
                    lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip
                mine.copy_(state["master"])


@in_turn
def run_rank(
    config: Any,
    layout: Layout,
    convention: Convention,
    rank: int = 0,
    *,
    spec: GPUSpec = CATALOG["H100"],
    batch_size: int | None = 1,
    sequence_length: int = 8,
    checkpointing: bool = False,
    adapters: Adapters | None = None,
    repeat_kv: bool = False,
    fused_lm_head: bool = False,
    offload_checkpoints: bool = False,
    kept_results: Sequence[str] = (),
    marks: dict[Mark, int] | None = None,
    pairs: Pairs | None = None,
    generated: Generated | None = None,
    padded: bool = False,
    whole_gradients: bool = False,
    update: bool = True,
) -> RankRun:
    """One training step on rank `rank` of the layout, its forward and backward recorded (no optimizer state yet).

    adapters: the frozen model with these is trained; `convention` says nothing. Without autocast: accelerate leaves
    precision to FSDP2's policy (accelerate 1.15, `Accelerator._prepare_fsdp2`, which does not call `prepare_model`).
    spec: the card, whose kernels and workspaces the rank has. batch_size None: no forward and backward, the gradients
    are made in the shape of the parameters (stages 0 and 1).
    DDP's reducer is written in C++ and reads values, which fake tensors do not have. So at stages 0 and 1 the rank runs
    without it, and its all-reduce is missing in `sent`. repeat_kv: see `models.attention.kv_repeated`;
    fused_lm_head: `models.fused_head`; offload_checkpoints: `models.offloaded`; kept_results: `models.kept`. marks: the
    run is watched under checkpointing, and each result that blocks could keep has its number there (`ResultsWatch`).
    pairs: a micro-batch of DPO's, by TRL's head; batch_size counts them. Of its moment "alone" there is no backward,
    and what is held is the second model's.
    generated: a micro-batch of GRPO's completions, batch_size of them; of its other moments there is no backward.
    padded: the micro-batch's sequences differ in length, as those of pairs do, so that attention has a mask.
    whole_gradients: those of an earlier micro-batch lie there unsplit and are split with this one's: FSDP2's
    `set_requires_gradient_sync(False)`, by which accelerate's `no_sync` and so the Trainer accumulates (transformers
    5.23, trainer.py; not with `sync_each_batch`). update: whether the optimizer steps after them; without it its states
    are not there, nor is what it sends.
    """
    refuse_in_a_block()
    convention, task = convention.fp32_shards if pairs else convention, pairs or generated
    moved: Counter[int] = Counter()
    repeated, gpu = kv_repeated() if repeat_kv else nullcontext(), VirtualGPU(spec, limited=False)
    gpu.meter.stream = _Streams()
    with (
        fake_world(layout.ranks, rank), running(config.model_type), warnings.catch_warnings(), repeated,
        gpu.interrupts_wait(),  # splitting pushes and pops modes of PyTorch's, of which Ctrl+C would leave one
    ):  # fmt: skip
        # FSDP2 warns that a DTensor's output is a view; nothing here writes into one.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        model, mesh = (
            shard(config, layout, convention) if adapters is None else shard_adapters(config, layout, adapters, gpu)
        )
        second, whole = None, {}
        if task and task.has_second:
            second = split_second(config, layout, convention, mesh["data"])
        if pairs and pairs.moment == "alone":
            model = second
        with _resizes_counted(gpu), _shapes_uncounted(gpu), ExitStack() as heads:
            shards = _place(model, gpu)
            if second not in (None, model):
                shards = shards + _place(second, gpu)
            watch = None if marks is None else ResultsWatch(gpu, marks)
            if checkpointing and model is not second:
                enable_checkpointing(model, kept_results, watch, leaving(gpu, moved), offload_checkpoints)
            model.train(model is not second)
            optimizer = _optimizer(model, layout, adapters or convention, mesh)
            # No values are there: asked is, whether any is 0.
            gpu.answers.padded = padded = padded or task is not None
            whole = {} if second is None else _whole(second, layout, convention)
            learner = None
            if generated:
                half = adapters.dtype if adapters else convention.half
                learner = Learner(gpu, model, second, generated.completions, operator.call, half)
                heads.enter_context(learning(gpu, learner))
            if pairs:
                for one in filter(None, {model, second}):
                    without_dropout(one)
                    heads.enter_context(fused_head(one, True, OF_THE_HEAD if one is not second else ("log_probs",)))
            if second is not None and layout.stage == 2 and task.after_the_first:
                # From the first micro-batch, or scoring, on it is whole.
                few = generated.completions.at_once if generated else 2
                with gpu.record(second, optimizer) as once, Messages(gpu), once.phase("reference"), torch.no_grad():
                    second(**_batch(gpu, few, sequence_length, padded), use_cache=False, fused_lm_head=True)
            if generated and not (layout.stage == 2 and generated.moment == "scoring"):  # which comes before the steps
                with gpu:  # the steps before it have left both threads their workspaces
                    (torch.ones(1, 1, requires_grad=True) @ torch.ones(1, 1)).sum().backward()
            rows = (batch_size or 0) * (2 if pairs else 1)

            def learn(record: Any) -> int:
                """A micro-batch's forward and backward; the bytes that stay gathered between them."""
                batch = _batch(gpu, rows, sequence_length, padded) if not generated else {}
                loss = partial(_loss_of_text, fused_lm_head)
                if layout.context_parallel > 1:
                    forget_masks(model)
                    batch = gpu.place(_next_tokens(rows, sequence_length))
                    heads.enter_context(in_parts(_mesh_of_texts(layout), batch))
                if pairs:
                    known = gpu.place(torch.zeros(2 * batch_size)) if pairs.reference == "precomputed" else None
                    loss = partial(preference_loss, reference=second, known=known)
                if learner is not None:
                    loss = partial(_loss_of_completions, learner, learner.buffer(scored=False))
                head = fused_head(model, virtual=True) if fused_lm_head and not task else nullcontext()
                heads.enter_context(loss_of_parts() if layout.sequence_parallel else nullcontext())
                with head, offloading(gpu, moved) if offload_checkpoints else nullcontext():
                    return _forward_backward(model, gpu, record, batch, shards, loss, second)

            if whole_gradients:
                model.set_requires_gradient_sync(False)
                with gpu.record(model, optimizer) as once, Messages(gpu, second):
                    learn(once)
                model.set_requires_gradient_sync(True)
                gpu.label(_unsplit_gradients(model), "gradients")
                moved.clear()
                if watch is not None:
                    watch.flops.clear()
            with gpu.record(model, optimizer) as record, Messages(gpu, second) as messages:
                kept = 0
                if batch_size is None:
                    for parameter in model.parameters():
                        parameter.grad = torch.empty_like(parameter)
                elif pairs and pairs.moment == "alone":
                    batch = _batch(gpu, rows, sequence_length, padded)
                    # Here TRL asks for autocast itself (compute_ref_log_probs).
                    with record.phase("reference"), torch.no_grad(), gpu.autocast(convention.half):
                        model(**batch, use_cache=False, fused_lm_head=True)
                elif generated and generated.moment == "scoring":
                    with record.phase("scoring"):
                        learner.buffer()
                elif generated and generated.moment == "sync":
                    with record.phase("sync"), _all_to_all():
                        hand_over(model, fsdp_version=2, given=lambda one: gpu.label([one], "parameters"))
                else:
                    kept = learn(record)
                trace = record.recorder.trace() if watch is None else watch.mark(record.recorder.trace())
                births, allocations = record.recorder.births(), np.flatnonzero(trace.allocates)
                whole_at = {kind: allocations[np.isin(births, messages.whole[kind])] for kind in whole}
                if update and model is not second:
                    optimizer.step()
            trained = [] if task and not task.has_backward else _gradients(model)
            held = {
                "parameters": storage_bytes([*shards, *unsplit_tensors(model)]),
                "gathered": kept,
                "gradients": storage_bytes(trained),
            }
            for kind, name in (("master", "master"), ("momentum", "exp_avg"), ("variance", "exp_avg_sq")):
                held[kind] = storage_bytes(_locals(_states(optimizer, name)))
            sent, sent_bytes = (messages.elements, messages.nbytes) if layout.ranks > 1 else (Counter(), Counter())
            if adapters:  # no tensors are split: what is functional is TRL's gathering of the head
                sent_bytes = sent_bytes + messages.functional_nbytes
            return RankRun(
                held, sent, sent_bytes, messages.activations, trace, moved, whole, whole_at,
                sent_activation_bytes=messages.functional_nbytes, twice=Counter() if watch is None else watch.flops,
            )  # fmt: skip


def _place(model: torch.nn.Module, gpu: VirtualGPU) -> list[torch.Tensor]:
    """Put the meta model on the virtual GPU; this rank's tensors, with FSDP2's padding."""
    with gpu.mode:
        model.to_empty(device="cpu")
    if hasattr(model, "_get_fsdp_state"):
        model._get_fsdp_state()._lazy_init()  # pads, as the first forward would: before anything is recorded
    else:
        model.tie_weights()  # FSDP2 keeps ties, to_empty does not
    shards = _locals(model.parameters())
    gpu.label([*shards, *unsplit_tensors(model)], "parameters")
    return shards


def _batch(gpu: VirtualGPU, rows: int, sequence_length: int, padded: bool) -> dict[str, torch.Tensor]:
    """What a micro-batch of so many sequences holds, on the virtual GPU."""
    tokens = torch.zeros((rows, sequence_length), dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    return gpu.place(batch | ({"attention_mask": torch.ones_like(tokens)} if padded else {}))


def _next_tokens(rows: int, sequence_length: int) -> dict[str, torch.Tensor]:
    """A micro-batch of texts to be cut: the last token of a part has its next one elsewhere, so targets are shifted."""
    tokens = torch.zeros((rows, sequence_length), dtype=torch.int64)
    positions = torch.arange(sequence_length)[None]
    return {"input_ids": tokens, "shift_labels": tokens.clone(), "position_ids": positions}


def _mesh_of_texts(layout: Layout) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    degree = layout.context_parallel
    return init_device_mesh("cpu", (layout.ranks // degree, degree), mesh_dim_names=("groups", "text"))["text"]


def _loss_of_text(fused_lm_head: bool, forward: Callable[..., Any], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    more = {"fused_lm_head": True} if fused_lm_head else {}
    labels = batch.get("shift_labels")  # given, they are the targets
    return forward(model, **({"labels": labels} if labels is not None else {}), **batch, **more, use_cache=False).loss


def _loss_of_completions(
    learner: Learner, made: list[dict[str, torch.Tensor]], forward: Any, model: torch.nn.Module, batch: Any
) -> torch.Tensor:
    """Of the first micro-batch. The learner has the model, and calls it itself."""
    return learner.loss(made[0])


def _whole(second: torch.nn.Module, layout: Layout, convention: Convention) -> dict[str, int]:
    """What FSDP2 makes of all of the second model at once (`foreach_all_gather`): kind → bytes.

    "received": of all ranks; "cast": of the own shard, in the type in which it is sent.
    """
    own = sum(t.numel() for t in _locals(second.parameters())) * convention.computes.itemsize
    return {"received": own * layout.ranks} | ({"cast": own} if convention.half else {})


def _forward_backward(
    model: torch.nn.Module, gpu: VirtualGPU, record: Any, batch: dict[str, torch.Tensor], shards: list[torch.Tensor],
    loss_of: Callable[..., torch.Tensor], second: torch.nn.Module | None = None,
) -> int:  # fmt: skip
    """Run both; the bytes that stay gathered between them."""
    with record.phase("forward"):
        loss = loss_of(operator.call, model, batch)
    kept = storage_bytes([*shards, *_locals(model.parameters())]) - storage_bytes(shards)
    kept += storage_bytes([*shards, *_locals(second.parameters())]) - storage_bytes(shards) if second else 0
    with record.phase("backward"):
        loss.backward()
    gpu.label(_gradients(model), "gradients")
    return kept


NODE = 8  # GPUs of one machine


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """PyTorch's process group of `ranks` ranks of which only this one exists; gone at the end, whatever happens."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    refuse_other_groups()
    if not isinstance(rank, Integral) or not 0 <= rank < ranks:
        raise WrongValue(
            tr(ko=f"rank={rank!r:.80}: 0부터 {ranks - 1}까지다.", en=f"rank={rank!r:.80}: 0 to {ranks - 1}.")
        )
    hook, numbers = sys.excepthook, random.getstate()
    try:
        # Of a CPU's mesh DTensor takes each rank for a machine of its own (`MeshTopoInfo`), and goes other ways.
        here = mock.patch.object(torch.cpu, "device_count", lambda: min(ranks, NODE))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        with here:
            yield
    finally:
        if dist.is_initialized():  # not where an interrupt came before the group was made
            dist.destroy_process_group()
        random.setstate(numbers)  # PyTorch draws names from Python's generator
        sys.excepthook = hook  # PyTorch puts one there that prints the rank before every line
        forget_splits()


def refuse_other_groups() -> None:
    """RuntimeError, with what to do, where this process has a process group."""
    if dist.is_initialized():
        raise RuntimeError(
            tr(
                ko="이 프로세스에는 이미 process group이 있다. torch.distributed.destroy_process_group()으로 닫는다.",
                en="This process has a process group already: torch.distributed.destroy_process_group() closes it.",
            )
        )


def forget_splits() -> None:
    """DTensor remembers how operations were split, with the mesh and its groups, which are gone."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import debug as tensor_debug  # brings PyTorch's compiler

    clear = getattr(tensor_debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # in PyTorch 2.9, where Python alone remembers
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


def shard(config: Any, layout: Layout, convention: Convention) -> tuple[torch.nn.Module, Any]:
    """The model on the meta device, split for this rank, and the mesh: tensor parallel first, then FSDP2 over "data".

    Meta parameters are sharded, fake ones only placed later: the other way round is a hundred times slower.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    layout.check_model(config)
    sizes = {"copies": layout.replicas, "data": layout.data_parallel, "tensor": layout.tensor_parallel}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = build_model(config, convention.dtype)
    if layout.tensor_parallel > 1:
        split_tensors(model, config, mesh["tensor"], layout.sequence_parallel)
    if layout.stage >= 2:
        policy = {"mp_policy": MixedPrecisionPolicy(*[convention.half] * 3)} if convention.half else {}
        over = mesh["copies", "data"] if layout.replicas > 1 else mesh["data"]
        split_by_fsdp2(model, model, layout, mesh=over, **policy)
    return model, mesh


def shard_adapters(config: Any, layout: Layout, adapters: Adapters, gpu: VirtualGPU) -> tuple[torch.nn.Module, Any]:
    """The model with adapters on the meta device, split like `shard`'s; what FSDP2 gathers is 16 bits wide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    adapters.check(layout)
    mesh = init_device_mesh("cpu", (layout.ranks,), mesh_dim_names=("data",))
    model = adapters.build(config, gpu)
    policy = MixedPrecisionPolicy(adapters.dtype, adapters.dtype, adapters.dtype)  # accelerate's set_mixed_precision
    split_by_fsdp2(model, model.get_base_model(), layout, mesh=mesh["data"], mp_policy=policy)
    return model, mesh


def split_by_fsdp2(model: torch.nn.Module, base: torch.nn.Module, layout: Layout, **options: Any) -> None:
    """FSDP2 over the groups of `base`, the model without adapters, and over what is left of the model."""
    from torch.distributed.fsdp import fully_shard

    groups, last = fsdp_groups(base), []
    if layout.as_accelerate:
        groups, last = accelerate_groups(base, model is not base)
    with _FewPieces():
        for group in groups:
            fully_shard(group, reshard_after_forward=layout.stage == 3, **options)
        if last:
            fully_shard(last, reshard_after_forward=False, **options)
            fully_shard(model, **options)
        else:
            fully_shard(model, reshard_after_forward=layout.stage == 3, **options)


class _FewPieces(TorchFunctionMode):
    """To take one of N pieces FSDP2 makes all N, for each parameter: here equal pieces of a meta tensor are one tensor.

    They have no values that could differ. Ranks for which no row is left get their empty piece here already; FSDP2 adds
    them one by one. At 16,384 ranks this is what makes a ledger a matter of a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.chunk or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        tensor, n, dim = args[0], args[1], kwargs["dim"]
        rows = tensor.size(dim)
        piece = max(-(-rows // n), 1)
        whole, rest = divmod(rows, piece)
        pieces = [tensor.narrow(dim, 0, piece)] * whole
        if rest:
            pieces.append(tensor.narrow(dim, rows - rest, rest))
        return pieces + [tensor.new_empty(0)] * (n - len(pieces))


def body_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model without its head."""
    return model.base_model if model.base_model is not model else model.model  # Llama 4 misnames its own


def blocks_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder's blocks; ValueError where they have none of the known names."""
    return _part_of(body_of(model), ("layers", "h"))


def _part_of(body: torch.nn.Module, names: Sequence[str]) -> Any:
    for name in names:
        if hasattr(body, name):
            return getattr(body, name)
    raise WrongValue(
        tr(
            ko=f"{type(body).__name__}: {', '.join(names)} 가운데 어느 것도 없어서 FSDP2의 그룹으로 나눌 수 없다.",
            en=f"{type(body).__name__} has none of {', '.join(names)}: it cannot be split into FSDP2's groups.",
        )
    )


def is_tied(model: torch.nn.Module) -> bool:
    """Whether embedding and head are one parameter."""
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def fsdp_groups(model: torch.nn.Module) -> list[Any]:
    """The modules (or lists of modules) that are gathered together; what is left falls to the model itself.

    Each block is one; so are, as in torchtitan, the embedding and norm with head where these are not tied. Its groups
    alone: it reduces gradients in fp32 (`mixed_precision_reduce`), what is split here in the type that is gathered.
    """
    if is_tied(model):
        return [*blocks_of(model)]
    return [model.get_input_embeddings(), *blocks_of(model), [norm_of(model), model.get_output_embeddings()]]


def accelerate_groups(model: torch.nn.Module, adapters: bool) -> tuple[list[Any], list[torch.nn.Module]]:
    """What accelerate gathers together, and the group that it leaves gathered after the forward pass.

    Beside the blocks a group each for embedding and head (one for both where they are tied). The last norm goes with
    the head, but not in a PeftModel, where accelerate does not find it. Source: fsdp2_prepare_model in
    utils/fsdp_utils.py, accelerate 1.15.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norm = [] if adapters else [norm_of(model)]
    if is_tied(model):
        return [*blocks_of(model)], [*norm, embedding, head]
    return [embedding, *blocks_of(model)], [*norm, head]


def norm_of(model: torch.nn.Module) -> torch.nn.Module:
    """The norm before the head."""
    return _part_of(body_of(model), ("norm", "final_layer_norm", "ln_f"))


def split_tensors(model: torch.nn.Module, config: Any, mesh: Any, sequence: bool = False) -> None:
    """Tensor parallelism by transformers' own plan for the blocks; untied embedding and head by columns.

    sequence: tokens too, by `plan_of_tokens`.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if sequence:
        parallelize_module(model, mesh, plan_of_tokens())
        return
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: style for name, style in config.base_model_tp_plan.items() if style in styles}
    for name, module in body_of(model).named_modules():
        for pattern, style in plan.items():
            if fnmatch(name, pattern):
                parallelize_module(module, mesh, styles[style]())
    if not is_tied(model):
        # By columns: split by rows (along the vocabulary), its gradient would be a view of a whole one.
        parallelize_module(model.get_input_embeddings(), mesh, ColwiseParallel(output_layouts=Replicate()))
        parallelize_module(model.get_output_embeddings(), mesh, ColwiseParallel(output_layouts=Replicate()))


def _optimizer(
    model: torch.nn.Module, layout: Layout, convention: Convention | Adapters, mesh: Any
) -> torch.optim.Optimizer:
    kind = MasterAdamW if getattr(convention, "master", 0) else torch.optim.AdamW
    if layout.stage != 1:
        return kind([parameter for parameter in model.parameters() if parameter.requires_grad], foreach=False)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), kind, process_group=mesh["data"].get_group(), foreach=False)


def _states(optimizer: torch.optim.Optimizer, *names: str) -> list[torch.Tensor]:
    """The optimizer's state on the GPU: the entries of these names, or all but the step counters."""
    names = names or ("master", "exp_avg", "exp_avg_sq")
    state = getattr(optimizer, "optim", optimizer).state
    return [values[name] for values in state.values() for name in names if name in values]


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return _locals(p.grad for p in model.parameters() if p.grad is not None)


def _unsplit_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of FSDP2's groups: what waits for the micro-batch with which it is reduced."""
    from torch.distributed.fsdp import FSDPModule

    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    parameters = [p._unsharded_param for group in groups if group for p in group.fsdp_params]
    return _locals(p.grad for p in parameters if p.grad is not None)


def _locals(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


@contextmanager
def _resizes_counted(gpu: VirtualGPU) -> Iterator[None]:
    """FSDP2 gives back what it gathered by resizing the storage to nothing, which no operation shows."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = original(storage, size)
        gpu.mode.resized(storage, "parameters")
        return result

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original


@contextmanager
def _shapes_uncounted(gpu: VirtualGPU) -> Iterator[None]:
    """DTensor runs an operation that it meets first on tensors of the whole shape: they are made for it alone."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def meta_of(propagator: ShardingPropagator, schema: Any) -> Any:
        with gpu.mode.uncounted():
            return propagate(propagator, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = meta_of
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate


@contextmanager
def _all_to_all() -> Iterator[None]:
    """DTensor changes the dimension that is cut by one exchange on cards, and by gathering all on a CPU's mesh."""
    from torch.distributed._functional_collectives import _group_or_group_name, _resolve_group
    from torch.distributed.tensor import placement_types

    def exchanged(tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
        group = _group_or_group_name(_resolve_group((mesh, mesh_dim)))
        return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, group)

    with mock.patch.object(placement_types, "shard_dim_alltoall", exchanged):
        yield


class _Streams:
    """The number of the current stream: 0 where the step computes, others in the order in which they are first used.

    FSDP2 enters its streams (torch/distributed/fsdp/_fully_shard, class FSDPCommContext) on a CPU as well, where they
    are names without a meaning. `foreach_all_gather` allocates what is gathered on all_gather_copy_in_stream,
    `foreach_reduce` the sharded gradients on reduce_scatter_stream; what it reduces from, and the parameters as the
    blocks compute with them (`alloc_all_gather_outputs`), belong to the stream that computes.
    """

    def __init__(self) -> None:
        self.numbers = {torch.cpu.current_stream(): 0}

    def __call__(self) -> int:
        return self.numbers.setdefault(torch.cpu.current_stream(), len(self.numbers))


class Messages(Collectives):
    """Counts the elements of every collective, and labels what only serves to send: buffers count as "other".

    second: a model of one group. whole: kind, as `_whole` has it → the blocks from which that group was sent.
    """

    def __init__(self, gpu: VirtualGPU, second: torch.nn.Module | None = None):
        super().__init__()
        self.gpu = gpu
        # Of no group of the first model, which has as many elements in several.
        self.own = sum(t.numel() for t in _locals(second.parameters())) if second else None
        self.whole: dict[str, list[int]] = {"received": [], "cast": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if of_dtensors(types):
            return NotImplemented
        name = func._schema.name.split("::")[1].strip("_")
        if name == "allgather_base":  # output, input
            self.gpu.label(args[:1], "other")
        elif name == "reduce_scatter_base":
            self.gpu.label(args[1:2], "other")
        elif func is torch.ops.fsdp.all_gather_copy_in.default and args[3] == self.own:  # of these inputs, into that
            for kind, tensor in (("cast", args[0][0]), ("received", args[1])):
                self.whole[kind].append(self.gpu.block_of(tensor))
        elif func is torch.ops.fsdp.split_with_sizes_copy.default:
            self.gpu.label(kwargs["out"], "parameters")  # what was gathered, as the blocks compute with it
        return super().__torch_dispatch__(func, types, args, kwargs)
