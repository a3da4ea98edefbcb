"""The recorder of checkpointing: what it counts is what a brute force counts, and gradients are autograd's."""

import heapq
import itertools
from math import comb

import numpy as np
import pytest

from helpers import checkpointing_panel, record_chain, set_language, sweep_segments
from helpers.chapters.c5_checkpointing.chain import (
    LEAST_BUDGET,
    Chain,
    execute,
    fewest_computations,
    fewest_recomputations,
    keep_everything,
    optimal_schedule,
    schedule_by_splitting,
    segment_starts,
)
from helpers.chapters.c5_checkpointing.pictures import draw_moments


def every_strategy(nodes):
    yield record_chain(nodes, "everything")
    yield record_chain(nodes, "minimum")
    for segments in range(1, nodes + 1):
        yield record_chain(nodes, segments=segments)
    for budget in range(4, nodes + 3):
        yield record_chain(nodes, budget=budget)
    for checkpoints in itertools.combinations(range(2, nodes + 1), 2):
        yield record_chain(nodes, checkpoints=checkpoints)


def test_the_books_counts_come_out_at_one_moment_only():
    runs = [record_chain(5, "everything"), record_chain(5, "minimum"), record_chain(5, checkpoints=[3])]
    at = {node: [run.stored[run.moment("backward", node)] for run in runs] for node in range(1, 6)}
    assert at == {5: [6, 3, 4], 4: [6, 4, 5], 3: [5, 4, 4], 2: [4, 4, 4], 1: [3, 3, 3]}
    assert [run.peak for run in runs] == [6, 4, 5]
    assert [run.recomputations for run in runs] == [0, 6, 2]
    moment = runs[2].moment("backward", 4)
    assert runs[2].alive_at(moment) == {"forward": [1, 3, 4], "backward": [4, 5]}


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_gradients_are_equal_under_every_strategy_and_autograds(nodes):
    autograd = Chain(nodes).autograd()
    first = record_chain(nodes, "everything").gradients
    assert first == pytest.approx(autograd, rel=1e-12)
    assert all(abs(g) > 0 for g in first)
    for run in every_strategy(nodes):
        assert run.gradients == first  # the very same operations: equal to the last bit


@pytest.mark.parametrize("nodes", [2, 3, 5, 9])
def test_what_is_alive_is_what_a_second_count_says(nodes):
    """Each moment's values, followed by hand through the schedule's actions."""
    for schedule in [keep_everything(nodes), optimal_schedule(nodes, 5), optimal_schedule(nodes, 4)]:
        run, alive, gradients, moment = execute(schedule, nodes), {1}, set(), 0
        for kind, node in schedule:
            if kind == "drop":
                alive.discard(node)
                continue
            (alive if kind == "forward" else gradients).add(node)
            assert run.alive_at(moment) == {"forward": sorted(alive), "backward": sorted(gradients)}
            assert run.stored[moment] == len(alive) + len(gradients)
            if kind == "backward":
                alive.discard(node)
                gradients.discard(node + 1)
            moment += 1
        assert moment == len(run.moments)


def fewest_by_search(nodes, peak):
    """Dijkstra over all that can be done: (stored values, next gradient), at most `peak` values at any moment."""
    start = (frozenset([1]), nodes)
    best, waiting, number = {start: 0}, [(0, 0, start)], itertools.count(1)
    while waiting:
        cost, _, (alive, todo) = heapq.heappop(waiting)
        if todo == 0:
            return cost
        if cost > best[alive, todo]:
            continue
        gradients = 0 if todo == nodes else 1
        steps = [(0, (alive - {node}, todo)) for node in alive]
        for node in range(2, todo + 1):
            if node - 1 in alive and node not in alive and len(alive) + 1 + gradients <= peak:
                steps.append((1, (alive | {node}, todo)))
        if todo in alive and len(alive) + gradients + 1 <= peak:
            steps.append((0, (alive - {todo}, todo - 1)))
        for more, state in steps:
            if cost + more < best.get(state, 10**9):
                best[state] = cost + more
                heapq.heappush(waiting, (cost + more, next(number), state))
    return None


@pytest.mark.parametrize("nodes", [3, 4, 5, 6, 7, 8])
def test_no_schedule_at_all_beats_the_optimal_one(nodes):
    for budget in range(4, nodes + 2):
        run = record_chain(nodes, budget=budget)
        assert run.peak <= budget
        assert run.recomputations == fewest_recomputations(nodes, budget)
        assert run.recomputations == fewest_by_search(nodes, budget) - (nodes - 1)
    assert fewest_by_search(nodes, 3) is None


def test_a_budget_beyond_the_chain_is_no_more_than_everything():
    assert record_chain(5, budget=10**9).recomputations == 0
    assert record_chain(2, budget=4).peak == 3 and record_chain(2, "minimum").recomputations == 0


def test_every_splitting_is_a_valid_schedule_and_none_beats_the_optimal():
    nodes, budget = 8, 6
    found = set()
    for offsets in itertools.product(range(1, 4), repeat=4):
        choice = itertools.cycle(offsets)

        def split(start, end, free, choice=choice):
            return min(start + next(choice), end)

        run = execute(schedule_by_splitting(nodes, budget, split), nodes)
        assert run.peak <= budget
        found.add(run.recomputations)
    assert min(found) == fewest_recomputations(nodes, budget) and len(found) > 1


