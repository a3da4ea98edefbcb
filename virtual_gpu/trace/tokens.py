"""The trace of a text of many tokens from that of a few: they go on alike, with a cache that is longer each time."""

from __future__ import annotations

import numpy as np

from ..allocator import MIB
from .trace import Trace

# Tokens that go on as those before them: a mask is padded to a multiple of 8 tokens at the most (sdpa's kernels).
TURN = 8
BEFORE = 4  # tokens that go otherwise, and those that still release what such have made: two at the most


def first_tokens(tokens: int) -> int:
    """How many of so many are to be run: two turns after the first ones show how it goes on."""
    few = BEFORE + 2 * TURN
    return tokens if tokens <= few else few + (tokens - few) % TURN


def with_tokens(trace: Trace, tokens: int) -> Trace | None:
    """The trace of so many tokens, from one with `first_tokens` phases "token" and what follows them; None if not
    proven.

    The last two turns must do the same and release only what they or the turn before made; their blocks grow by as much
    each turn. Of the turns that are added, but for the last one, only blocks are there that outlive their token, and
    those over 1 MiB: the others are gone with their token, and come from another pool of the allocator, in which the
    first tokens found room.
    """
    phases = [place for place, name in enumerate(trace.names) if name == "token"]
    turns, rest = divmod(tokens - len(phases), TURN)
    if not turns and not rest:
        return trace
    if rest or turns < 0 or len(phases) < BEFORE + 2 * TURN:
        return None
    marks = [phases[-1] + 1 - back * TURN for back in (2, 1, 0)]
    first, last, end = (int(np.searchsorted(trace.span, 2 * place + 1)) for place in marks)
    length, later = end - last, trace.born[end:]
    pattern = trace.born[last:end] - last
    if last - first != length or not _same(trace, first, last, length):
        return None
    if (pattern < -length).any() or ((later >= first) & (later < last)).any():
        return None
    size, growth = trace.nbytes[last:end], trace.nbytes[last:end] - trace.nbytes[first:last]
    made = np.where(pattern < 0, pattern + length, pattern)  # the allocation, by its place in its turn
    # Its block's size is the one that it had when it was made, a turn earlier where that was then.
    ago = (pattern < 0).astype(np.int64)
    span = trace.span[last:end]
    momentary = np.zeros(length, dtype=bool)
    inside = np.flatnonzero((pattern >= 0) & (pattern != np.arange(length)))
    momentary[pattern[inside]] = span[pattern[inside]] == span[inside]
    few = np.flatnonzero(~momentary[made] | (size[made] + turns * growth[made] > MIB))
    parts = [few] * (turns - 1) + [np.arange(length)]
    stands = np.arange(last, end)  # where the entries of the turn before stand
    born, nbytes, at = [trace.born[:end]], [trace.nbytes[:end]], end
    for turn, part in enumerate(parts, 1):
        before, stands = stands, np.full(length, -1)
        stands[part] = at + np.arange(len(part))
        at += len(part)
        born.append(np.where(ago[part], before[made[part]], stands[made[part]]))
        nbytes.append(size[made[part]] + (turn - ago[part]) * growth[made[part]])
    of_turn = (later >= last) & (later < end)
    place = np.where(of_turn, later - last, 0)
    born.append(np.where(of_turn, stands[place], np.where(later >= end, later + at - end, later)))
    nbytes.append(np.where(of_turn, size[place] + turns * growth[place], trace.nbytes[end:]))
    index = np.concatenate([np.arange(end), *(last + part for part in parts), np.arange(end, len(trace))])
    spans = trace.span[index]
    spans[end:at] = 2 * phases[-1] + 1  # the phase of the last token that was run
    return Trace(
        np.concatenate(born), np.concatenate(nbytes), trace.category[index], spans, trace.names,
        stream=trace.stream[index],
    )  # fmt: skip


def _same(trace: Trace, one: int, other: int, length: int) -> bool:
    """Whether so many entries from either place on are about the same blocks, whatever their sizes."""
    a, b = slice(one, one + length), slice(other, other + length)
    same = np.array_equal(trace.born[a] - one, trace.born[b] - other)
    same &= np.array_equal(trace.span[a] + 2 * TURN, trace.span[b])
    return same and all(np.array_equal(column[a], column[b]) for column in (trace.category, trace.stream))
