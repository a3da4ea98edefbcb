"""Which experts tokens go to, where nothing says it: to each in turn, and from every rank alike.

The scores of a router have no values here. The best k of at most as many options as models have experts are taken in
turn (token 0 gets experts 0 to k - 1, token 1 the next k), so each expert has equally many tokens, which is what
routers are trained to. Counts, masks, lists and the sizes of an all-to-all follow from these ids (`known`). On a card
the tokens of an expert differ, and with them the bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .known import LIMIT, forget, give, values_of

MOST = 1024  # options: more are the words of a vocabulary (Qwen3-Next has 512 experts)


def choose_in_turn(args: tuple, kwargs: dict, out: Any) -> int:
    """After a top-k of unknown scores: know its ids. Of how many options they are, 0 where that is no choice."""
    scores, ids = args[0], out[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if not scores.dim() or not 0 < ids.numel() <= LIMIT or scores.shape[dim] > MOST or values_of(scores) is not None:
        return 0
    options = scores.shape[dim]
    rows = ids.movedim(dim, -1).shape
    give(ids, (torch.arange(ids.numel()) % options).view(rows).movedim(-1, dim))
    return options


def exchanged(func: Any, args: tuple, out: Any) -> None:
    """After an all-to-all or an all-gather: what came is known where the source is, every rank having sent the same."""
    if func.namespace == "c10d":
        target, source, group = args[0], args[1], dist.ProcessGroup.unbox(args[2])
    else:
        target, source, group = out, args[0], _resolve_process_group(args[-1])
    real, ranks = values_of(source), group.size()
    if real is not None and func in _ALL_TO_ALL:
        sizes = args[4] if func.namespace == "c10d" else args[2]
        real = real.split([*sizes] or len(real) // ranks)[group.rank()]
    if real is not None and real.numel() * ranks == target.numel():
        give(target, torch.cat([real] * ranks).view(target.shape))
    else:
        forget(target)


_ALL_TO_ALL = frozenset((torch.ops.c10d.alltoall_base_.default, torch.ops._c10d_functional.all_to_all_single.default))
EXCHANGES = _ALL_TO_ALL | {
    torch.ops.c10d._allgather_base_.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
}
