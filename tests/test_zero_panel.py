"""Chapter 6's panel without a browser: what it shows is what `rank_step` says; what cannot be split is one line."""

import re
import threading

import pytest
from moved_panels import Later

from helpers import rank_step, zero_panel
from virtual_gpu.shards.ledger import PAPER_MODELS
from virtual_gpu.units import human_bytes

LLAMA = "meta-llama/Llama-3.2-1B"


@pytest.fixture
def panel():
    panel = zero_panel()
    panel.controls["model"].value = LLAMA
    return panel


def choose(panel, **values):
    """As messages of a browser come, from another thread: all before the panel has answered to the first."""
    panel._loop = later = Later()

    def move():
        for name, value in values.items():
            panel.controls[name].value = value

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    later.goes_on()


def test_it_shows_its_first_setting():
    panel = zero_panel()
    assert repr(panel) == "조작 패널(이 셀을 실행하면 나타난다)"
    assert "<svg" in panel.picture.value and 'role="status"' in panel.status.value
    assert "들어간다" in panel.status.value


@pytest.mark.parametrize(
    "values",
    [
        {"stage": 0, "ranks": 1},
        {"stage": 1, "ranks": 8, "model": "ZeRO-7.5B", "sequence_length": 256},
        {"stage": 2, "ranks": 512, "precision": "bf16", "gradient_checkpointing": False, "gpu": "T4"},
        {"stage": 3, "ranks": 16384},
        {"tensor_parallel": 8, "batch_size": 4, "sequence_length": 1024},
    ],
    ids=str,
)
def test_it_shows_what_the_step_says(panel, values):
    choose(panel, **values)
    step = rank_step(**panel.values(), exact=False)
    assert human_bytes(step.total) in panel.status.value
    for nbytes in step.at_peak.values():
        assert human_bytes(nbytes) in panel.picture.value


def test_moving_the_number_of_ranks_runs_nothing_new(panel, monkeypatch):
    from virtual_gpu.shards import rank_step as module

    monkeypatch.setattr(module, "run_rank", lambda *_, **__: pytest.fail("run again"))
    shown = set()
    for ranks in (2, 8, 64, 256):
        choose(panel, ranks=ranks)
        shown.add(panel.status.value)
    assert len(shown) == 4 and not any("alert" in text for text in shown)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"tensor_parallel": 16}, "키·값 헤드 8개를 텐서 병렬 크기 16"),
        ({"ranks": 4, "tensor_parallel": 8}, "GPU 4개를 텐서 병렬 8개씩"),
        ({"stage": 1, "tensor_parallel": 2}, "ZeroRedundancyOptimizer"),
        ({"model": "openai-community/gpt2", "sequence_length": 4096}, "최대 길이는 1024"),
        ({"model": "openai-community/gpt2", "tensor_parallel": 2}, "텐서 병렬 계획"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_one_line(panel, values, words):
    choose(panel, **values)
    assert 'role="alert"' in panel.status.value and words in panel.status.value
    assert panel.picture.value == ""
    text = re.sub("<[^>]*>", "", panel.status.value)
    assert "\n" not in text and len(text) < 200
    choose(panel, model=LLAMA, ranks=64, stage=3, tensor_parallel=1, sequence_length=1024)
    assert "<svg" in panel.picture.value


def test_every_model_can_be_chosen():
    options = zero_panel().controls["model"].options
    assert set(PAPER_MODELS) < set(options)
