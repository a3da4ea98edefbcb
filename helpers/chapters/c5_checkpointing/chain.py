"""Chapter 5's recorder: a chain of nodes, really computed forward and backward under a schedule, moment by moment.

Node 1 of a chain is the input, node n the loss, and y_i = f_i(y_{i-1}). A schedule is a list of actions:
("forward", i) computes y_i from y_{i-1}, ("backward", i) computes the gradient g_i from y_i and g_{i+1}, after which
those two are no longer needed, ("drop", i) gives y_i up. Each computation is a *moment*: what is alive at it includes
the result and what it was computed from. Gradients of the weights are not counted: every schedule makes the same ones.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from virtual_gpu.drawing import svg
from virtual_gpu.language import tr
from virtual_gpu.units import choose, positive_int

from ...charts import Chart
from .charts import sweep_chart
from .pictures import draw_moment

Action = tuple[str, int]
STRATEGIES = ("everything", "minimum")
MOST_NODES, MOST_COMPUTATIONS = 2**14, 2**22  # beyond these a run takes longer than a reader waits
LEAST_BUDGET = 4  # the input, what is computed, and two gradients
LOWEST_NODE = {"forward": 2, "backward": 1, "drop": 1}  # action -> the first node that it can be done to


class Chain:
    """y_i = y_{i-1} + sin(w_i · y_{i-1}) / 10 with weights from the seed, in double precision; node 1 is the input."""

    def __init__(self, nodes: int, seed: int = 0):
        self.nodes = positive_int(nodes, "nodes")
        if self.nodes < 2:
            raise ValueError(
                tr(
                    ko=f"nodes={nodes}: 입력과 손실, 적어도 노드 2개가 있어야 한다.",
                    en=f"nodes={nodes}: a chain has an input and a loss, at least 2 nodes.",
                )
            )
        _check_work(self.nodes, MOST_NODES, tr(ko="노드", en="nodes"))
        self.input = 0.5
        self.weights = _weights(self.nodes, seed)

    def forward(self, node: int, y: float) -> float:
        """y_node from the value of the node before."""
        return y + 0.1 * math.sin(self.weights[node] * y)

    def backward(self, node: int, y: float, gradient: float) -> tuple[float, float]:
        """(gradient of the node before, gradient of the weight) from that node's value and the gradient of `node`."""
        slope = 0.1 * math.cos(self.weights[node] * y)
        return gradient * (1 + slope * self.weights[node]), gradient * slope * y

    def autograd(self) -> list[float]:
        """The gradients of the input and of every weight as PyTorch's autograd has them, in the order of the nodes."""
        import torch

        leaves = [
            torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (self.input, *self.weights.values())
        ]
        y = leaves[0]
        for weight in leaves[1:]:
            y = y + 0.1 * torch.sin(weight * y)
        return [float(g) for g in torch.autograd.grad(y, leaves)]


@lru_cache(maxsize=16)
def _weights(nodes: int, seed: int) -> dict[int, float]:
    """node → its weight, from the second on; to read only."""
    generator = random.Random(seed)
    return {i: generator.uniform(0.5, 1.5) for i in range(2, nodes + 1)}


