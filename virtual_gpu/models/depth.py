"""How deep a model is, shallower ones of its kind, and what a deep one does from what those do."""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import NoSuchLayer
from ..remembered import forget, note, taken
from ..trace.depth import TURNS, Continuation, continuation, on_a_line
from ..trace.trace import Trace
from .build import build_model, check_depth

Numbers = Mapping[Any, int]
KEPT = 128  # a few hundred KiB each
LEADING = 4  # so many turns more may go by until the layers are alike: experts come after dense layers
WAYS = 3  # that runs of one kind go on, by their micro-batch and length


def text_config(config: Any) -> Any:
    """The part of a config that says how deep and how long the language model is: a part where it also sees images."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def with_depth(config: Any, layers: int) -> Any:
    """A copy of the config with that many layers."""
    return with_layers(config, range(layers))


def with_layers(config: Any, which: Sequence[int]) -> Any:
    """A copy of the config with these of its layers, by their numbers, in this order."""
    config, layers = copy.deepcopy(config), len(which)
    text = text_config(config)
    lists, overrides = _of_layers(text), _overrides(text)
    for name, value in lists.items():
        # Llama 4 has the numbers of the layers that have experts: where all have, that says nothing.
        setattr(text, name, value[:layers] if _is_numbers(value) else [value[layer] for layer in which])
    text.num_hidden_layers = layers
    if overrides:
        text.per_layer_config = {n: overrides[layer] for n, layer in enumerate(which) if layer in overrides}
    if (getattr(text, "num_kv_shared_layers", None) or 0) >= layers:
        text.num_kv_shared_layers = 0  # there is no earlier layer left to share with
    return config


class Turns(NamedTuple):
    """How a model's layers take turns: `before` that take none, then `turns` times `turn` of them.

    alike: a layer of each kind, where kinds that the config tells apart are to be seen to do the same: after their
    first ones, which are `before`, each layer is a turn then.
    """

    before: int
    turn: int
    turns: int
    alike: tuple[int, ...] = ()

    def layers(self, turns: int) -> tuple[int, ...]:
        """Which of the model's layers a model of so many turns has."""
        if not self.alike:
            return tuple(range(self.before + turns * self.turn))
        return (*range(self.before), *(self.alike[turn % len(self.alike)] for turn in range(turns)))

    @property
    def first(self) -> int:
        """The fewest turns that make two layers, a first and a last one, and have a layer of each kind."""
        return 0 if self.alike else 1 if len(self.layers(1)) > 1 else 2

    def work(self, start: int) -> int:
        """The layers of two runs together, of which the shorter one has so many turns."""
        return sum(len(self.layers(start + more)) for more in (0, TURNS))


