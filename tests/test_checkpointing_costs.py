"""What checkpointing costs: bytes counted by hand, gradients, FLOPs against a formula, what fits against trying."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig

from helpers import case, predict_memory
from helpers.chapters.c5_checkpointing.costs import (
    both_levers,
    compare_checkpointing,
    compare_models,
    printed_after_step,
    savings,
    step_timeline,
)
from helpers.chapters.c5_checkpointing.steps import checkpoint_modules, compare_steps
from helpers.chapters.c5_checkpointing.trainings import TRAININGS, small_gpt
from helpers.experiment import largest_fitting
from helpers.trainers import largest_difference
from virtual_gpu.models.configs import load_config
from virtual_gpu.step.flops import flops_of_config, training_flops
from virtual_gpu.step.run import set_checkpointing

each = {"use_reentrant": False}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)])


@pytest.fixture
def x():
    return torch.randn(16, 32)


def run(net, x, wrap):
    for block in net:
        x = wrap(block, x)
    return x.square().mean()


def test_held_bytes_are_those_of_the_saved_tensors(net, x):
    table = compare_steps(
        net.eval(),
        plain=lambda: net(x).square().mean(),
        each=lambda: run(net, x, lambda block, y: checkpoint(block, y, **each)),
        whole=lambda: checkpoint(net, x, **each).square().mean(),
    )
    one = 16 * 32 * 4
    loss = 4
    # Without dropout a block keeps what GELU reads; its result is the next one's input, the last one square's.
    assert table["plain"].held_bytes == 8 * one + loss
    assert table["each"].held_bytes == 4 * one + loss  # three inputs that were made here, and the last result
    assert table["whole"].held_bytes == one + loss
    assert table["each"].peak_bytes < table["plain"].peak_bytes
    assert table["whole"].peak_bytes >= table["plain"].held_bytes  # all of it comes back at once


def test_gradients_are_equal_with_dropout_and_differ_without_its_random_state(net, x):
    table = compare_steps(
        net,
        plain=lambda: net(x).square().mean(),
        same=lambda: checkpoint(net, x, **each).square().mean(),
        other=lambda: checkpoint(net, x, **each, preserve_rng_state=False).square().mean(),
    )
    assert table["same"].difference == 0 and table["other"].difference > 0
    assert "<td>0</td>" in table._repr_html_()
    assert all(p.grad is None for p in net.parameters())


def test_buffers_and_the_random_state_are_as_before():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    x, before = torch.randn(4, 8), torch.random.get_rng_state()
    compare_steps(net, plain=lambda: net(x).sum(), again=lambda: checkpoint(net, x, **each).sum())
    assert int(net[1].num_batches_tracked) == 0 and net[1].running_mean.abs().sum() == 0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_bad_steps_are_answered_clearly(net, x):
    with pytest.raises(ValueError, match="ReLU: 학습할 파라미터가 없어"):
        compare_steps(nn.ReLU(), plain=lambda: x.sum())
    with pytest.raises(ValueError, match="use_reentrant=False를 쓴다"):
        compare_steps(net, old=lambda: checkpoint(net, x, use_reentrant=True).sum())
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(ValueError, match="이 모델의 모듈: Dropout, GELU, Linear, Sequential"):
        checkpoint_modules(net, nn.Conv2d)


def test_wrapped_modules_save_in_training_and_not_in_evaluation(net, x):
    plain = compare_steps(net, plain=lambda: net(x).square().mean())["plain"]
    checkpoint_modules(net, nn.Sequential)
    calls = []
    net[0][0].register_forward_pre_hook(lambda *_: calls.append(1))
    wrapped = compare_steps(net, wrapped=lambda: net(x).square().mean())["wrapped"]
    assert all(torch.equal(plain.gradients[name], wrapped.gradients[name]) for name in plain.gradients)
    assert wrapped.held_bytes < plain.held_bytes and len(calls) > 1
    calls.clear()
    net.eval()(x)
    assert len(calls) == 1


def test_flops_are_the_matrix_products():
    """Forward: 2 a weight and token, 4·length·width a layer and token for attention; backward the double."""
    config = load_config("EleutherAI/polyglot-ko-1.3b")
    flops = training_flops(batch_size=2, sequence_length=128)
    h, layers, tokens = config.hidden_size, config.num_hidden_layers, 2 * 128
    weights = layers * 12 * h * h + config.vocab_size * h
    assert flops.forward == tokens * (2 * weights + layers * 4 * 128 * h)
    products = 2 * tokens * 2 * weights
    attention = 5 * layers * tokens * 2 * 128 * h  # the fused kernel computes the scores once more
    assert flops.backward == products + attention
    assert flops.total == flops.forward + flops.backward


def test_grouped_queries_multiply_as_often_as_queries_with_keys_of_their_own():
    config = AutoConfig.for_model(
        "llama", vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    each = flops_of_config(config, 2, 32, False)
    config.num_key_value_heads = 2
    shared = flops_of_config(config, 2, 32, False)
    spared = 2 * 2 * 32 * 2 * 2 * 64 * (64 - 16)  # tokens, layers, keys and values, narrower products
    assert (each.forward - shared.forward, each.backward - shared.backward) == (spared, 2 * spared)


@pytest.mark.parametrize("on", [False, True])
def test_flops_at_full_depth_follow_from_two_layers_and_three(on):
    config = load_config("gpt2")
    predicted = training_flops(model_id="gpt2", batch_size=2, sequence_length=64, gradient_checkpointing=on)
    assert predicted == flops_of_config(config, 2, 64, on)


def test_recomputation_is_a_forward_without_head_and_without_what_early_stop_spares():
    config = load_config("EleutherAI/polyglot-ko-1.3b")
    plain = flops_of_config(config, 1, 128, False)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        whole = flops_of_config(config, 1, 128, True)
    stopped = flops_of_config(config, 1, 128, True)
    head = 2 * 128 * config.hidden_size * config.vocab_size
    last = 2 * 128 * config.num_hidden_layers * config.hidden_size * config.intermediate_size
    assert whole.total - plain.total == plain.forward - head
    assert stopped.total - plain.total == plain.forward - head - last


@pytest.mark.parametrize("on", [False, True])
def test_the_largest_that_fits_fits_and_one_more_does_not(on):
    setting = {"model_id": "gpt2-medium", "sequence_length": 256, "gradient_checkpointing": on, "gpu": "T4"}
    batch = largest_fitting("batch_size", **setting)
    assert batch > 0
    assert predict_memory(batch_size=batch, **setting).fits
    assert not predict_memory(batch_size=batch + 1, **setting).fits


def test_what_never_fits_is_zero_and_lengths_end_at_the_models_positions():
    assert largest_fitting("batch_size", model_id="Llama-3.1-8B", gpu="T4") == 0
    assert largest_fitting("sequence_length", multiple=512, model_id="gpt2", gpu="H200") == 1024
    with pytest.raises(ValueError, match="batch_size, sequence_length"):
        largest_fitting("length", gpu="T4")


def test_from_the_second_micro_batch_on_memory_stays():
    setting = {"model_id": "gpt2", "batch_size": 2, "sequence_length": 128, "gpu": "T4"}
    needed = [predict_memory(**setting, gradient_accumulation_steps=steps).needed_bytes for steps in (1, 2, 3, 8)]
    assert needed[1] == needed[2] == needed[3]


def test_both_levers_choose_the_least_work_that_fits():
    levers = both_levers(4, model_id="gpt2", sequence_length=128, gpu="T4")
    assert [(c.micro_batch, c.steps, c.checkpointing) for c in levers] == [
        (4, 1, False), (4, 1, True), (2, 2, False), (2, 2, True), (1, 4, False), (1, 4, True)
    ]  # fmt: skip
    assert levers.best == levers[0]
    assert all(c.flops == levers[0].flops for c in levers if not c.checkpointing)
    assert levers._repr_html_().count("고른다") == 1
    nothing = both_levers(2, model_id="Llama-3.1-8B", gpu="T4")
    assert nothing.best is None and "고른다" not in nothing._repr_html_()
    with pytest.raises(ValueError, match="batch=0"):
        both_levers(0, gpu="T4")


def test_what_the_book_prints_falls_with_the_cache_alone():
    with_cache, without, checkpointed = (
        printed_after_step(cache, on, batch_size=2) for cache, on in ((True, False), (False, False), (False, True))
    )
    keys_and_values = 24 * 2 * (2 * 256 * 2048 * 2)
    assert with_cache[0] - without[0] == keys_and_values
    held = predict_memory(batch_size=2, gpu="T4", full=True, holds_outputs=True)  # the book's loop
    assert without[0] == checkpointed[0] == held.allocated_bytes


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
def test_a_training_ends_with_the_same_weights(train):
    off, on = (train(small_gpt(checkpointing)) for checkpointing in (False, True))
    assert largest_difference(off, on) == 0
    assert largest_difference(off, small_gpt()) > 0
    assert on.transformer.h[0].gradient_checkpointing and not off.transformer.h[0].gradient_checkpointing


def test_every_second_layer_keeps_its_own_and_the_products_are_not_computed_again():
    kernels = ("flash", "efficient", "cudnn")  # which one is chosen depends on the card
    attention = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default for kernel in kernels]
    products = [torch.ops.aten.addmm.default, *attention]
    ways = {"off": None, "every 2": {"every_n_layers": 2}, "every 1": {}}
    ways["products"] = {"context_fn": partial(create_selective_checkpoint_contexts, products)}
    table = compare_checkpointing("polyglot-ko-1.3b", 1, ways, sequence_length=64)
    off, half, whole = (table[name].held_bytes for name in ("off", "every 2", "every 1"))
    assert half == pytest.approx((off + whole) / 2, rel=1e-5)
    assert table.extra("every 2") == pytest.approx(table.extra("every 1") / 2)
    assert table.extra("products") == 0 and table["products"].held_bytes < off


def test_wrong_answers_to_the_cases_are_told_how_wrong(capsys):
    case("5-A").check({"use_reentrant": True, "wrap": "whole"})
    case("5-A").check({"wrap": "whole"})
    case("5-A").check({"wrap": "some"})
    case("5-B").check(("gradient_checkpointing", "printed"))
    case("5-B").check(("use_cache", "printed"))
    case("5-B").check("use_cache")
    first, second, third, fourth, fifth, last = capsys.readouterr().out.splitlines()
    assert "2개만 그레이디언트를 받았다" in first and "절반 아래여야" in second and "some" in third
    assert "캐시를 꺼 두고 gradient_checkpointing만" in fourth and "달라지는가" in fifth and "짝이 아니라" in last


def test_any_model_with_a_loss_can_be_recorded_and_compared():
    from transformers import ViTConfig, ViTForImageClassification

    def vit(on):
        with torch.device("meta"):
            config = ViTConfig(image_size=64, hidden_size=64, num_hidden_layers=6, intermediate_size=256)
            return set_checkpointing(ViTForImageClassification(config).train(), on)

    images = {
        "pixel_values": torch.empty(4, 3, 64, 64, device="meta"),
        "labels": torch.zeros(4, dtype=torch.long),
    }
    plain, less = (step_timeline(vit(on), images) for on in (False, True))
    assert [phase.name for phase in plain.phases] == ["forward", "backward", "step"] * 2
    assert less.at_end(0)["activations"] < plain.at_end(0)["activations"] / 4
    table = compare_models(images, {"plain": lambda: vit(False), "less": lambda: vit(True)})
    assert table["plain"].held_bytes == plain.at_end(0)["activations"] and table["less"].peak_bytes < plain.peak_bytes
    assert table.extra("less") > 0.1 and "그레이디언트" not in table._repr_html_()


def test_what_five_models_save_is_named_and_told_apart():
    one = savings("polyglot-ko-1.3b")["polyglot-ko-1.3b"]
    setting = {"batch_size": 8, "sequence_length": 1024}
    assert one.flops == tuple(training_flops(**setting, gradient_checkpointing=on).total for on in (False, True))
    assert one.activations[1] < one.activations[0] / 4 and one.extra == one.flops[1] / one.flops[0] - 1
    with pytest.raises(ValueError, match="ResNet"):
        savings("ResNet")