@dataclass
class Recording:
    """What a schedule did: `moments[t]` was computed at moment t; a life is (kind, node, born, end), end excluded.

    gradients: of the input and of every weight, in the order of the nodes. In a notebook it draws its fullest moment.
    """

    title: str
    nodes: int
    moments: list[Action] = field(default_factory=list)
    lives: list[tuple[str, int, int, int]] = field(default_factory=list, repr=False)
    gradients: list[float] = field(default_factory=list, repr=False)

    @property
    def counts(self) -> np.ndarray:
        """(moments, 2): how many values of the forward pass and how many gradients are alive at each moment."""
        changes = np.zeros((len(self.moments) + 1, 2), dtype=np.int64)
        kinds, _, born, end = zip(*self.lives, strict=True)
        columns = np.array([kind == "backward" for kind in kinds], dtype=np.int64)
        np.add.at(changes, (np.array(born), columns), 1)
        np.add.at(changes, (np.array(end), columns), -1)
        return changes.cumsum(axis=0)[:-1]

    @property
    def stored(self) -> list[int]:
        """How many values are alive at each moment."""
        return self.counts.sum(axis=1).tolist()

    @property
    def peak(self) -> int:
        """The most values alive at once."""
        return max(self.stored)

    @property
    def computed(self) -> Counter[int]:
        """node → how often its value was computed. The input is given."""
        return Counter(node for kind, node in self.moments if kind == "forward")

    @property
    def recomputations(self) -> int:
        """How many computations of the forward pass were repetitions."""
        return sum(self.computed.values()) - (self.nodes - 1)

    def moment(self, kind: str, node: int) -> int:
        """The first moment at which that was computed: kind "forward" or "backward"."""
        try:
            return self.moments.index((kind, node))
        except ValueError:
            raise ValueError(
                tr(ko=f"({kind!r}, {node})을 계산한 순간이 없다.", en=f"({kind!r}, {node}) was never computed.")
            ) from None

    def alive_at(self, moment: int) -> dict[str, list[int]]:
        """ "forward" and "backward" → the nodes whose value or gradient is alive at that moment."""
        moment = range(len(self.moments))[moment]
        alive: dict[str, list[int]] = {"forward": [], "backward": []}
        for kind, node, born, end in self.lives:
            if born <= moment < end:
                alive[kind].append(node)
        return {kind: sorted(nodes) for kind, nodes in alive.items()}

    @property
    def verdict(self) -> str:
        """One line: the most that was stored, and what was computed again."""
        return tr(
            ko=f"최대 {self.peak}개 저장, 재계산 {self.recomputations}번",
            en=f"at most {self.peak} stored, {self.recomputations} recomputations",
        )

    def draw(self, moment: int | None = None) -> svg.Drawing:
        """The chain at a moment (the first fullest one for None), and the whole run below it."""
        return draw_moment(self, self.stored.index(self.peak) if moment is None else range(len(self.moments))[moment])

    def _repr_svg_(self) -> str:
        return self.draw().svg()

    def __repr__(self) -> str:
        return f"{self.title}: {self.verdict}"


def execute(schedule: Iterable[Action], nodes: int, title: str = "") -> Recording:
    """Compute the chain as the schedule says and record it; ValueError at the first action that cannot be done."""
    chain = Chain(nodes)
    nodes = chain.nodes
    recording = Recording(title or tr(ko=f"노드 {nodes}개", en=f"{nodes} nodes"), nodes)
    values, born = {1: chain.input}, {1: 0}
    gradient, gradient_born, next_backward = 1.0, 0, nodes
    of_weights: dict[int, float] = {}
    for number, action in enumerate(schedule, start=1):
        kind, node = _checked(action, nodes, number)
        now = len(recording.moments)
        if kind == "drop":
            if node not in values:
                raise _refused(number, action, tr(ko=f"y{node}는 저장되어 있지 않다", en=f"y{node} is not stored"))
            del values[node]
            recording.lives.append(("forward", node, born.pop(node), now))
        elif kind == "forward":
            if node in values:
                raise _refused(number, action, tr(ko=f"y{node}는 이미 있다", en=f"y{node} is there already"))
            if node - 1 not in values:
                raise _refused(number, action, tr(ko=f"재료인 y{node - 1}이 없다", en=f"it needs y{node - 1}"))
            values[node], born[node] = chain.forward(node, values[node - 1]), now
            recording.moments.append((kind, node))
        else:
            if node != next_backward:
                more = f"backward {next_backward}" if next_backward else "-"
                raise _refused(number, action, tr(ko=f"다음 차례는 {more}이다", en=f"the next one is {more}"))
            if node not in values:
                raise _refused(number, action, tr(ko=f"재료인 y{node}이 없다", en=f"it needs y{node}"))
            if node < nodes:
                gradient, of_weights[node + 1] = chain.backward(node + 1, values[node], gradient)
                recording.lives.append(("backward", node + 1, gradient_born, now + 1))
            gradient_born, next_backward = now, node - 1
            del values[node]
            recording.lives.append(("forward", node, born.pop(node), now + 1))
            recording.moments.append((kind, node))
    if next_backward:
        missing = tr(ko=f"backward {next_backward}부터 남아 있다", en=f"backward {next_backward} is still to do")
        raise ValueError(
            tr(ko=f"일정이 끝까지 가지 않는다: {missing}.", en=f"The schedule is not complete: {missing}.")
        )
    end = len(recording.moments)
    recording.lives += [("forward", node, start, end) for node, start in born.items()]
    recording.lives.append(("backward", 1, gradient_born, end))
    recording.gradients = [gradient, *(of_weights[i] for i in range(2, nodes + 1))]
    return recording


