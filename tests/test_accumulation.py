"""Accumulation: gradients of splits, what the trainers make of it, every split's memory against a run, pictures."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers import predict_memory
from helpers.chapters.c4_accumulation.accumulation import (
    capital_samples,
    difference,
    draw_splits,
    gradient,
    small_gpt2,
)
from helpers.chapters.c4_accumulation.pictures import draw_gradients, draw_losses
from helpers.experiment import splits
from helpers.small_model import SmallLanguageModel, sentences
from helpers.trainers import largest_difference, train_with_trainer

SETTINGS = {
    "max_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "optim": "adamw_torch",
}


@pytest.fixture(scope="module")
def rows():
    """16 sentences whose answers differ in length."""
    _, labels = sentences()
    chosen = (labels >= 0).sum(1).argsort(stable=True)[::4]
    assert len({int(n) for n in (labels[chosen] >= 0).sum(1)}) > 3
    return chosen


def gradient_of(model, parts, count=None):
    """Of the mean over every part's answers by the number of parts, or of their sums by `count`."""
    inputs, labels = sentences()
    model.zero_grad()
    for part in parts:
        loss = cross_entropy(
            model(inputs[part]).flatten(0, 1), labels[part].flatten(), reduction="sum" if count else "mean"
        )
        (loss / (count or len(parts))).backward()
    return gradient(model)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 5])
def test_sums_over_all_tokens_are_the_big_batch_and_means_of_means_are_not(rows, size):
    torch.manual_seed(0)
    model = SmallLanguageModel().double()
    whole = gradient_of(model, [rows])
    count = int((sentences()[1][rows] >= 0).sum())
    assert difference(gradient_of(model, rows.split(size), count), whole) < 1e-12
    assert difference(gradient_of(model, rows.split(size)), whole) > 0.01


def test_what_has_no_gradient_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="그레이디언트가 없다"):
        gradient(model)
    model(torch.ones(1, 2)).sum().backward()
    assert gradient(model).shape == (6,)
    assert difference(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 5.0])) == pytest.approx(10**0.5 / 5)


def test_labels_are_those_that_transformers_shifts(rows):
    inputs, labels = sentences()
    model = small_gpt2()
    samples = capital_samples(rows)
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    # transformers computes the loss in fp32, and shifts: no answer may end at a row's last character.
    assert (labels[rows][:, -1] < 0).all()
    logits = model(input_ids=inputs[rows]).logits
    assert float(model(**batch).loss) == pytest.approx(
        float(cross_entropy(logits.flatten(0, 1), labels[rows].flatten())), abs=1e-5
    )


def test_the_trainer_counts_tokens(rows):
    samples = capital_samples(rows)
    at_once = train_with_trainer(small_gpt2(), samples, per_device_train_batch_size=16, **SETTINGS)
    for size in (1, 4, 8):
        split = train_with_trainer(
            small_gpt2(),
            samples,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=16 // size,
            **SETTINGS,
        )
        assert largest_difference(split, at_once) < 1e-9
    assert largest_difference(at_once, small_gpt2()) > 1e-4


def test_the_small_gpt2_is_the_same_every_time():
    torch.manual_seed(5)
    first = small_gpt2()
    assert largest_difference(first, small_gpt2()) == 0
    assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), torch.rand(3))  # nothing was drawn
    assert largest_difference(first, small_gpt2(seed=1)) > 0


def test_where_accumulation_needs_more_than_its_micro_batch():
    """Gradients that are held through the next forward and backward; hidden where the optimizer step is the peak."""
    fused = [
        predict_memory(batch_size=4, gradient_accumulation_steps=steps, optimizer="adamw_fused", gpu="T4")
        for steps in (1, 2, 4)
    ]
    assert fused[0].needed_bytes < fused[1].needed_bytes == fused[2].needed_bytes
    assert fused[1].needed_bytes - fused[0].needed_bytes < fused[0].gradients_bytes
    foreach = [predict_memory(batch_size=4, gradient_accumulation_steps=steps, gpu="T4") for steps in (1, 4)]
    assert foreach[0].needed_bytes == foreach[1].needed_bytes
    assert {report.peak_phase for report in foreach} == {"step"}


def test_pictures():
    bars = draw_splits(splits(4, gpu="T4", model_id="gpt2", sequence_length=64)).svg()
    assert all(f"배치 크기 {size}, 누적 {4 // size}" in bars for size in (1, 2, 4))
    parts, whole = [[1.0, -2.0], [0.5, 1.0]], [1.5, -1.0]
    picture = draw_gradients(parts, whole).svg()
    assert picture.count("<circle") == 2 and "마이크로 배치 2" in picture
    assert draw_losses({"a": (2, [3.0, 1.0]), "b": (2, [3.0, 1.0])}).svg().count("<circle") == 1
