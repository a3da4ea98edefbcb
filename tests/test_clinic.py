"""Chapter 10: what dies, what is kept and whose line it is; the panel; the self-test."""

from __future__ import annotations

import os
import re

import pytest
import torch
from process_state import process_state

import virtual_gpu
from helpers import doctor_panel, predict_memory
from helpers.chapters.c10_clinic import broken, lengths
from helpers.chapters.c10_clinic.blocks import alive_by_line, events
from helpers.chapters.c10_clinic.caught import caught
from helpers.chapters.c10_clinic.growth import growth_chart
from helpers.chapters.c10_clinic.panel import MOST
from virtual_gpu.errors import UnknownName, WrongValue
from virtual_gpu.units import MiB


def fills():
    return [torch.empty(200 * MiB, dtype=torch.uint8, device="cuda") for _ in range(10)]


def retries():
    try:
        fills()
    except torch.OutOfMemoryError:
        fills()


def test_a_traceback_has_neither_our_frames_nor_folders():
    text = caught(fills, gpu="1GiB")
    assert text.startswith("Traceback (most recent call last):\n") and "in fills" in text
    assert "virtual_gpu/" not in text and "caught.py" not in text
    assert "During handling" not in text
    again = caught(retries, gpu="1GiB")
    assert again.count("Traceback (most recent call last)") == 2 and "During handling" in again
    assert virtual_gpu.diagnose(again).verdict == "in_handler"
    assert "200.00 MiB" in caught(lambda: torch.empty(200 * MiB, dtype=torch.uint8, device="cuda"), gpu="1GiB")


def test_whose_line_is_alive():
    with virtual_gpu.cuda("1GiB"):
        torch.cuda.memory._record_memory_history()
        kept = [torch.ones(MiB, device="cuda") for _ in range(3)]
        passing = torch.ones(MiB, device="cuda")
        del passing
        snapshot = torch.cuda.memory._snapshot()
    assert alive_by_line(snapshot)[0][:2] == ["12.00 MiB", "3"]
    assert alive_by_line(snapshot)[0][2].startswith("kept = [")
    actions = [row[0] for row in events(snapshot, most=99)]
    assert actions.count("alloc") == 4 and actions.count("free_completed") == 1
    assert len(kept) == 3


# -- lengths ----------------------------------------------------------------------------------------------------------

LENGTHS = lengths.example_lengths(200)


@pytest.mark.parametrize(
    "batches",
    [
        lengths.random_batches(LENGTHS, 16),
        lengths.grouped_batches(LENGTHS, 16),
        lengths.budget_batches(LENGTHS, 4096),
    ],
)
def test_every_text_is_in_one_batch(batches):
    assert sorted(length for batch in batches for length in batch) == sorted(LENGTHS)


def test_what_grouping_and_packing_do():
    """The longest comes first and is as long as ever; rows are filled without cutting a text."""
    grouped = lengths.grouped_batches(LENGTHS, 16)
    assert max(grouped[0]) == max(LENGTHS) and len(grouped[0]) == 16
    assert lengths.Epoch(grouped).padding < lengths.Epoch(lengths.random_batches(LENGTHS, 16)).padding
    rows = [row for batch in lengths.packed_batches(LENGTHS, 4) for row in batch]
    assert sum(LENGTHS) <= sum(rows) < sum(LENGTHS) + 2 * 1024
    assert all(max(batch) * len(batch) <= 4096 for batch in lengths.budget_batches(LENGTHS, 4096))


def test_a_peak_between_two_runs_is_on_the_line():
    """6,144 tokens, in another shape than the grid's: within a hundredth of what is run."""
    ran = predict_memory(**lengths.MODEL, batch_size=24, sequence_length=256, gpu="T4").needed_bytes
    assert lengths.peak_of(6144) == pytest.approx(ran, rel=0.01)
    with pytest.raises(WrongValue, match="32,768"):
        lengths.peak_of(40_000)
    epoch = lengths.Epoch([[512] * 16, [1024] * 16, [128] * 16])
    assert epoch.beyond == [2] and epoch.padding == 0
    assert "한도를 넘는다" in epoch.chart().title


def test_the_longest_batch_is_highest_the_second_time():
    """The optimizer's state is there from the first step's end."""
    once, twice = lengths.step_peaks([[256] * 16, [128] * 16]), lengths.step_peaks([[256] * 16] * 2)
    assert once[0] == twice[0] > once[1] and twice[1] > twice[0]
    assert twice[1] < lengths.needed(16, 256)


def test_within_the_limit_is_not_to_the_end():
    """The same peak in each: of changing shapes a step dies before any passes the limit, of one shape none does."""
    texts = lengths.example_lengths()
    cut = lengths.random_batches([min(length, 512) for length in texts], 16)
    budget, packed = lengths.budget_batches(texts, 8192), lengths.packed_batches(texts, 8)
    for batches in (cut, budget, packed):
        assert lengths.Epoch(batches).beyond == []
    assert lengths.died_in(cut) == 7 and lengths.died_in(budget) == 3
    assert lengths.died_in(budget[:4], "expandable_segments:True") is lengths.died_in(packed[:3]) is None


def test_growth():
    assert "line 2.00 MiB" in growth_chart(line=[MiB, 3 * MiB]).alt
    assert "line 3.00 GiB" in growth_chart(2**34, line=[2**30, 3 * 2**30]).alt