def _checked(action: Action, nodes: int, number: int) -> Action:
    try:
        kind, node = action
        if kind not in LOWEST_NODE:
            kind = choose(kind, LOWEST_NODE, tr(ko="동작", en="action"))
        if type(node) is not int or node < 1:
            node = positive_int(node, "node")
    except (TypeError, ValueError) as error:
        raise _refused(number, action, str(error)) from None
    lowest = LOWEST_NODE[kind]
    if not lowest <= node <= nodes:
        reason = tr(ko=f"노드는 {lowest}부터 {nodes}까지다", en=f"nodes go from {lowest} to {nodes}")
        raise _refused(number, action, reason)
    return kind, node


def _check_work(count: int, most: int, what: str) -> None:
    """ValueError where a run would take too long."""
    if count > most:
        raise ValueError(
            tr(
                ko=f"{what} {count:,}: 너무 오래 걸린다. {most:,} 이하가 되도록 사슬을 줄이거나 더 많이 저장한다.",
                en=f"{what} {count:,}: too long a run. At most {most:,}: a shorter chain, or more stored.",
            )
        )


def _refused(number: int, action: object, reason: str) -> ValueError:
    return ValueError(tr(ko=f"{number}번째 동작 {action!r}: {reason}.", en=f"Action {number}, {action!r}: {reason}."))


# -- schedules -----------------------------------------------------------------------------------------------------


def record_chain(
    nodes: int,
    strategy: str | None = None,
    *,
    checkpoints: Iterable[int] | None = None,
    segments: int | None = None,
    budget: int | None = None,
) -> Recording:
    """Run a chain under a strategy, one of:

    "everything" (each value is kept until its gradient is there), "minimum" (only the input is kept, everything else is
    computed from it each time), `checkpoints` (nodes that are kept besides the input; between two of them all is
    recomputed once), `segments` (so many even parts, their first nodes kept), `budget` (the fewest recomputations of
    all schedules that never store more values than that).
    """
    given = [value for value in (strategy, checkpoints, segments, budget) if value is not None]
    if len(given) != 1:
        raise ValueError(
            tr(
                ko=f"전략을 하나만 고른다: {', '.join(STRATEGIES)}, checkpoints=…, segments=…, budget=… "
                f"(지금은 {len(given)}개)",
                en=f"Choose one of {', '.join(STRATEGIES)}, checkpoints=…, segments=…, budget=… ({len(given)} given).",
            )
        )
    nodes = Chain(nodes).nodes
    if strategy is not None:
        strategy = choose(strategy, STRATEGIES, tr(ko="전략", en="strategy"))
        schedule = keep_everything(nodes) if strategy == "everything" else keep_minimum(nodes)
        label = {"everything": tr(ko="모두 저장", en="keep everything")}.get(
            strategy, tr(ko="되도록 적게 저장", en="keep as little as possible")
        )
    elif checkpoints is not None:
        checkpoints = _numbers_of_nodes(checkpoints)
        schedule = keep_checkpoints(nodes, checkpoints)
        named = ", ".join(map(str, checkpoints))
        label = tr(ko=f"체크포인트 {named}", en=f"checkpoints {named}")
    elif segments is not None:
        schedule = keep_checkpoints(nodes, segment_starts(nodes, segments))
        label = tr(ko=f"구간 {segments}개", en=f"{segments} segments")
    else:
        schedule = optimal_schedule(nodes, budget)
        label = tr(ko=f"최대 {budget}개 안에서 재계산 최소", en=f"fewest recomputations within {budget}")
    return execute(schedule, nodes, f"{label} · " + tr(ko=f"노드 {nodes}개", en=f"{nodes} nodes"))


def _numbers_of_nodes(given: Any) -> list[int]:
    if not isinstance(given, (str, bytes)):
        with suppress(TypeError):  # no Iterable, or one by its class alone, as an array without dimensions is
            return sorted(set(given))
    raise ValueError(
        tr(
            ko=f"checkpoints={given!r:.80}: 노드 번호들이어야 한다. 예: (2, 5)",
            en=f"checkpoints={given!r:.80}: must be numbers of nodes, as (2, 5).",
        )
    )


def keep_everything(nodes: int) -> list[Action]:
    """Nothing is dropped, nothing computed twice."""
    return [("forward", i) for i in range(2, nodes + 1)] + [("backward", i) for i in range(nodes, 0, -1)]


