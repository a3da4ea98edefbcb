"""The trace of many micro-batches from that of a few: after the first ones, each does what the one before it did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .repeats import alike
from .timeline import CATEGORIES
from .trace import Trace

# Of the two optimizer steps of a run. In the first step the first micro-batch makes the gradients, and two are to be
# compared. The second step has to show that it begins the same way.
MICRO_BATCHES, LATER = 3, 1


def with_micro_batches(trace: Trace, wanted: int) -> Trace | None:
    """The trace of training with `wanted` micro-batches a step, from one with so many in the first step, or with
    MICRO_BATCHES where it wants more, and LATER in the second; None if not proven.

    A micro-batch is a forward and a backward phase, and a step phase follows the last. The last one of the first step
    must release nothing older than itself, what follows must release nothing of it, and where more are wanted it must
    be `alike` the one before it: then what comes after it is as if there had been more. The one of the second step must
    do what the first of the first step did, but for what that did once (`_goes_again`): then it goes on as that step
    did.
    """
    number = min(wanted, MICRO_BATCHES)
    first, second = (("forward", "backward") * times + ("step",) for times in (number, LATER))
    if trace.names != first + second:
        return None

    def begin(phase: int) -> int:
        return int(np.searchsorted(trace.span, 2 * phase + 1))

    # Where the micro-batches of the first step begin, what follows them, and the one of the second step.
    one, two, last, end = (begin(2 * place) for place in (0, 1, number - 1, number))
    again, step = begin(len(first)), begin(len(first) + 2)
    length, later = end - last, trace.born[end:]
    if (trace.born[last:end] < last).any() or ((later >= two) & (later < end)).any():
        return None
    if wanted > number and not (last - two == length and alike(trace, two, length)):
        return None
    if not _goes_again(trace, slice(one, two), slice(again, step)):
        return None
    one_more = slice(last, end)
    trace = _with_more(trace, one_more, step, wanted - LATER, len(first) + 2 - 2 * (number - 1))
    trace = _with_more(trace, one_more, end, wanted - number, 2)
    return replace(trace, names=(*("forward", "backward") * wanted, "step") * 2, held=None)


def with_more_in_flight(trace: Trace, more: int) -> Trace | None:
    """The trace of a pipeline's stage with `more` micro-batches of its steady phase; None if not proven.

    There a forward of one micro-batch is followed by the backward of an earlier one, so that a turn releases what turns
    before it have made. A turn must do what the one before it did, a turn later, down to the entry that made what is
    released: then further ones do, and what comes after them releases what the last of them have made.
    """
    forwards = [phase for phase, name in enumerate(trace.names) if name == "forward"]
    for one, two in zip(forwards[-2::-1], forwards[:0:-1], strict=True):  # the last turns first
        if (slices := _turns(trace, one, two)) is not None:
            return _lengthened(trace, two, *slices, more)
    return trace if not more else None


def _turns(trace: Trace, one: int, two: int) -> tuple[slice, int] | None:
    """(the entries of the turn from the phase `two` on, how many phases it has), where it does what the other did."""
    phases = two - one
    begin, middle, end = (int(np.searchsorted(trace.span, 2 * phase + 1)) for phase in (one, two, two + phases))
    first, last, length = slice(begin, middle), slice(middle, end), end - middle
    same = middle - begin == length and all(
        np.array_equal(getattr(trace, name)[first] + shift, getattr(trace, name)[last])
        for name, shift in (("born", length), ("span", 2 * phases), ("nbytes", 0), ("category", 0), ("stream", 0))
    )
    return (last, phases) if same else None


def _lengthened(trace: Trace, place: int, turn: slice, phases: int, more: int) -> Trace:
    """With `more` turns behind one at a phase. What is released of the last turns, is released of the new ones then."""
    length, end, turns = turn.stop - turn.start, turn.stop, np.arange(1, more + 1)[:, None]

    def column(name: str, shift: int, later: np.ndarray) -> np.ndarray:
        values = getattr(trace, name)
        return np.concatenate([values[:end], (values[turn] + turns * shift).ravel(), later])

    reach = end - (turn.start - int(trace.born[turn].min()))  # what was made from here on belongs to turns
    born = trace.born[end:]
    names = trace.names[: place + phases]
    return Trace(
        column("born", length, born + np.where(born >= reach, more * length, 0)),
        *(column(name, 0, getattr(trace, name)[end:]) for name in ("nbytes", "category")),
        column("span", 2 * phases, trace.span[end:] + 2 * phases * more),
        names + trace.names[place : place + phases] * more + trace.names[place + phases :],
        stream=column("stream", 0, trace.stream[end:]),
    )


def _goes_again(trace: Trace, first: slice, again: slice) -> bool:
    """Whether `again` allocates and releases what `first` did, but for what that made to last, and what that replaced.

    That is cuBLAS's workspace, and a bias in another dtype, which bitsandbytes' layers cast once and keep. Of what lay
    there before either, which block is released is not compared.
    """
    entries = np.arange(first.start, first.stop)
    stays = trace.allocates[first] & ~np.isin(entries, trace.born[~trace.allocates])
    weights = trace.category[first] == CATEGORIES.index("parameters")
    replaced = weights & ~trace.allocates[first] & (trace.born[first] < first.start)
    ways = [stays]
    if replaced.any() and (np.cumsum(stays) >= np.cumsum(replaced)).all():  # each after what is there instead
        ways.append(stays | replaced)
    return any(_does(trace, entries, again, once) for once in ways)


def _does(trace: Trace, entries: np.ndarray, again: slice, once: np.ndarray) -> bool:
    """Whether `again` does what these entries did, without those that were done `once`."""
    same, start = entries[~once], entries[0]
    if len(same) != again.stop - again.start:
        return False
    place = np.cumsum(~once) - 1  # of an entry of the first among those that are the same
    born = trace.born[same] - start
    own, others = np.where(born >= 0, place[born], -1), np.maximum(trace.born[again] - again.start, -1)
    return (
        np.array_equal(own, others)
        and np.array_equal(trace.nbytes[same], trace.nbytes[again])
        and np.array_equal(trace.category[same], trace.category[again])
        and np.array_equal(trace.stream[same], trace.stream[again])
        and np.array_equal(trace.span[same] - trace.span[start], trace.span[again] - trace.span[again.start])
    )


def _with_more(trace: Trace, like: slice, at: int, more: int, phases: int) -> Trace:
    """The trace with the entries of a micro-batch `more` times at a place behind another one; so many phases later."""
    length, turns = like.stop - like.start, np.arange(more)[:, None]
    later = trace.born[at:]
    born = [trace.born[:at], (trace.born[like] - like.start + at + turns * length).ravel()]
    born.append(np.where(later >= at, later + more * length, later))
    span = [trace.span[:at], (trace.span[like] + 2 * phases + turns * 4).ravel(), trace.span[at:] + 4 * more]
    nbytes, category, stream = (
        np.concatenate([values[:at], np.tile(values[like], more), values[at:]])
        for values in (trace.nbytes, trace.category, trace.stream)
    )
    return Trace(np.concatenate(born), nbytes, category, np.concatenate(span), trace.names, stream=stream)
