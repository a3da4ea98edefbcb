"""Chapter 6's ring and chapter 7's pipeline, moment by moment: what moves there is what is computed."""

import pytest
import torch

from helpers import ring_panel
from helpers.chapters.c6_distributed.ring import ring_all_reduce
from helpers.chapters.c7_split.drawings import held_at, working_at
from helpers.chapters.c7_split.panel import pipeline_panel
from helpers.chapters.c7_split.pipeline import PipelineRun, Work, timetable


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("numbers", [8, 11])
def test_the_ring_sums(ranks, numbers):
    """All ranks end with the sum, each step one piece to the next rank, 2(N - 1)/N of a vector in all."""
    generator = torch.Generator().manual_seed(ranks)
    vectors = [torch.randint(-9, 9, (numbers,), generator=generator) for _ in range(ranks)]
    moments = ring_all_reduce(vectors)
    assert len(moments) == 2 * ranks - 1 and moments[0].sent == [] and moments[0].bytes_sent == 0
    for rank in range(ranks):
        assert torch.equal(torch.cat(moments[0].held[rank]), vectors[rank])
        assert torch.equal(torch.cat(moments[-1].held[rank]), sum(vectors))
    assert all(count == ranks for row in moments[-1].summed for count in row)
    for moment in moments[1:]:
        assert sorted(source for source, _, _ in moment.sent) == [*range(ranks)]
        assert all(target == (source + 1) % ranks for source, target, _ in moment.sent)
    if numbers % ranks == 0:
        assert moments[-1].bytes_sent == 2 * (ranks - 1) * numbers // ranks * vectors[0].element_size()


def test_between_the_halves_every_piece_is_whole_in_one_place():
    moments = ring_all_reduce([torch.ones(4) for _ in range(4)])
    assert [sum(count == 4 for row in moment.summed for count in row) for moment in moments] == [0, 0, 0, 4, 8, 12, 16]


def test_a_ring_of_one_or_of_too_short_vectors_is_refused():
    for vectors in ([torch.ones(4)], [torch.ones(2)] * 3):
        with pytest.raises(ValueError, match="rank"):
            ring_all_reduce(vectors)


def test_the_ring_panel_steps():
    panel = ring_panel()
    assert "보낸 조각: 0→1 [3]" in panel.status.value and "2/6 reduce-scatter" in panel.picture.value
    panel.controls["moment"].value = 6
    assert "모든 rank가 같다" in panel.picture.value and "보낸 것 24 B" in panel.picture.value
    panel.controls["ranks"].value = 2
    assert panel.controls["moment"].max == panel.controls["moment"].value == 2
    assert "2/2 all-gather" in panel.picture.value
    assert panel._repr_mimebundle_()["image/svg+xml"] == panel.picture.value


def run_of(text, stage):
    """A rank's order, from "F0 F1 B0 B1"."""
    return PipelineRun(order=[Work(word[0], stage, int(word[1:])) for word in text.split()])


PIPELINES = {
    "GPipe": [run_of("F0 F1 F2 B0 B1 B2", stage) for stage in range(2)],
    "1F1B": [run_of("F0 F1 B0 F2 B1 B2", 0), run_of("F0 B0 F1 B1 F2 B2", 1)],
}


@pytest.mark.parametrize("schedule", PIPELINES)
def test_what_is_held_grows_with_a_forward_and_ends_with_its_backward(schedule):
    runs = PIPELINES[schedule]
    end = max(start + duration for row in timetable(runs) for _, start, duration in row)
    held = [held_at(runs, moment) for moment in range(end + 1)]
    assert held[0] == held[-1] == [0, 0]
    assert [max(now[rank] for now in held) for rank in range(2)] == ([3, 3] if schedule == "GPipe" else [2, 1])
    busy = [sum(working_at(runs, moment)[rank] is not None for moment in range(1, end + 1)) for rank in range(2)]
    assert busy == [9, 9]  # three forwards of 1 and three backwards of 2


def test_the_pipeline_panel_steps():
    panel = pipeline_panel(PIPELINES)
    panel.controls["schedule"].value, panel.controls["moment"].value = "1F1B", 2
    assert "rank 0: 순전파 1, 붙든 것 2 · rank 1: 순전파 0, 붙든 것 1" in panel.status.value
    assert "지금 2" in panel.picture.value
    panel.controls["moment"].value = panel.controls["moment"].max
    assert "붙든 것 0 · rank 1" in panel.status.value
    panel.controls["schedule"].value = "GPipe"
    assert panel.controls["moment"].max == max(s + d for row in timetable(PIPELINES["GPipe"]) for _, s, d in row)
    assert panel._repr_mimebundle_()["image/svg+xml"] == panel.picture.value
