"""Which experts tokens go to, where nothing says it: to each in turn, and from every rank alike.

The scores of a router have no values here. The best k of at most as many options as models have experts are taken in
turn (token 0 gets experts 0 to k - 1, token 1 the next k; few tokens are spread), so each expert has about equally
many, which is what routers are trained to. Counts, masks, lists and the sizes of an all-to-all follow from these ids
(`known`). On a card the tokens of an expert differ, and with them the bytes. Where such a value is used, the report
says what was assumed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_flatten

from .known import ASSUMED_LIMIT, forget, give, is_assumed, values_of

MOST = 1024  # options: more are the words of a vocabulary (Qwen3-Next has 512 experts)


def choose_in_turn(args: tuple, kwargs: dict, out: Any) -> None:
    """After a top-k of unknown scores among not too many options: its ids are known."""
    scores, ids = args[0], out[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if not scores.dim() or not 0 < ids.numel() <= ASSUMED_LIMIT or values_of(scores) is not None:
        return
    options = scores.shape[dim]
    if options <= MOST:
        step = max(1, options // ids.numel())
        chosen = (torch.arange(ids.numel()) * step) % options
        give(ids, chosen.view(ids.movedim(dim, -1).shape).movedim(-1, dim), assumed=True)


def exchanged(func: Any, args: tuple, out: Any) -> None:
    """After a collective that fills tensors: what came is known where the source is, every rank having sent the same.

    What is summed up in place stays what one rank brought, and what a sum is scattered to is not known.
    """
    if func is _c10d.allgather_.default:
        for targets, source in zip(args[0], args[1], strict=True):
            for target in targets:
                _fill(target, values_of(source), is_assumed(source))
    elif func is _c10d.alltoall_.default:
        mine = args[1][dist.ProcessGroup.unbox(args[2]).rank()]
        for target in args[0]:
            _fill(target, values_of(mine), is_assumed(mine))
    elif func in _OF_ONE:
        if func.namespace == "c10d":
            target, source, group = args[0], args[1], dist.ProcessGroup.unbox(args[2])
        else:
            target, source, group = out, args[0], _resolve_process_group(args[-1])
        real, ranks = values_of(source), group.size()
        if real is not None and func in _ALL_TO_ALL:
            sizes = args[4] if func.namespace == "c10d" else args[2]
            real = real.split([*sizes] or len(real) // ranks)[group.rank()]
        _fill(target, None if real is None else torch.cat([real.reshape(-1)] * ranks), is_assumed(source))
    else:
        for target in tree_flatten(args[0])[0]:
            forget(target)


def _fill(target: torch.Tensor, real: torch.Tensor | None, assumed: bool) -> None:
    if real is not None and real.numel() == target.numel():
        give(target, real.view(target.shape), assumed)
    else:
        forget(target)


_c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional
_ALL_TO_ALL = frozenset((_c10d.alltoall_base_.default, _functional.all_to_all_single.default))
_OF_ONE = _ALL_TO_ALL | {_c10d._allgather_base_.default, _functional.all_gather_into_tensor.default}
EXCHANGES = _OF_ONE | {
    _c10d.allgather_.default, _c10d.alltoall_.default, _c10d.allgather_into_tensor_coalesced_.default,
    _c10d.reduce_scatter_.default, _c10d._reduce_scatter_base_.default, _c10d.gather_.default, _c10d.scatter_.default,
}  # fmt: skip
