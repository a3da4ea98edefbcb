"""The trace of many micro-batches from that of four: after the first ones, each does what the one before it did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .trace import Trace

MICRO_BATCHES = 4  # The first makes the gradients, the second still frees what the first left; two are to be compared.


def with_micro_batches(trace: Trace, wanted: int) -> Trace | None:
    """The trace of training with `wanted` micro-batches a step, from one with MICRO_BATCHES; None if not proven.

    A micro-batch is a forward and a backward phase, and a step phase follows the last. In each step the last two must
    be the same entry by entry, down to which entry of theirs or of the one before allocated what is released. Then
    what comes after the last is as if there had been more.
    """
    group = ("forward", "backward") * MICRO_BATCHES + ("step",)
    steps, more = len(trace.names) // len(group), wanted - MICRO_BATCHES
    if trace.names != group * steps:
        return None
    for step in reversed(range(steps)):
        last = 2 * (step * len(group) + 2 * (MICRO_BATCHES - 1)) + 1  # the span of its forward
        before, start, end = np.searchsorted(trace.span, (last - 4, last, last + 4)).tolist()
        length = end - start
        if start - before != length or not _alike(trace, before, start, end):
            return None
        trace = _inserted(trace, start, end, more)
    names = ("forward", "backward") * wanted + ("step",)
    return replace(trace, names=names * steps, held=None)


def _alike(trace: Trace, before: int, start: int, end: int) -> bool:
    """Whether the entries from `before` to `start` come again from there to `end`, and nothing later refers to them."""
    one, two = slice(before, start), slice(start, end)
    later = trace.born[end:]
    return (
        np.array_equal(trace.born[one] + (start - before), trace.born[two])
        and np.array_equal(trace.nbytes[one], trace.nbytes[two])
        and np.array_equal(trace.category[one], trace.category[two])
        and np.array_equal(trace.stream[one], trace.stream[two])
        and np.array_equal(trace.span[one] + 4, trace.span[two])
        and bool((trace.born[two] >= before).all())
        and not bool(((later >= before) & (later < start)).any())
    )


def _inserted(trace: Trace, start: int, end: int, more: int) -> Trace:
    """The trace with the entries from `start` to `end` another `more` times."""
    length, turns = end - start, np.arange(1, more + 1)[:, None]
    later = trace.born[end:]
    born = [trace.born[:end], (trace.born[start:end] + turns * length).ravel()]
    born.append(np.where(later >= start, later + more * length, later))
    span = [trace.span[:end], (trace.span[start:end] + turns * 4).ravel(), trace.span[end:] + 4 * more]
    nbytes, category, stream = (
        np.concatenate([values[:end], np.tile(values[start:end], more), values[end:]])
        for values in (trace.nbytes, trace.category, trace.stream)
    )
    return Trace(np.concatenate(born), nbytes, category, np.concatenate(span), trace.names, stream=stream)