def keep_minimum(nodes: int) -> list[Action]:
    """Only the input stays; for each gradient its node is computed from the input again."""
    _check_work(nodes * (nodes - 1) // 2, MOST_COMPUTATIONS, tr(ko="계산", en="computations"))
    schedule = []
    for node in range(nodes, 1, -1):
        schedule += [*_walk(1, node, {1}), ("backward", node)]
    return [*schedule, ("backward", 1)]


def keep_checkpoints(nodes: int, checkpoints: Iterable[int]) -> list[Action]:
    """The input and the checkpoints stay; before a segment's gradients all of the segment is recomputed once."""
    kept = {1}
    for node in checkpoints:
        if not 1 <= positive_int(node, "checkpoint") <= nodes:
            raise ValueError(
                tr(
                    ko=f"체크포인트 {node}: 노드는 1부터 {nodes}까지다.",
                    en=f"Checkpoint {node}: nodes go from 1 to {nodes}.",
                )
            )
        kept.add(node)
    schedule = [*_walk(1, nodes, kept), ("backward", nodes)]
    end = nodes - 1
    for start in sorted(kept - {nodes}, reverse=True):
        schedule += [("forward", i) for i in range(start + 1, end + 1)]
        schedule += [("backward", i) for i in range(end, start - 1, -1)]
        end = start - 1
    return schedule


def segment_starts(nodes: int, segments: int) -> list[int]:
    """The first nodes of `segments` parts of a chain, as even as they can be; ValueError outside 1…nodes."""
    segments = positive_int(segments, "segments")
    if segments > nodes:
        raise ValueError(
            tr(
                ko=f"segments={segments}: 노드 {nodes}개보다 많은 구간으로 나눌 수 없다. 1부터 {nodes}까지 고른다.",
                en=f"segments={segments}: {nodes} nodes cannot be cut into more parts. Choose 1 to {nodes}.",
            )
        )
    return [1 + i * nodes // segments for i in range(segments)]


def schedule_by_splitting(nodes: int, budget: int, split: Callable[[int, int, int], int]) -> list[Action]:
    """A schedule that never stores more than `budget` values, where `split` says which node is kept next.

    split(start, end, slots): y_start is kept, the gradients from `end` down to `start` are wanted, and `slots` nodes
    may be kept, `start` among them. It returns the next node to keep, start < node <= end; asked only where slots > 1.
    Of the budget three values are at work: the one that is computed and, in backward, two gradients, in forward its
    source and one gradient. The loss has but one gradient, so the node before it can wait for it: `end` begins there.
    """
    nodes, slots = Chain(nodes).nodes, slots_of(budget, nodes)
    schedule: list[Action] = []
    todo = [(1, nodes - 1, slots)]
    while todo:
        start, end, free = todo.pop()
        if start == end:
            schedule += [*_loss(start, nodes), ("backward", start)]
        elif free == 1:
            for node in range(end, start, -1):
                schedule += [*_walk(start, node, {start}), *_loss(node, nodes), ("backward", node)]
            schedule.append(("backward", start))
        else:
            node = positive_int(split(start, end, free), "split")
            if not start < node <= end:
                raise ValueError(
                    tr(
                        ko=f"split({start}, {end}, {free})의 답 {node}: {start + 1}부터 {end}까지여야 한다.",
                        en=f"split({start}, {end}, {free}) returned {node}; it must lie in {start + 1}…{end}.",
                    )
                )
            schedule += _walk(start, node, {start})
            todo += [(start, node - 1, free), (node, end, free - 1)]  # the later part first
    return schedule


def slots_of(budget: int, nodes: int) -> int:
    """The nodes that a budget of stored values lets keep, the input among them; ValueError below LEAST_BUDGET."""
    budget = positive_int(budget, "budget")
    if budget < LEAST_BUDGET:
        raise ValueError(
            tr(
                ko=f"budget={budget}: 입력, 지금 계산한 값, 그레이디언트 둘을 위해 적어도 {LEAST_BUDGET}여야 한다.",
                en=f"budget={budget}: the input, the value at work and two gradients take {LEAST_BUDGET}.",
            )
        )
    return min(budget - 3, nodes)


def _loss(node: int, nodes: int) -> list[Action]:
    """At the node before the loss: compute the loss and its gradient."""
    return [("forward", nodes), ("backward", nodes)] if node == nodes - 1 else []


def optimal_schedule(nodes: int, budget: int) -> list[Action]:
    """A schedule with the fewest recomputations of all that never store more than `budget` values."""
    nodes = Chain(nodes).nodes
    slots = slots_of(budget, nodes)
    _check_work(fewest_computations(nodes - 1, slots), MOST_COMPUTATIONS, tr(ko="계산", en="computations"))
    table = _table(nodes - 1, slots)

    def best_split(start: int, end: int, free: int) -> int:
        return start + 1 + int(_costs_of_splits(table, end - start + 1, free).argmin())

    return schedule_by_splitting(nodes, budget, best_split)


def fewest_recomputations(nodes: int, budget: int) -> int:
    """The fewest recomputations of a chain that never stores more than `budget` values."""
    return fewest_computations(Chain(nodes).nodes - 1, slots_of(budget, nodes)) - (nodes - 2)


def fewest_computations(length: int, slots: int) -> int:
    """The fewest computations that give all gradients of a part of `length` nodes, the first of which is kept.

    At most `slots` nodes may be kept, that one among them. Dynamic programming over the next kept node; the result is
    binomial: Griewank and Walther 2000, "Revolve", §2.
    """
    return int(_table(positive_int(length, "length"), positive_int(slots, "slots"))[-1, -1])


@lru_cache(maxsize=256)
def _table(nodes: int, slots: int) -> np.ndarray:
    """[k, l] → fewest computations to get all gradients of l nodes, the first of which is kept, with k kept nodes."""
    _check_work(nodes * slots, MOST_COMPUTATIONS // 16, tr(ko="노드 × 보관 수", en="nodes × kept"))
    lengths = np.arange(nodes + 1)
    table = np.zeros((slots + 1, nodes + 1), dtype=np.int64)
    table[1] = lengths * (lengths - 1) // 2
    for k in range(2, slots + 1):
        for length in range(2, nodes + 1):
            table[k, length] = _costs_of_splits(table, length, k).min()
    return table


def _costs_of_splits(table: np.ndarray, length: int, slots: int) -> np.ndarray:
    """For a part of `length` nodes: the computations where the next kept node is 1, 2, … length-1 steps on."""
    steps = np.arange(1, length)
    return steps + table[slots - 1, length - 1 : 0 : -1] + table[slots, 1:length]


def _walk(start: int, end: int, kept: set[int]) -> list[Action]:
    """Compute from y_start to y_end, dropping on the way what is not kept."""
    schedule: list[Action] = []
    for node in range(start + 1, end + 1):
        schedule.append(("forward", node))
        if node - 1 not in kept and node - 1 != start:
            schedule.append(("drop", node - 1))
    return schedule


# -- how many segments ---------------------------------------------------------------------------------------------


@dataclass
class SegmentSweep:
    """Runs of one chain with different numbers of segments: rows of (segments, peak, recomputations)."""

    nodes: int
    rows: list[tuple[int, int, int]]

    @property
    def best(self) -> tuple[int, int, int]:
        """The row with the lowest peak; among equal ones that with the fewest recomputations."""
        return min(self.rows, key=lambda row: row[1:])

    def draw(self) -> Chart:
        """The peak over the number of segments, with the lowest and 2√N."""
        return sweep_chart(self)

    def _repr_svg_(self) -> str:
        return self.draw().svg()

    def __repr__(self) -> str:
        segments, peak, recomputations = self.best
        return tr(
            ko=f"노드 {self.nodes}개: 구간 {segments}개일 때 최대 {peak}개로 가장 적다 (재계산 {recomputations}번)",
            en=f"{self.nodes} nodes: {segments} segments need least, {peak} ({recomputations} recomputations)",
        )


def sweep_segments(nodes: int) -> SegmentSweep:
    """Run the chain with 1, 2, 3, … segments: every number up to 2√N, beyond it every tenth part more."""
    nodes = Chain(nodes).nodes
    candidates, segments = [], 1
    while segments < nodes:
        candidates.append(segments)
        segments += 1 if segments < 2 * math.sqrt(nodes) else max(1, segments // 10)
    rows = []
    for segments in [*candidates, nodes]:
        recording = record_chain(nodes, segments=segments)
        rows.append((segments, recording.peak, recording.recomputations))
    return SegmentSweep(nodes, rows)
