"""The trace of many micro-batches from that of a few: after the first ones, each does what the one before it did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .repeats import alike
from .trace import Trace

# Of the two optimizer steps of a run. In the first step the first micro-batch makes the gradients, the second still
# frees what the first left, and two are to be compared. The second step has to show that it goes the same way.
MICRO_BATCHES, LATER = 4, 2


def with_micro_batches(trace: Trace, wanted: int) -> Trace | None:
    """The trace of training with `wanted` micro-batches a step, from one with MICRO_BATCHES in the first step and
    LATER in the second; None if not proven.

    A micro-batch is a forward and a backward phase, and a step phase follows the last. The last two of the first step
    must be `alike`, and nothing later may release what the last but one left: then what comes after the last is as if
    there had been more. The last one of the second step must be, but for what it releases of the one before it, the
    second of the first step, and so must the third be: then what follows it is what follows that.
    """
    first, second = (("forward", "backward") * number + ("step",) for number in (MICRO_BATCHES, LATER))
    if trace.names != first + second:
        return None

    def begin(phase: int) -> int:
        return int(np.searchsorted(trace.span, 2 * phase + 1))

    # Where the second, third and fourth of the first step begin, what follows them, and the last of the second step.
    two, three, four, end = (begin(2 * place) for place in range(MICRO_BATCHES - 3, MICRO_BATCHES + 1))
    phase = len(first) + 2 * (LATER - 1)
    last, length, later = begin(phase), end - four, trace.born[end:]
    if four - three != length or not alike(trace, three, length) or ((later >= three) & (later < four)).any():
        return None
    lengths = {three - two, begin(phase + 2) - last, length}
    if len(lengths) > 1 or not all(_go_alike(trace, two, other, length) for other in (three, last)):
        return None
    again = phase + 2 - 2 * (MICRO_BATCHES - 1)  # phases from the fourth to the first one that is added
    trace = _with_more(trace, slice(four, end), last + length, wanted - LATER, again)
    trace = _with_more(trace, slice(four, end), end, wanted - MICRO_BATCHES, 2)
    return replace(trace, names=(*("forward", "backward") * wanted, "step") * 2, held=None)


def _go_alike(trace: Trace, start: int, other: int, length: int) -> bool:
    """Whether so many entries from either place on are the same, but for which older ones they release."""
    one, two = slice(start, start + length), slice(other, other + length)
    own, others = trace.born[one] - start, trace.born[two] - other
    return (
        np.array_equal(np.maximum(own, -1), np.maximum(others, -1))
        and np.array_equal(trace.nbytes[one], trace.nbytes[two])
        and np.array_equal(trace.category[one], trace.category[two])
        and np.array_equal(trace.stream[one], trace.stream[two])
        and np.array_equal(trace.span[one] - trace.span[start], trace.span[two] - trace.span[other])
    )


def _with_more(trace: Trace, like: slice, at: int, more: int, phases: int) -> Trace:
    """The trace with the entries of a micro-batch `more` times at a place behind another one; so many phases later."""
    length, turns = like.stop - like.start, np.arange(more)[:, None]
    later = trace.born[at:]
    born = [trace.born[:at], (trace.born[like] - like.start + at + turns * length).ravel()]
    born.append(np.where(later >= at - length, later + more * length, later))
    span = [trace.span[:at], (trace.span[like] + 2 * phases + turns * 4).ravel(), trace.span[at:] + 4 * more]
    nbytes, category, stream = (
        np.concatenate([values[:at], np.tile(values[like], more), values[at:]])
        for values in (trace.nbytes, trace.category, trace.stream)
    )
    return Trace(np.concatenate(born), nbytes, category, np.concatenate(span), trace.names, stream=stream)
