"""How deep a model is, shallower ones of its kind, and what a deep one does from what those do."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import NoSuchLayer
from ..remembered import forget, note, taken
from ..trace.depth import TURNS, Continuation, continuation, on_a_line
from ..trace.trace import Trace
from .build import build_model, check_depth

Numbers = Mapping[Any, int]
KEPT = 128  # a few hundred KiB each
FEWEST = 6  # turns: of fewer, shallow runs are not less work
LEADING = 4  # so many turns more may go by until the layers are alike: experts come after dense layers
WAYS = 3  # that runs of one kind go on, by their micro-batch and length


def text_config(config: Any) -> Any:
    """The part of a config that says how deep and how long the language model is: a part where it also sees images."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def with_depth(config: Any, layers: int) -> Any:
    """A copy of the config with that many layers."""
    config = copy.deepcopy(config)
    text = text_config(config)
    for name, value in {
        **{n: kinds[:layers] for n, kinds in _of_layers(text).items()},
        "num_hidden_layers": layers,
    }.items():
        setattr(text, name, value)
    if (getattr(text, "num_kv_shared_layers", None) or 0) >= layers:
        text.num_kv_shared_layers = 0  # there is no earlier layer left to share with
    return config


class Turns(NamedTuple):
    """How a model's layers take turns: `before` that take none, then `turns` times `turn` of them."""

    before: int
    turn: int
    turns: int

    def layers(self, turns: int) -> int:
        """How many there are after so many turns."""
        return self.before + turns * self.turn

    @property
    def first(self) -> int:
        """The fewest turns that make two layers, a first and a last one."""
        return 1 if self.layers(1) > 1 else 2


def turns_of(config: Any) -> Turns | None:
    """How a config's layers take turns: one by one where all are alike.

    None where shallow runs are not less work, where layers differ without taking turns, where there are two depths (an
    encoder-decoder), and where the last layers use the keys and values of earlier ones. ValueError for more layers than
    any model has.
    """
    check_depth(config)
    text = text_config(config)
    depth = text.num_hidden_layers
    shared = getattr(text, "num_kv_shared_layers", 0)  # Gemma 3n and 4: which layer's, hangs on the whole depth
    if shared or getattr(config, "is_encoder_decoder", False):
        return None
    # Llama 4 has the numbers of the layers that have experts: where all have, that says nothing.
    lists = [value for value in _of_layers(text).values() if value != list(range(depth))]
    kinds = [*zip(*lists, strict=True)] or [()] * depth
    found = []
    for turn in range(1, depth // FEWEST + 1):
        for before in range(depth % turn, depth - FEWEST * turn + 1, turn):
            turns = (depth - before) // turn
            if kinds[before:] == kinds[before : before + turn] * turns:
                found.append(Turns(before, turn, turns))
                break
    return min(found, key=lambda one: one.layers(2), default=None)


def kind_of_batch(samples: int) -> int:
    """What a batch's size says of how runs go on: transformers looks for packed samples in one of a single sample."""
    return min(samples, 2)


class Deepening(NamedTuple):
    """What two shallow runs have shown: what one between them should leave, and how the deep one follows from it.

    layers: its depth. beside: what it leaves beside its trace. trace: how the deep trace follows from its trace.
    numbers: what the deep run leaves beside its trace.
    """

    layers: int
    beside: Numbers
    trace: Continuation
    numbers: dict[Any, int]


_NAME = "from_shallow"
_shown: dict[tuple, tuple[Deepening, ...]] = {}  # the last found first


def forget_shallow_runs() -> None:
    """Forget what shallow runs have shown, for a measurement that begins with nothing."""
    _shown.clear()
    forget(_NAME)


def from_shallow(
    config: Any, run: Callable[[Any], tuple[Trace, Numbers]], like: Any = None, deeper: int = 0
) -> tuple[Trace, dict[Any, int]] | None:
    """What `run(config)` gives, from two shallow runs; None where they are not less work, or contradict each other.

    run: a config → (its trace, numbers beside it). The one way from shallow to deep: the model's parameters must lie on
    the line shape by shape, its traces must continue (`trace.depth`), and every number must lie on a line. The first
    has two layers at least, a first and a last one, and the second two turns more. Where they do not go on so, two that
    are one turn deeper are tried. deeper: turns by which the first ones are, where it is known that they have to be.
    like: all of a run but the config and its length, and the kind of its batch. Where earlier calls with such runs have
    shown how they go on, one run is enough whose depth lies between theirs and that does, but for the sizes, what they
    say of it.
    """
    runs = {}
    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode()).digest()
    key = _NAME, type(config).__qualname__, digest, like
    for known in _ways(key) if like is not None else ():
        if known.layers not in runs:
            runs[known.layers] = run(with_depth(config, known.layers))
        shallow, beside = runs[known.layers]
        if beside == known.beside and (trace := known.trace.of(shallow)) is not None:
            return trace, known.numbers
    if (turns := turns_of(config)) is None or (first := _alike_from(config, turns, turns.first + deeper)) is None:
        return None
    for start in (first, first + 1):
        depths = turns.layers(start), turns.layers(start + TURNS)
        for layers in depths:
            if layers not in runs:
                runs[layers] = run(with_depth(config, layers))
        (short, one), (long, other) = (runs[layers] for layers in depths)
        more = turns.turns - start
        found = continuation(short, long, more)
        between, beside = (on_a_line(one, other, number, TURNS) for number in (1, more))
        if found is None or between is None or beside is None or (trace := found.of(found.like)) is None:
            continue
        if like is not None:
            way = Deepening(turns.layers(start + 1), between, found, beside)
            _shown[key] = (way, *_ways(key))[:WAYS]
            note(key, _shown[key])
            if len(_shown) > KEPT:
                del _shown[next(iter(_shown))]  # the oldest
        return trace, beside
    return None


