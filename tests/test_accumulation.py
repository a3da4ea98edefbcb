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
    moved,
    small_gpt2,
)
from helpers.chapters.c4_accumulation.cases import GROUP, memory_of, submitted_loop
from helpers.chapters.c4_accumulation.communication import all_reduced_bytes
from helpers.chapters.c4_accumulation.mistakes import MISTAKES, Mistakes, compared
from helpers.chapters.c4_accumulation.pictures import draw_gradients, draw_losses
from helpers.chapters.c4_accumulation.precision import draw_lost, sum_errors
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
    assert not moved(small_gpt2()).any()
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


def test_accumulation_takes_its_memory_once():
    """Case 4-A: all gradients from the second micro-batch on, and nothing with the third."""
    one, two, four = (memory_of(gradient_accumulation_steps=steps) for steps in (1, 2, 4))
    assert one.fits and not two.fits
    assert two.needed_bytes == four.needed_bytes
    assert two.needed_bytes - one.needed_bytes == pytest.approx(two.gradients_bytes, rel=0.01)
    with pytest.raises(ValueError, match="4번까지만"):
        memory_of(gradient_accumulation_steps=64)


def test_the_submitted_loop_makes_two_of_the_mistakes():
    """Case 4-B: right for equal lengths, with a shorter last group too; wrong for each of the two alone."""
    right = compared(torch.ones(1), torch.ones(1))
    assert submitted_loop() == right == submitted_loop(micro_batches=GROUP + 2)
    assert submitted_loop(micro_batches=1, max_norm=0.5) == right
    assert submitted_loop(lengths="mixed") != right != submitted_loop(max_norm=1.0)
    for wrong in ({"lengths": "long"}, {"micro_batches": 7}, {"micro_batches": 0}):
        with pytest.raises(ValueError):
            submitted_loop(**wrong)


def test_the_table_of_mistakes_takes_only_its_own():
    mistakes = Mistakes()
    mistakes[MISTAKES[0]] = compared(torch.tensor([0.0, 8.0]), torch.tensor([0.0, 2.0]))
    assert mistakes[MISTAKES[0]] == "크기 4.00배, 차이 3.000"
    assert mistakes._repr_html_().count("<tr>") == 1 + len(MISTAKES)
    with pytest.raises(ValueError, match="undivided"):
        mistakes["undivide"] = ""


def test_a_sum_in_few_bits_loses_what_is_added():
    """1 a thousand times: bf16 stops at 256, fp16 at nothing below 2,048, an fp32 sum of bf16 ones is exact."""
    ones = [torch.ones(3, dtype=torch.float64)]
    lost = sum_errors(ones, (256, 1000), torch.bfloat16, torch.bfloat16)
    assert lost == {256: 0, 1000: pytest.approx(1 - 256 / 1000)}
    for given, added in ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)):
        assert sum_errors(ones, (1000,), given, added) == {1000: 0}
    assert "bf16" in draw_lost({"bf16": {4: 0.1, 16: 0.2}}).svg()


@pytest.mark.parametrize("around_forward, times", [(True, 1), (False, 4)])
def test_no_sync_must_hold_the_forward_too(around_forward, times):
    """DDP decides in the forward whether the backward will all-reduce."""
    model = torch.nn.Linear(4, 2)

    def micro_step(ddp, part, last):
        if around_forward and not last:
            with ddp.no_sync():
                ddp(part).sum().backward()
            return
        loss = ddp(part).sum()
        if last:
            loss.backward()
            return
        with ddp.no_sync():
            loss.backward()

    sent = all_reduced_bytes(model, micro_step, torch.ones(8, 4).split(2))
    assert sent == [4 * 10] * times
    assert model.weight.grad is None and not torch.distributed.is_initialized()


def test_pictures():
    bars = draw_splits(splits(4, gpu="T4", model_id="gpt2", sequence_length=64)).svg()
    assert all(f"배치 크기 {size}, 누적 {4 // size}" in bars for size in (1, 2, 4))
    parts, whole = [[1.0, -2.0], [0.5, 1.0]], [1.5, -1.0]
    chart = draw_gradients(parts, whole)
    heights = [[bar.get_y() + bar.get_height() for bar in bars] for bars in chart.ax.containers]
    assert heights == [[1.0, -2.0], [1.5, 1.0]]  # the second stands on the first, or, of another sign, on zero
    assert chart.ax.collections[1].get_offsets().tolist() == [[1, 1.5], [2, -1.0]]
    losses = draw_losses({"a": (2, [3.0, 1.0]), "b": (4, [3.0, 1.0])})
    assert [line.get_xdata().tolist() for line in losses.ax.lines] == [[2, 4], [4]]
    assert "마이크로 배치 2" in chart.svg() and "학습한 샘플 수" in losses.svg()
