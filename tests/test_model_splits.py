"""Chapter 7 on real processes: pipelines in every schedule, tensor and sequence parallel, and their pictures."""

from collections import Counter
from fractions import Fraction

import pytest
import torch

from helpers import run_ranks
from helpers.chapters.c7_split.drawings import draw_block_splits, draw_matrix_splits, draw_model_splits, draw_pipeline
from helpers.chapters.c7_split.pipeline import (
    LAYERS,
    SCHEDULES,
    PipelineRun,
    Work,
    bubble,
    gradients_of,
    measured_bubble,
    pipeline,
    stages_of,
    timetable,
)
from helpers.chapters.c7_split.tensor import tensor_parallel, tensor_parallel_llama, tensor_parallel_mlp
from helpers.ranks.launcher import RankError
from helpers.ranks.training import one_process, tiny_model

ONE_STAGE, TWO_STAGES = ("GPipe", "1F1B"), ("Interleaved1F1B", "ZBVZeroBubble")

# -- pipeline ------------------------------------------------------------------------------------------------------


def check_same_training(runs: list[PipelineRun]) -> None:
    alone = one_process(1, layers=LAYERS)
    losses = [run.loss for run in runs if run.loss is not None]
    assert losses == [pytest.approx(alone.losses[0], rel=1e-12)]
    assert torch.allclose(gradients_of(runs), alone.gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", ONE_STAGE)
@pytest.mark.parametrize("n, micro_batches", [(2, 4), (4, 8), (4, 16)])
def test_one_stage_a_rank(schedule, n, micro_batches):
    runs = run_ranks(pipeline, n, schedule, micro_batches)
    check_same_training(runs)
    assert [run.in_flight for run in runs] == [micro_batches if schedule == "GPipe" else n - rank for rank in range(n)]
    each = {run.kept_bytes / run.in_flight for run in runs[1:-1]}
    assert len(each) == min(n - 2, 1)  # a micro-batch weighs as much on every stage in the middle
    everything = {(kind, chunk) for kind in "FB" for chunk in range(micro_batches)}
    for rank, run in enumerate(runs):
        assert {(work.kind, work.micro_batch) for work in run.order} == everything
        assert len(run.order) == len(everything) and {work.stage for work in run.order} == {rank}
    assert bubble(runs) == Fraction(n - 1, micro_batches + n - 1)


@pytest.mark.parametrize(
    "schedule, expected", [("Interleaved1F1B", Fraction(3, 19)), ("ZBVZeroBubble", Fraction(1, 17))]
)
def test_two_stages_a_rank(schedule, expected):
    """Narayanan and others' (p - 1)/(vm + p - 1) for v = 2 chunks; the zero-bubble V leaves one turn of seventeen."""
    runs = run_ranks(pipeline, 4, schedule, 8)
    check_same_training(runs)
    assert bubble(runs) == expected
    for rank, run in enumerate(runs):
        assert {work.stage for work in run.order} == set(stages_of(schedule, rank, 4))


def test_a_v_of_stages_levels_what_is_held():
    held = {schedule: [run.in_flight for run in run_ranks(pipeline, 4, schedule, 8)] for schedule in TWO_STAGES}
    assert held["ZBVZeroBubble"] == [4, 4, 4, 4]
    assert held["Interleaved1F1B"] == sorted(held["Interleaved1F1B"], reverse=True) and held["Interleaved1F1B"][0] > 4


def test_a_split_backward_does_each_half_once():
    for run in run_ranks(pipeline, 4, "ZBVZeroBubble", 8):
        of = {kind: {work[1:] for work in run.order if work.kind == kind} for kind in "FBIW"}
        assert of["I"] == of["W"] and of["I"] and not of["B"] & of["I"]
        assert of["B"] | of["I"] == of["F"] and len(of["F"]) == 2 * 8


def test_the_clock_shows_the_bubble_too():
    runs = run_ranks(pipeline, 2, "1F1B", 4, 0.02)
    assert 0 < measured_bubble(runs) < 1
    assert all(begin < end for run in runs for begin, end in run.spans)


def works(stage: int, *kinds: str) -> list[Work]:
    return [Work(kind, stage, 0) for kind in kinds]


def test_a_timetable_keeps_the_dependencies():
    rows = timetable([PipelineRun(works(0, "F", "B")), PipelineRun(works(1, "F", "I", "W"))])
    assert rows == [
        [(Work("F", 0, 0), 0, 1), (Work("B", 0, 0), 3, 2)],
        [(Work("F", 1, 0), 1, 1), (Work("I", 1, 0), 2, 1), (Work("W", 1, 0), 3, 1)],
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        timetable([PipelineRun(works(0, "B", "F")), PipelineRun(works(1, "F", "B"))])


@pytest.mark.parametrize(
    "n, args, words",
    [
        (9, (), "층이 8개인 모델을 9단계로"),
        (5, ("Interleaved1F1B", 16), "층이 8개인 모델을 10단계로"),
        (2, ("GPipe", 7), "64행을 마이크로 배치 7개로"),
        (2, ("GPipe", 0), "1 이상의 정수"),
        (4, ("1F1B", 2), "마이크로 배치가 2개인데"),
        (4, ("ZBVZeroBubble", 4), "단계는 8개"),
        (2, ("3F3B", 4), "모르는 순서"),
    ],
)
def test_bad_pipelines(n, args, words):
    with pytest.raises(RankError, match=words):
        run_ranks(pipeline, n, *args)


# -- tensor and sequence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_tensor_parallel(n):
    for run in run_ranks(tensor_parallel_mlp, n):
        assert run.forward == run.backward == Counter(all_reduce=1) and run.difference < 1e-12
        assert run.shapes == {"up": (32 // n, 8), "down": (8, 32 // n)}
    whole = 8 * sum(p.numel() for p in tiny_model(torch.float64).parameters())
    for run in run_ranks(tensor_parallel, n):
        assert run.forward == run.backward == Counter(all_reduce=4) and run.difference < 1e-12
        assert run.shapes["attention.query_key_value"] == (192 // n, 64)
        assert run.shapes["mlp.dense_4h_to_h"] == (64, 256 // n)
        split = 8 * 2 * (192 * 64 + 64 * 64 + 2 * 64 * 256 + 192 + 256)  # the matrices and the columns' biases
        assert run.held == whole - split + split // n


@pytest.mark.parametrize("n", [2, 4])
def test_sequence_parallel_keeps_less_and_sends_the_same(n):
    plain, split = (run_ranks(tensor_parallel_mlp, n, on)[0] for on in (False, True))
    assert split.difference < 1e-12 and split.kept < plain.kept
    # An all-reduce is a reduce-scatter and an all-gather.
    assert split.forward == Counter(all_gather_into_tensor=1, reduce_scatter_tensor=1)


GOOD_PLAN = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "columns") | dict.fromkeys(
    ("o_proj", "down_proj"), "rows"
)


def test_a_plan_for_llama():
    assert run_ranks(tensor_parallel_llama, 2, GOOD_PLAN)[0].difference < 1e-12


def test_heads_that_do_not_divide():
    with pytest.raises(RankError, match="어텐션 헤드 4개를 텐서 병렬 크기 3"):
        run_ranks(tensor_parallel, 3)


# -- pictures ------------------------------------------------------------------------------------------------------


def test_pictures():
    runs = {schedule: run_ranks(pipeline, 2, schedule, 4) for schedule in SCHEDULES}
    picture = draw_pipeline(runs)
    assert "GPipe: 1/5, 1F1B: 1/5" in picture.alt and ">최대 4</text>" in picture.svg()
    assert "[[1, 2, 4, 7], [3, 4, 10, 15]]" in draw_matrix_splits().alt
    shapes = run_ranks(tensor_parallel, 2)[0].shapes
    assert "64×128" in draw_block_splits(shapes, heads=4).svg()
    assert draw_model_splits().svg().count("<rect") > 64
