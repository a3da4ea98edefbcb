"""Edits of a trace: what the same run would ask for under DDP, in the middle of an accumulation, on more ranks.

Each takes a trace and gives a new one, which the allocator then finds room for; nothing is added to a peak afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..allocator import MIB, round_size
from .timeline import CATEGORIES
from .trace import Trace

FIRST_BUCKET_BYTES = MIB  # kDefaultFirstBucketBytes
BUCKET_BYTES = 25 * MIB  # kDefaultBucketBytesCap, bucket_cap_mb
_GRADIENTS = CATEGORIES.index("gradients")
_COLUMNS = ("nbytes", "category", "span", "stream")


def held_from_the_start(trace: Trace, sizes: Sequence[int], category: str, stream: int = 0) -> Trace:
    """With blocks of these sizes (bytes) that were there before the first phase, and stay."""
    return _with(trace, [0.5 + _start(trace)] * len(sizes), sizes, CATEGORIES.index(category), 0, stream)


def held_from(trace: Trace, name: str, sizes: Sequence[int], category: str) -> Trace:
    """With blocks of these sizes (bytes) that come right before the first phase of this name, and stay."""
    phase = trace.names.index(name)
    place = float(np.searchsorted(trace.span, 2 * phase + 1)) - 0.5
    return _with(trace, [place] * len(sizes), sizes, CATEGORIES.index(category), 2 * phase, 0)


def accumulating(trace: Trace) -> Trace:
    """A micro-batch after the first of a step: its gradients have been there from the start.

    Those that backward makes are added to them, and go (AccumulateGrad; FSDP2's foreach_reduce).
    """
    made = _made(trace)
    held = _with(
        _momentary(trace, made),
        [0.5 + _start(trace)] * len(made),
        trace.nbytes[made],
        _GRADIENTS,
        0,
        trace.stream[made],
    )
    return held


def with_ddp(trace: Trace, *, gradient_as_bucket_view: bool = False) -> Trace:
    """The same run under DistributedDataParallel, whose reducer keeps every gradient in flat buckets too.

    By default they are a second copy of the gradients. With `gradient_as_bucket_view` a gradient, once copied into its
    bucket, is a view of it. Before the first optimizer step there is one bucket (DistributedDataParallel, class
    _BucketCapacityConfig); the next forward makes those of `bucket_sizes` instead, in the order in which the gradients
    came (Reducer::rebuild_buckets, torch/csrc/distributed/c10d/reducer.cpp). A trace without an optimizer step is taken
    for one of a later step. PyTorch 1.7 to 2.13.

    Not here: the broadcast of rank 0's parameters in flat pieces of 250 MiB before the first step. It comes before
    gradients and optimizer state, so that only a step of small adapters can stay below it. A program that is run as it
    is (`program.ranks`) makes it.
    """
    made = _made(trace)
    first = made[trace.span[made] == trace.span[made[0]]] if len(made) else made
    sizes, kind = trace.nbytes[first].tolist(), CATEGORIES.index("gradients" if gradient_as_bucket_view else "other")
    buckets, start = bucket_sizes(sizes), 0.5 + _start(trace)
    step = trace.names.index("step") if "step" in trace.names else None
    if gradient_as_bucket_view:
        trace = _momentary(trace, made)
    if step is None:
        return _with(trace, [start] * len(buckets), buckets, kind, 0, 0)
    trace = _with(trace, [start], [sum(sizes)], kind, 0, 0)
    before = 2 * (step + 1)  # the span between the first step and what follows it
    place = float(np.searchsorted(trace.span, before, "right")) - 0.5
    whole = _start(trace)  # the entry that was just put in, the last of those at the start
    trace = _sorted(trace, [place], np.array([whole]), trace.nbytes[[whole]], kind, before, 0)
    return _with(trace, [place + 1] * len(buckets), buckets, kind, before, 0)


def bucket_sizes(gradients: Sequence[int], first: int = FIRST_BUCKET_BYTES, others: int = BUCKET_BYTES) -> list[int]:
    """Bytes of DDP's buckets for gradients of these bytes, of one dtype, in the order in which they come.

    A bucket is closed by the gradient with which it reaches its limit (compute_bucket_assignment_by_size, reducer.cpp).
    """
    buckets, filled, limit = [], 0, first
    for nbytes in gradients:
        filled += nbytes
        if filled >= limit:
            buckets.append(filled)
            filled, limit = 0, others
    return [*buckets, filled] if filled else buckets


def with_phase(trace: Trace, place: int, name: str, other: Trace, emptied: bool = False) -> Trace:
    """With all that another trace does in its phases as one phase more, before that of a place.

    What was there at the other's start is taken to be there. emptied: the allocator's cache is given back before it.
    ValueError where it releases any of what was there.
    """
    begin = int(np.searchsorted(other.span, 0, "right"))
    if (other.born[begin:] < begin).any():
        raise ValueError(f"{name}: releases what was there before it")
    at, more = int(np.searchsorted(trace.span, 2 * place + 1)), len(other) - begin

    def column(attribute: str, shift: int, own: np.ndarray) -> np.ndarray:
        values = getattr(trace, attribute)
        return np.concatenate([values[:at], own, values[at:] + shift])

    later = np.where(trace.born >= at, trace.born + more, trace.born)
    born = np.concatenate([later[:at], other.born[begin:] - begin + at, later[at:]])
    nbytes, category, stream = (column(one, 0, getattr(other, one)[begin:]) for one in ("nbytes", "category", "stream"))
    span = column("span", 2, np.full(more, 2 * place + 1))
    names, empty = (*trace.names[:place], name, *trace.names[place:]), (name,) if emptied else ()
    return Trace(born, nbytes, category, span, names, stream=stream, emptied=(*trace.emptied, *empty))


def scaled(trace: Trace, which: np.ndarray, ratio: float) -> Trace:
    """With the blocks that these allocations (a mask) take, `ratio` times as large, rounded up to 512 bytes."""
    resized = which[trace.born]
    nbytes = np.where(resized, [round_size(int(np.ceil(n * ratio))) for n in trace.nbytes.tolist()], trace.nbytes)
    return replace(trace, nbytes=nbytes, held=None)


def resized(trace: Trace, entries: np.ndarray, nbytes: int) -> Trace:
    """With the blocks that these entries allocate, so many bytes large."""
    sizes = np.where(np.isin(trace.born, entries), nbytes, trace.nbytes)
    return replace(trace, nbytes=sizes, held=None)


def _start(trace: Trace) -> int:
    """The last entry of what was there before the first phase."""
    return int(np.searchsorted(trace.span, 0, "right")) - 1


def _made(trace: Trace) -> np.ndarray:
    """The entries that allocate gradients."""
    return np.flatnonzero(trace.allocates & (trace.category == _GRADIENTS) & (trace.span > 0))


def _momentary(trace: Trace, made: np.ndarray) -> Trace:
    """Gradients that live until the next one is made, or until their phase ends: they have gone elsewhere by then."""
    ends = np.searchsorted(trace.span, trace.span[made], "right") - 0.5
    following = np.append(made[1:], len(trace)) + 0.5
    gone = np.isin(trace.born, made) & ~trace.allocates
    trace = _sorted(trace, np.minimum(ends, following), made, trace.nbytes[made], _GRADIENTS, trace.span[made],
                    trace.stream[made], without=gone)  # fmt: skip
    return trace


def _with(trace: Trace, keys: Sequence[float], nbytes: Sequence[int], category: int, span: int, stream: int) -> Trace:
    """With allocations that stay: each stands behind the entry below its key."""
    nbytes = [round_size(int(n)) for n in nbytes]
    return _sorted(trace, keys, None, nbytes, category, span, stream)


def _sorted(
    trace: Trace, keys: Sequence[float], born: np.ndarray | None, nbytes, category, span, stream, without=None
) -> Trace:
    """With new entries where their keys say, and without some; `born`: what they release (None: they allocate)."""
    n, k = len(trace), len(keys)
    births = np.concatenate([trace.born, np.arange(n, n + k) if born is None else born])
    given = (nbytes, category, span, stream)
    columns = [
        np.concatenate([getattr(trace, name), np.broadcast_to(np.asarray(values, dtype=np.int64), (k,))])
        for name, values in zip(_COLUMNS, given, strict=True)
    ]
    order = np.argsort(
        np.concatenate([np.arange(n, dtype=np.float64), np.asarray(keys, dtype=np.float64)]), kind="stable"
    )
    if without is not None:
        order = order[~np.append(without, np.zeros(k, dtype=bool))[order]]
    place = np.empty(n + k, dtype=np.int64)
    place[order] = np.arange(len(order))
    nbytes, category, span, stream = (column[order] for column in columns)
    return replace(
        trace, born=place[births[order]], nbytes=nbytes, category=category, span=span, stream=stream, held=None
    )