# -- the self-test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", broken.PROGRAMS)
def test_a_program_is_short_dies_and_its_cause_is_known(number):
    program = broken.PROGRAMS[number]
    assert program.source.count("\n") <= 15 and program.cause in broken.CAUSES
    assert max(map(len, program.source.splitlines())) <= 110
    before = process_state()["random numbers"]
    text = broken.dead(number)
    assert process_state()["random numbers"] == before  # the Trainer seeds them
    assert text.count("CUDA out of memory") == (2 if program.cause == "handler" else 1)
    assert virtual_gpu.diagnose(text).users_line.file == f"program_{number}.py"
    # From one moment nobody can know that it was the longest batch, or that something grew.
    assert broken.named(number) == (program.cause not in ("longest", "kept"))


def test_answers_are_marked():
    marked = broken.rounds({1: "logits", 2: "kept", 3: None})
    assert "2개를 답해 1개를 맞혔다. 의사는 7개" in marked.score
    page = marked._repr_html_()
    before, folded = page.split("<details>")
    assert before.count("<tr>") == 3 and folded.count("<tr>") == 9
    with pytest.raises(WrongValue, match="11"):
        broken.rounds({11: "logits"})
    with pytest.raises(UnknownName, match="leak"):
        broken.rounds({1: "leak"})
    assert "&quot;gpt2&quot;" in broken.ward()._repr_html_()


def test_expandable_segments_save_none_of_the_ten(monkeypatch):
    """Where the message does not exclude fragmentation a little more is allocated, and the next request dies."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    rows = {int(row[0]): row for row in broken.with_expandable_segments(*broken.PROGRAMS)}
    noted = [
        n for n in rows if "fragmentation" in {found.cause for found in virtual_gpu.diagnose(broken.dead(n)).findings}
    ]
    assert noted == [4, 6, 7, 8]
    assert [rows[n][3:] for n in (4, 6)] == [
        ["14.17 GiB", "178.00 MiB", "14.47 GiB"],
        ["14.57 GiB", "20.00 MiB", "14.63 GiB"],
    ]
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    with pytest.raises(WrongValue, match="11"):
        broken.with_expandable_segments(11)


# -- the panel --------------------------------------------------------------------------------------------------------


def test_every_example_is_run_ahead_and_warns_of_nothing(capfd):
    panel = doctor_panel()
    panel.controls["text"].value = "something pasted"
    broken.dead.cache_clear()
    for piece in panel.ahead.pieces():
        piece()
    assert broken.dead.cache_info().misses == broken.dead.cache_info().currsize == len(broken.PROGRAMS)
    assert panel.controls["text"].value == "something pasted" and "진단" in panel.status.value
    panel.controls["example"].value = 4
    assert broken.dead.cache_info().misses == len(broken.PROGRAMS) and "<table" in panel.picture.value
    assert capfd.readouterr() == ("", "")


def test_the_panel_reads_what_is_pasted():
    panel = doctor_panel()
    text = panel.controls["text"]

    def told():
        return re.sub("<[^>]+>", "", panel.status.value)

    panel.ask.click()
    assert "비어 있다" in told() and panel.picture.value == ""
    text.value = broken.dead(2)
    assert "진단" in told() and panel.picture.value == ""
    panel.ask.click()
    assert "읽었다" in told() and panel.diagnosis.verdict == "optimizer_first_step"
    assert "program_2.py:8" in panel.picture.value
    text.value = '<script>alert("x")</script> CUDA out of memory. Tried to allocate <b>'
    panel.ask.click()
    assert "<script" not in panel.picture.value
    text.value = "ValueError: nothing to see"
    panel.ask.click()
    assert "찾지 못했다" in panel.picture.value
    text.value = "x\n" * MOST + broken.dead(2)
    panel.ask.click()
    assert panel.diagnosis.verdict == "optimizer_first_step" and "끝부분만" in panel.picture.value
    panel.controls["example"].value = 10
    assert panel.diagnosis.verdict == "limit" and text.value == broken.dead(10)


def test_the_shapes_of_late_deaths_are_told_apart():
    from helpers.chapters.c10_clinic.shapes import four_shapes, shapes_chart

    longest, kept, cache, fragmented = four_shapes().values()
    for shape in (longest, cache, fragmented):
        assert len(set(shape.held)) == 1  # nothing stays
    assert kept.held[0] < kept.held[1] < kept.held[2] and kept.wanted > kept.limit
    assert longest.wanted > longest.limit and max(longest.most[:-1]) < longest.limit
    assert cache.wanted is None and cache.reserved[-1] > cache.reserved[0]
    assert fragmented.wanted < fragmented.limit  # room enough, but not in one piece
    assert len(fragmented.held) >= 8 and len(set(fragmented.reserved[:-1])) >= 4  # it is seen to grow
    assert "OOM" in shapes_chart({"longest": longest}).alt


def test_three_cures_of_scattered_room():
    from helpers.chapters.c10_clinic.shapes import rooms

    plain, *cured = rooms()
    assert plain[3:] == ["끝까지 간다", "스텝 4에서 죽는다"]
    assert all(row[3:] == ["끝까지 간다", "끝까지 간다"] for row in cured)


def test_what_stays_is_drawn_to_the_end():
    import torch

    from helpers.chapters.c10_clinic.shapes import history_chart

    with virtual_gpu.cuda("T4"):
        torch.cuda.memory._record_memory_history()
        kept = []
        for _ in range(3):
            kept.append(torch.zeros(2**25, device="cuda"))
            torch.zeros(2**26, device="cuda")  # passes
        snapshot = torch.cuda.memory._snapshot()
    chart = history_chart(snapshot)
    assert "3" in chart.alt and "kept.append" in chart.svg()