def test_the_computations_are_binomial():
    """Griewank and Walther 2000: s slots, every node taken at most r times: C(s + r, s) nodes can be reversed."""
    for slots, repeats in itertools.product((1, 2, 3, 5), (1, 2, 3)):
        nodes = comb(slots + repeats, slots)
        assert fewest_computations(nodes, slots) == repeats * nodes - comb(slots + repeats, repeats - 1)


@pytest.mark.parametrize("nodes", [16, 100, 256, 1024])
def test_the_best_number_of_segments_is_the_root(nodes):
    segments, peak, recomputations = sweep_segments(nodes).best
    root = round(nodes**0.5)
    assert (segments, peak) == (root, 2 * root)
    assert recomputations == nodes - root - 1


@pytest.mark.parametrize("nodes, segments", [(16, 2), (16, 4), (60, 5), (64, 16)])
def test_segments_keep_s_and_n_over_s(nodes, segments):
    run = record_chain(nodes, segments=segments)
    assert run.peak == segments + nodes // segments
    assert run.recomputations == nodes - segments - 1


@pytest.mark.parametrize("nodes", [2, 7, 10])
def test_segments_are_even_and_cover_the_chain(nodes):
    for segments in range(1, nodes + 1):
        starts = [*segment_starts(nodes, segments), nodes + 1]
        sizes = {b - a for a, b in itertools.pairwise(starts)}
        assert starts[0] == 1 and len(starts) == segments + 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: record_chain(5, segments=0), "segments=0: 1 이상"),
        (lambda: record_chain(5, segments=6), "1부터 5까지"),
        (lambda: record_chain(5, segments=2.0), "정수"),
        (lambda: record_chain(5, budget=3), "budget=3: 입력"),
        (lambda: record_chain(5, checkpoints=[6]), "체크포인트 6"),
        (lambda: record_chain(5, checkpoints=[0]), "checkpoint=0"),
        (lambda: record_chain(5, checkpoints=2), "checkpoints=2: 노드 번호들"),
        (lambda: record_chain(5, checkpoints=np.array(2)), "노드 번호들"),
        (lambda: record_chain(5, checkpoints="2"), "노드 번호들"),
        (lambda: record_chain(1, "everything"), "적어도 노드 2개"),
        (lambda: record_chain(10**9, "everything"), "노드 1,000,000,000: 너무 오래"),
        (lambda: record_chain(10_000, "minimum"), "계산 49,995,000: 너무 오래"),
        (lambda: record_chain(10_000, budget=100), "노드 × 보관 수"),
        (lambda: record_chain(5, "evrything"), "혹시 everything"),
        (lambda: record_chain(5), "지금은 0개"),
        (lambda: record_chain(5, "minimum", segments=2), "지금은 2개"),
        (lambda: execute([("forward", 3)], 5), "재료인 y2"),
        (lambda: execute([("forward", 1)], 5), "2부터 5까지"),
        (lambda: execute([("forward", 2), ("forward", 2)], 5), "이미 있다"),
        (lambda: execute([("drop", 4)], 5), "저장되어 있지 않다"),
        (lambda: execute([("backward", 4)], 5), "다음 차례는 backward 5"),
        (lambda: execute([("backward", 5)], 5), "재료인 y5"),
        (lambda: execute([*keep_everything(5), ("backward", 1)], 5), "다음 차례"),
        (lambda: execute(keep_everything(5)[:-1], 5), "backward 1부터 남아"),
        (lambda: execute([("sideways", 2)], 5), "sideways"),
        (lambda: execute([3], 5), "1번째 동작 3"),
        (lambda: schedule_by_splitting(6, 5, lambda start, end, slots: end + 1), "2부터 5까지"),
        (lambda: record_chain(5, "minimum").moment("backward", 6), "순간이 없다"),
    ],
)
def test_bad_input_is_answered_clearly(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_budget_begins_with_one_that_is_large_enough():
    panel = checkpointing_panel()
    assert panel.count.value < LEAST_BUDGET
    panel.strategy.value = "budget"
    assert panel.count.value == LEAST_BUDGET and "<svg" in panel.picture.value
    panel.count.value = LEAST_BUDGET - 1
    assert 'role="alert"' in panel.status.value


def test_pictures_follow_the_moment():
    run = record_chain(12, segments=3)
    pictures = [run.draw(moment).svg() for moment in range(len(run.moments))]
    assert len(set(pictures)) == len(pictures)
    assert run.draw(-1).svg() == pictures[-1] and run._repr_svg_() == pictures[run.stored.index(run.peak)]
    for moment, picture in enumerate(pictures):
        assert picture.count('r="16"') == 24  # twelve values and twelve gradients
        filled = picture.count('r="16" fill="#0072B2"') + picture.count('r="16" fill="#E69F00"')
        assert filled == run.stored[moment]
    assert "<circle" not in record_chain(300, segments=17)._repr_svg_()
    with pytest.raises(IndexError):
        run.draw(len(run.moments))


def test_pictures_and_verdicts_speak_the_chosen_language():
    run = record_chain(5, checkpoints=[3])
    set_language("en")
    try:
        english = record_chain(5, checkpoints=[3])
        texts = [repr(english), english._repr_svg_(), repr(sweep_segments(9)), sweep_segments(9)._repr_svg_()]
        texts.append(draw_moments([("at g4", english, 6)]).svg())
        assert not any("가" <= letter <= "힣" for text in texts for letter in text)
    finally:
        set_language("ko")
    assert "최대 5개" in repr(run)
