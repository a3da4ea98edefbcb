"""Every split of a batch: which there are, and their memory and FLOPs against runs of them."""

import pytest

from helpers import gpu_memory_experiment, training_flops
from helpers.experiment import splits
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.step.splits import equal_splits, split_setting


def test_splits_are_equal_and_none_is_left_out():
    assert equal_splits(12) == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    assert equal_splits(7) == [(7, 1), (1, 7)]
    assert equal_splits(1) == [(1, 1)]


def test_every_split_against_a_run():
    setting = {"model_id": "gpt2", "sequence_length": 64}
    found = splits(4, gpu="T4", **setting)
    assert [(split.micro_batch, split.steps) for split in found] == [(4, 1), (2, 2), (1, 4)]
    for split in found:
        run = gpu_memory_experiment(
            split.micro_batch,
            gradient_accumulation_steps=split.steps,
            gpu=VirtualGPU(CATALOG["T4"]),
            **setting,
        )
        assert split.report.needed_bytes == run.peak_bytes
        assert split.flops == split.steps * training_flops(batch_size=split.micro_batch, **setting).total


def test_completions_of_a_whole_step_are_generated_at_once():
    setting = {"model_id": "gpt2", "sequence_length": 64, "objective": "grpo"}
    assert split_setting(2, 8, **setting).rollout == 16 and split_setting(2, 8, **setting, rollout=32).rollout == 32
    assert split_setting(2, 8, **setting | {"objective": "sft"}).rollout == 0


@pytest.mark.parametrize("batch", [0, -4, 2.5, "many", True])
def test_a_batch_that_cannot_be_split(batch):
    with pytest.raises(ValueError, match="batch="):
        splits(batch, gpu="T4")


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_steps_that_nobody_can_take(steps):
    with pytest.raises(ValueError, match="steps="):
        split_setting(4, steps)