def turns_of(config: Any) -> Turns | None:
    """How a config's layers take turns: one by one where all are alike.

    None where shallow runs are more work, where layers differ without taking turns, where there are two depths (an
    encoder-decoder), and where the last layers use the keys and values of earlier ones. ValueError for more layers than
    any model has.
    """
    if not (kinds := _kinds_of(config)):
        return None
    depth, found = len(kinds), []
    for turn in range(1, depth // TURNS):
        for before in range(depth % turn, depth - TURNS * turn, turn):
            one = Turns(before, turn, (depth - before) // turn)
            if one.work(one.first) > depth:
                break
            if kinds[before:] == kinds[before : before + turn] * one.turns:
                found.append(one)
                break
    return min(found, key=lambda one: len(one.layers(2)), default=None)


def turns_alike(config: Any) -> Turns | None:
    """How they take turns one by one if their kinds, as many as two shallow runs can compare, do the same.

    So it is where the kinds are attention to a window and to all, and the window's mask is no smaller (Gemma 3,
    gpt-oss). They differ in where the first one of each is: what all of its kind read (rotary embeddings, a mask) goes
    when it has gone backward. The longer run ends with the other kind than the shorter one, so that each is a last one
    and follows its like. None where no runs of fewer layers would tell.
    """
    kinds = _kinds_of(config)
    places = {kind: place for place, kind in reversed([*enumerate(kinds)])}
    before = max(places.values(), default=0) + 1
    if len(places) != TURNS:
        return None
    turns = Turns(before, 1, len(kinds) - before, tuple(sorted(places.values(), reverse=True)))
    return turns if turns.work(turns.first) <= len(kinds) else None


def _kinds_of(config: Any) -> list[str]:
    """What a config says of each layer; empty where that is not all that they hang on."""
    check_depth(config)
    text = text_config(config)
    # Gemma 3n and 4 have last layers that use the keys and values of earlier ones: which, hangs on the whole depth.
    if getattr(text, "num_kv_shared_layers", 0) or getattr(config, "is_encoder_decoder", False):
        return []
    lists = [value for value in _of_layers(text).values() if not _is_numbers(value)]
    overrides = _overrides(text)
    return [repr((*(value[n] for value in lists), overrides.get(n))) for n in range(text.num_hidden_layers)]


def kind_of_batch(samples: int) -> int:
    """What a batch's size says of how runs go on: transformers looks for packed samples in one of a single sample."""
    return min(samples, 2)


class Deepening(NamedTuple):
    """What two shallow runs have shown: what one between them should leave, and how the deep one follows from it.

    layers: those that it has. beside: what it leaves beside its trace. trace: how the deep trace follows from its
    trace. numbers: what the deep run leaves beside its trace.
    """

    layers: tuple[int, ...]
    beside: Numbers
    trace: Continuation
    numbers: dict[Any, int]


_NAME = "from_shallow"
_shown: dict[tuple, tuple[Deepening, ...]] = {}  # the last found first
_began: dict[tuple[bytes, Turns, int], int] = {}  # how a config's runs went on last: the turns of the shorter one
_unlike: set[tuple[bytes, int]] = set()  # configs, and lengths with which their kinds of layers were seen to differ


def forget_shallow_runs() -> None:
    """Forget what shallow runs have shown, for a measurement that begins with nothing."""
    _shown.clear()
    _began.clear()
    _unlike.clear()
    forget(_NAME)


def from_shallow(
    config: Any,
    run: Callable[[Any], tuple[Trace, Numbers]],
    like: Any = None,
    deeper: int = 0,
    length: int = 0,
    names: Sequence[str] = (),
) -> tuple[Trace, dict[Any, int]] | None:
    """What `run(config)` gives, from two shallow runs; None where they are more work, or contradict each other.

    run: a config → (its trace, numbers beside it). The one way from shallow to deep: the model's parameters must lie on
    the line shape by shape, its traces must continue (`trace.depth`), and every number must lie on a line. The first
    has two layers at least, a first and a last one, and the second two turns more. Where they do not go on so, two that
    are one turn deeper are tried, and are all that later calls with this config try. deeper: turns by which the first
    ones are, where it is known that they have to be. like: all of a run but the config and its length, and the kind of
    its batch. Where earlier calls with such runs have shown how they go on, one run is enough whose depth lies between
    theirs and that does, but for the sizes, what they say of it. length: tokens. names: what modules are found by;
    where that may tell layers apart (`names_layers`) nothing is shallow.
    Kinds of layers are taken for one where runs with one more of each have them do the same, entry by entry
    (`turns_alike`); that run is then the longer one again, in which the kinds are compared once more. The numbers
    beside a trace are taken to be the same of both kinds then.
    """
    if names_layers(names):
        return None
    runs: dict[tuple[int, ...], tuple[Trace, Numbers]] = {}

    def run_of(layers: tuple[int, ...]) -> tuple[Trace, Numbers]:
        if layers not in runs:
            runs[layers] = run(with_layers(config, layers))
        return runs[layers]

    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode()).digest()
    key = _NAME, type(config).__qualname__, digest, like
    for known in _ways(key) if like is not None else ():
        shallow, beside = run_of(known.layers)
        if beside == known.beside and (trace := known.trace.of(shallow)) is not None:
            return trace, known.numbers
    for turns, start in _starts(config, digest, deeper, length):
        (short, one), (long, other) = (run_of(turns.layers(start + more)) for more in (0, TURNS))
        more, seen = turns.turns - start, len(turns.alike) or 1
        found = continuation(short, long, more, seen)
        between, beside = (on_a_line(one, other, number, TURNS) for number in (seen, more))
        if found is None or between is None or beside is None or (trace := found.of(found.like)) is None:
            continue
        _began[digest, turns, deeper] = start
        if like is not None:
            way = Deepening(turns.layers(start + seen), between, found, beside)
            _shown[key] = (way, *_ways(key))[:WAYS]
            note(key, _shown[key])
            if len(_shown) > KEPT:
                del _shown[next(iter(_shown))]  # the oldest
        return trace, beside
    return None


def _starts(config: Any, digest: bytes, deeper: int, length: int) -> Iterator[tuple[Turns, int]]:
    """The turns, and how many of them the shorter of two runs has, that may be seen to go on to the config's depth."""
    for turns in (None if (digest, length) in _unlike else turns_alike(config), turns_of(config)):
        first = turns and _alike_from(config, turns, turns.first + deeper)
        if first is None:
            continue
        starts = {max(first, _began.get((digest, turns, deeper), 0)), first + 1}
        for start in [first] if turns.alike else sorted(starts):
            if turns.work(start) > text_config(config).num_hidden_layers:
                continue
            yield turns, start
            if turns.alike:  # it did not go on: another is asked for
                _unlike.add((digest, length))


def _ways(key: tuple) -> tuple[Deepening, ...]:
    """How runs of this kind are known to go on, from this process and those that it learned from."""
    if learned := taken(key):
        _shown[key] = (*_shown.get(key, ()), *learned)[:WAYS]
    return _shown.get(key, ())


def names_layers(names: Sequence[str]) -> bool:
    """Whether a name, or an expression, that modules are found by may tell layers by their numbers.

    Of a number that is part of a word ("fc1", "dense_h_to_4h") it does not; "layers.3", "layers.[0-5]" or "\\d" may.
    """
    return any(re.search(r"(?<![A-Za-z0-9_])\d|\\d", name) for name in names)


def linear_in_depth(config: Any, numbers: Callable[[Any], Numbers], names: Sequence[str] = ()) -> Numbers:
    """`numbers(config)`, linear in the depth: from shallow models where that is less work.

    For what is a sum over layers by its meaning (bytes of weights, FLOPs); a trace wants `from_shallow`. names: as
    there.
    """
    if names_layers(names) or (few := _as_sum(config)) is None:
        return numbers(config)
    try:
        return _added_up(few, lambda layers: numbers(with_layers(config, layers)))
    except NoSuchLayer:  # an adapter's target that only the full depth has
        return numbers(config)


class _Sum(NamedTuple):
    """A model as one of few layers and what others, each with some more, have beyond it, so many times."""

    few: tuple[int, ...]
    more: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def layers(self) -> int:
        """Of all these models together."""
        return sum(map(len, (self.few, *(more for more, _ in self.more))))


def _added_up(few: _Sum, numbers: Callable[[tuple[int, ...]], Numbers]) -> dict[Any, int]:
    base = numbers(few.few)
    total = dict(base)
    for more, times in few.more:
        of_more = numbers(more)
        for name in (*base, *(name for name in of_more if name not in base)):
            total[name] = total.get(name, 0) + times * (of_more.get(name, 0) - base.get(name, 0))
    return total


def _has_the_parameters(config: Any, few: _Sum) -> bool:
    """Whether it has those of the config, shape by shape."""
    added_up = _added_up(few, lambda layers: _parameters_of(with_layers(config, layers)))
    return Counter(added_up) == _parameters_of(config)


def _as_sum(config: Any) -> _Sum | None:
    """The least work of which the config has the parameters; None where itself is no more."""
    kinds, sums = _kinds_of(config), []
    if (turns := turns_of(config)) and (first := _alike_from(config, turns, 1)) is not None:
        sums.append(_Sum(turns.layers(first), ((turns.layers(first + 1), turns.turns - first),)))
    counts = Counter(kinds)
    if len(counts) > 1:  # each kind for itself, whatever their order
        few = tuple(map(kinds.index, counts))
        sums.append(_Sum(few, tuple((tuple(sorted((*few, kinds.index(one)))), counts[one] - 1) for one in counts)))
    less = sorted((one for one in sums if one.layers < len(kinds)), key=lambda one: one.layers)
    return next((one for one in less if _has_the_parameters(config, one)), None)


def _of_layers(config: Any) -> dict[str, list]:
    """The lists of a config that are as long as the model is deep: they say something of each layer."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple))}
    return {name: value for name, value in lists.items() if value and len(value) == config.num_hidden_layers}


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """What a config says of single layers, by their numbers (Gemma 4: the heads of those that attend to all)."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(layer): values for layer, values in config.to_dict()["per_layer_config"].items()}


def _is_numbers(of_layers: Sequence) -> bool:
    """Whether a list has the layers' numbers: of the layers that have experts, say, where all have."""
    return [*of_layers] == [*range(len(of_layers))]


def _alike_from(config: Any, turns: Turns, first: int) -> int | None:
    """After how many turns, `first` at least, each further one adds the same parameters.

    None where that is not found among so few that two shallow models are less work than the config's.
    """
    some = range(first, min(first + LEADING, (turns.turns - TURNS) // 2 + 1))
    return next((n for n in some if grows_evenly(config, turns, n)), None)


def grows_evenly(config: Any, turns: Turns, start: int) -> bool:
    """Whether the config has the parameters that a straight line says, through so many turns and one more.

    Counted shape by shape. They are not where another kind of layer only comes later, and of kinds that are to be alike
    where one of them has others.
    """
    to = (start, start + 1, start + (len(turns.alike) or 1))
    one, two, last = (_parameters_of(with_layers(config, turns.layers(n))) for n in to)
    on_line = (Counter(on_a_line(one, two, n - start)) for n in (to[-1], turns.turns))
    return [*on_line] == [last, _parameters_of(config)]


_parameters: dict[tuple[type, str], Counter] = {}  # of a config, all that it says


def _parameters_of(config: Any) -> Counter:
    """(shape, dtype) → how many parameters are like this, tied ones once."""
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _parameters:
        model = build_model(config, torch.float16)
        _parameters[key] = Counter((tuple(p.shape), p.dtype) for p in model.parameters())
    return _parameters[key]
