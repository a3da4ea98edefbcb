"""Many micro-batches from a few: the trace is the one of a run with all of them, or there is none."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.experiment import predict_memory
from virtual_gpu.cards import CATALOG
from virtual_gpu.models.configs import load_config
from virtual_gpu.models.depth import with_depth
from virtual_gpu.step import predict
from virtual_gpu.step.predict import virtual_run
from virtual_gpu.step.setting import Setting
from virtual_gpu.trace.micro_batches import LATER, MICRO_BATCHES, with_micro_batches

ARRAYS = ("born", "nbytes", "category", "span", "stream")


def trace_of(wanted, later=None, **setting):
    chosen = Setting(**{"batch_size": 2, "model_id": "gpt2", "gradient_accumulation_steps": wanted} | setting)
    return virtual_run(chosen, with_depth(load_config(chosen.model_id), 2), CATALOG["T4"], later).trace


@pytest.fixture(scope="module")
def few():
    return trace_of(MICRO_BATCHES, LATER)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"gradient_checkpointing": True},
        {"peft": "qlora", "lora_targets": "all-linear"},
        {"precision": "mixed_fp16", "optimizer": "adafactor"},
        {"model_id": "meta-llama/Llama-3.2-1B", "optimizer": "adamw_8bit"},
        # Its layers have biases, in fp32: bitsandbytes casts them once.
        {"model_id": "EleutherAI/polyglot-ko-1.3b", "peft": "qlora", "precision": "autocast_fp16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("wanted", [2, 5])
def test_it_is_the_trace_of_a_run_with_all_of_them(setting, wanted):
    few = trace_of(min(wanted, MICRO_BATCHES), LATER, **setting)
    ours, run = with_micro_batches(few, wanted), trace_of(wanted, **setting)
    assert ours.names == run.names
    for name in ARRAYS:
        assert np.array_equal(getattr(ours, name), getattr(run, name)), name


@pytest.mark.parametrize(
    "model_id", ["EleutherAI/polyglot-ko-1.3b", pytest.param("google/gemma-3-270m", marks=pytest.mark.stress)]
)
def test_the_report_is_that_of_the_full_run(model_id):
    setting = Setting(1, 6, model_id=model_id)
    ours, full = (predict_memory(setting, gpu="T4", full=full).to_dict() for full in (False, True))
    assert ours | {"method": "run"} == full


def in_last(trace, step=0):
    """Entries of the last micro-batch of a step."""
    phase = 2 * MICRO_BATCHES + 1 + 2 * (LATER - 1) if step else 2 * (MICRO_BATCHES - 1)
    return np.flatnonzero((trace.span > 2 * phase) & (trace.span < 2 * phase + 5))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", ["nbytes", "category", "born"])
def test_one_entry_that_differs_is_enough_to_refuse(few, step, name):
    entries = in_last(few, step)
    for entry in (entries[0], entries[len(entries) // 2], entries[-1]):
        values = getattr(few, name).copy()
        values[entry] += 1
        assert with_micro_batches(replace(few, **{name: values}), 7) is None


def test_what_is_kept_longer_is_refused(few):
    entries = in_last(few)
    length = len(entries)
    born = few.born.copy()
    late = np.flatnonzero(~few.allocates & (np.arange(len(few)) > entries[-1]))[0]
    born[late] = entries[0] - length  # the step frees what the last but one had left
    assert with_micro_batches(replace(few, born=born), 7) is None


def test_other_phases_are_refused(few):
    assert with_micro_batches(replace(few, names=("forward", *few.names[1:])), 7) is not None
    assert with_micro_batches(replace(few, names=("backward", *few.names[1:])), 7) is None
    assert with_micro_batches(replace(few, names=few.names[:-1]), 7) is None


def test_without_the_proof_all_are_run(monkeypatch):
    setting = Setting(1, 6, model_id="gpt2")
    proven = predict_memory(setting, gpu="T4").to_dict()
    ran = []
    run = predict.virtual_run
    monkeypatch.setattr(predict, "with_micro_batches", lambda *_: None)
    monkeypatch.setattr(
        predict, "virtual_run", lambda s, *rest: (ran.append(s.gradient_accumulation_steps), run(s, *rest))[1]
    )
    assert predict_memory(setting, gpu="T4").to_dict() == proven
    assert ran[-1] == 6


def test_what_releases_something_older_is_refused(few):
    """The last two are alike, but each gives back what lay there two micro-batches before."""
    entries = in_last(few)
    length, start = len(entries), entries[0] - len(entries)
    born = few.born.copy()
    release = entries[~few.allocates[entries]][0]
    born[release], born[release - length] = start - 1, start - 1 - length
    assert with_micro_batches(replace(few, born=born), 7) is None
