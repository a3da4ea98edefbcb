"""The trace of a deep model from shallow ones: equal, entry by entry, or refused."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from virtual_gpu.models.depth import Turns, names_layers, turns_alike, turns_of, with_layers
from virtual_gpu.trace import depth as depth_module
from virtual_gpu.trace.depth import continuation
from virtual_gpu.trace.recorder import TimelineRecorder

SIZES = st.lists(st.sampled_from([512, 1024, 4096]), max_size=4)
# What a layer does: weights that are there, activations that are kept and temporaries, gradients, the step's lists.
PROGRAM = st.fixed_dictionaries(
    {name: SIZES for name in ("weights", "kept", "temporary", "gradients", "lists", "edge")}
    | {"backwards": st.booleans(), "head": st.booleans()}
)


class Run:
    """A training step with the loops of a program, at some depth."""

    def __init__(self, program, layers, grow=lambda layer, layers: 0):
        self.next = 1
        before = {}
        for size in program["edge"] + program["weights"] * layers:
            before[self.next] = (size, size, "parameters")
            self.next += 1
        self.recorder = TimelineRecorder(before)
        for _ in range(2):
            self.step(program, layers, grow)
        self.trace = self.recorder.trace()

    def take(self, sizes, category="activations"):
        taken = range(self.next, self.next + len(sizes))
        for block, size in zip(taken, sizes, strict=True):
            self.recorder.allocated(block, size, size, category, int(category == "gradients"))
        self.next += len(sizes)
        return list(taken)

    def drop(self, blocks):
        for block in blocks:
            self.recorder.freed(block)

    def step(self, program, layers, grow):
        kept, gradients = [], []
        self.recorder.enter("forward")
        kept.append(self.take(program["edge"]))
        for layer in range(layers):
            mine = self.take(program["kept"])
            more = grow(layer, layers)
            self.drop(self.take(program["temporary"] + [512 * more] * (more > 0)))
            kept.append(mine)
        if program["head"]:
            kept.append(self.take(program["edge"] + program["kept"]))
        self.recorder.leave()
        self.recorder.enter("backward")
        for mine in reversed(kept):
            gradients.append(self.take(program["gradients"], "gradients"))
            self.drop(reversed(mine))
        self.recorder.leave()
        self.recorder.enter("step")
        lists = [self.take(program["lists"]) for _ in range(layers)]
        for mine in reversed(lists) if program["backwards"] else lists:
            self.drop(mine)
        self.recorder.leave()
        for mine in gradients:
            self.drop(mine)


def continued(short, long, more):
    found = continuation(short, long, more)
    return found and found.of(found.like)


def same(a, b):
    return a.names == b.names and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("born", "nbytes", "category", "span", "stream")
    )


FULL = {
    "weights": [4096, 512], "kept": [512, 1024], "temporary": [4096], "gradients": [4096, 512],
    "lists": [512, 512, 1024], "edge": [1024, 512], "backwards": True, "head": True,
}  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(PROGRAM, st.integers(0, 9))
@example(FULL, 30)
@example(FULL | {"backwards": False, "head": False, "edge": []}, 3)
def test_what_is_continued_is_what_a_deep_run_does(program, more):
    found = continuation(*(Run(program, layers).trace for layers in (2, 4)), more)
    assert same(found.of(found.like), Run(program, 2 + more).trace)
    assert same(found.like, Run(program, 3).trace)


@pytest.mark.parametrize(
    "grow",
    [
        lambda layer, layers: layers,  # a temporary as large as the model is deep
        lambda layer, layers: layer + 1,  # one that grows from layer to layer
        lambda layer, layers: int(layers == 4 and layer == 2),  # one that only four layers have
        lambda layer, layers: int(layer % 2 == 0),  # every other layer
    ],
    ids=["with the depth", "with the layer", "at four", "every other"],
)
def test_what_is_not_a_loop_is_refused(grow):
    assert continued(*(Run(FULL, layers, grow).trace for layers in (2, 4)), 6) is None


def test_traces_of_other_phases_are_refused():
    short, long = (Run(FULL, layers) for layers in (2, 4))
    long.recorder.enter("forward")
    long.recorder.leave()
    assert continued(short.trace, long.recorder.trace(), 6) is None


@pytest.mark.parametrize(
    ("kinds", "turns"),
    [
        (None, (0, 1, 24)),
        (["full"] * 30, (0, 1, 30)),
        (["full"] * 5, None),  # not less work
        (["sliding", "full"] * 6, (0, 2, 6)),
        (["dense"] + ["sparse"] * 60, (1, 1, 60)),
        ((["sliding"] * 5 + ["full"]) * 10 + ["sliding"] * 2, (2, 6, 10)),
        (list(range(24)), (0, 1, 24)),
        (["sliding", "full"] * 5, (0, 2, 5)),
        (["sliding"] * 29 + ["full"], None),
    ],
)
def test_how_layers_take_turns(kinds, turns):
    config = SimpleNamespace(num_hidden_layers=len(kinds) if kinds else 24)
    if kinds:
        config.layer_types = kinds
    assert turns_of(config) == (turns and Turns(*turns))


@pytest.mark.parametrize(
    ("kinds", "turns"),
    [
        ((["sliding"] * 5 + ["full"]) * 4 + ["sliding"] * 2, (6, 1, 20, (5, 0))),
        (["sliding", "full"] * 3, (2, 1, 4, (1, 0))),
        (["sliding"] * 5 + ["full"] + ["sliding"] * 7, None),  # not less work
        (["full"] * 24, None),
        (["sliding", "full", "none"] * 8, None),  # two turns compare two kinds
    ],
)
def test_kinds_that_may_do_the_same(kinds, turns):
    config = SimpleNamespace(num_hidden_layers=len(kinds), layer_types=kinds)
    assert turns_alike(config) == (turns and Turns(*turns))
    if turns:
        shallow = [with_layers(config, Turns(*turns).layers(more)).layer_types for more in (0, 2)]
        assert {*shallow[1][len(shallow[0]) :]} == {*kinds}
        assert shallow[1][: len(shallow[0])] == shallow[0] == kinds[: turns[0]]


def test_turns_are_compared_in_every_run_that_goes_on():
    """A shorter run that has both turns must have them alike, whatever its sizes."""
    ones, threes, uneven = ([Run(FULL, n, grow).trace for n in (2, 4)] for grow in (
        lambda layer, layers: 1, lambda layer, layers: 3, lambda layer, layers: 1 + layer % 2,
    ))  # fmt: skip
    found = continuation(*ones, 6, 2)
    assert same(found.like, ones[1])
    assert same(found.of(threes[1]), Run(FULL, 8, lambda layer, layers: 3).trace)
    assert found.of(uneven[1]) is None
    # A run with one turn more has no other to compare it with.
    assert continuation(*ones, 6).of(Run(FULL, 3, lambda layer, layers: 1 + layer % 2).trace) is not None


def kinds_that_hold(kinds):
    """The trace of layers of which each releases what the last one of its kind left."""
    recorder, made = TimelineRecorder({1: (512, 512, "parameters")}), itertools.count(2)

    def take(nbytes, category="activations"):
        block = next(made)
        recorder.allocated(block, nbytes, nbytes, category, 0)
        return block

    recorder.enter("forward")
    left, kept = {kind: take(2048) for kind in "SF"}, []
    for kind in kinds:
        new = take(2048)
        recorder.freed(left[kind])
        left[kind] = new
        kept.append(take(1024))
    for block in left.values():
        recorder.freed(block)
    recorder.leave()
    recorder.enter("backward")
    for block in reversed(kept):
        recorder.freed(block)
    recorder.leave()
    return recorder.trace()


@pytest.mark.parametrize("kinds", ["SF" + "SSSF" * 3, "SF" + "SFF" * 3, "SSSF" * 4])
def test_kinds_of_which_each_hangs_on_its_last_one_are_not_alike(kinds):
    """In S F | S F the last of a kind is always two before: F S shows that it need not be."""
    config = SimpleNamespace(num_hidden_layers=len(kinds), layer_types=[*kinds])
    turns = turns_alike(config)
    short, long = (kinds_that_hold([kinds[layer] for layer in turns.layers(more)]) for more in (0, 2))
    assert continued(short, long, turns.turns) is None
    found = continuation(short, long, turns.turns, 2)
    assert found is None or found.of(found.like) is None


@pytest.mark.parametrize(
    "names, may",
    [
        (("attention",), False), (("query_key_value", "dense_h_to_4h", "dense_4h_to_h"), False), (("w1", "fc2"), False),
        ((r".*layers\.[123]\.self_attn\.q_proj",), True), (("q_proj", "layers.3.mlp"), True),
        ((r".*\.(1|3)\..*",), True), ((r"layers\.\d\.",), True), (("0.q_proj",), True), ((), False),
    ],
)  # fmt: skip
def test_names_that_may_tell_layers_apart(names, may):
    assert names_layers(names) == may


@pytest.mark.parametrize(
    "column, change", [("nbytes", 512), ("category", 1), ("born", 1), ("born", "later"), ("born", "twice")]
)
def test_a_trace_that_releases_what_is_not_there_is_not_sound(column, change):
    trace = Run(FULL, 3).trace
    allocates = trace.allocates
    assert depth_module._is_sound(trace, allocates)
    values, releases = getattr(trace, column).copy(), np.flatnonzero(~allocates)
    first, second = releases[:2]
    elsewhere = {"later": len(trace) - 1, "twice": values[second]}
    values[first] = elsewhere[change] if change in elsewhere else values[first] + change
    assert not depth_module._is_sound(replace(trace, **{column: values}), allocates)


def test_what_is_not_sound_is_not_given_out(monkeypatch):
    traces = [Run(FULL, layers).trace for layers in (2, 4)]
    monkeypatch.setattr(depth_module, "_is_sound", lambda *_: False)
    assert continued(*traces, 6) is None


def test_births_that_change_places_are_refused():
    """Outside the loops as well a release must be of the same block at every depth."""
    short, last = (Run(FULL | {"edge": [512, 512], "head": False}, layers).trace for layers in (2, 4))
    assert continued(short, last, 6) is not None
    released = np.flatnonzero(~last.allocates)
    edge = np.searchsorted(last.span, 1) + np.arange(2)  # the first forward begins with the two of the edge
    places = released[np.isin(last.born[released], edge)]
    born = last.born.copy()
    born[places] = born[places][::-1]
    assert continued(short, replace(last, born=born), 6) is None