def _ways(key: tuple) -> tuple[Deepening, ...]:
    """How runs of this kind are known to go on, from this process and those that it learned from."""
    if learned := taken(key):
        _shown[key] = (*_shown.get(key, ()), *learned)[:WAYS]
    return _shown.get(key, ())


def linear_in_depth(config: Any, numbers: Callable[[Any], Numbers]) -> Numbers:
    """`numbers(config)`, linear in the depth: from two shallow models where that is less work.

    For what is a sum over layers by its meaning (bytes of weights, FLOPs); a trace wants `from_shallow`.
    """
    turns = turns_of(config)
    if turns is None or (first := _alike_from(config, turns, 1)) is None:
        return numbers(config)
    try:
        one, other = (numbers(with_depth(config, turns.layers(n))) for n in (first, first + 1))
        return on_a_line(one, other, turns.turns - first)
    except NoSuchLayer:  # an adapter's target that only the full depth has
        return numbers(config)


def _of_layers(config: Any) -> dict[str, list]:
    """The lists of a config that are as long as the model is deep: they say something of each layer."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple))}
    return {name: value for name, value in lists.items() if value and len(value) == config.num_hidden_layers}


def _alike_from(config: Any, turns: Turns, first: int) -> int | None:
    """After how many turns, `first` at least, each further one adds the same parameters.

    None where that is not found among so few that two shallow models are less work than the config's.
    """
    some = range(first, min(first + LEADING, (turns.turns - TURNS) // 2 + 1))
    return next((n for n in some if grows_evenly(config, turns.layers(n), turns.turn)), None)


def grows_evenly(config: Any, layers: int, turn: int) -> bool:
    """Whether the config has the parameters that a straight line says, through so many layers and a turn more.

    Counted shape by shape. They are not where another kind of layer only comes later.
    """
    one, two = (_parameters_of(with_depth(config, depth)) for depth in (layers, layers + turn))
    more = (text_config(config).num_hidden_layers - layers) // turn
    return _parameters_of(config) == Counter(on_a_line(one, two, more))


_parameters: dict[tuple[type, str], Counter] = {}  # of a config, all that it says


def _parameters_of(config: Any) -> Counter:
    """(shape, dtype) → how many parameters are like this, tied ones once."""
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _parameters:
        model = build_model(config, torch.float16)
        _parameters[key] = Counter((tuple(p.shape), p.dtype) for p in model.parameters())
    return _parameters[key]
