"""What checkpointed blocks keep: the gradients are the same, the FLOPs fewer, the bytes those that were said."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, OlmoConfig

from virtual_gpu.errors import WrongValue
from virtual_gpu.models.build import build_model
from virtual_gpu.models.kept import context_fn, kept_results, of_blocks
from virtual_gpu.models.offloaded import leaving
from virtual_gpu.plan import Plan, Recipe, plan_training, search
from virtual_gpu.plan.keeping import results_of
from virtual_gpu.plan.measure import measure, setting_of
from virtual_gpu.plan.request import make_request
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.run import set_checkpointing

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 160}
# GPT-2's without dropout on attention: with it the CPU has no kernel for it.
LLAMA = LlamaConfig(vocab_size=300, num_key_value_heads=2, max_position_embeddings=64, **SIZES)
NEOX = GPTNeoXConfig(vocab_size=300, max_position_embeddings=64, **SIZES)
GPT2 = GPT2Config(
    vocab_size=300, n_embd=64, n_layer=4, n_head=4, n_positions=64, attn_pdrop=0.0
)  # with dropout the CPU has no kernel


def gradients(config, kept, checkpointing=True):
    """Of real numbers on the CPU, and how many attentions backward computed again."""
    torch.manual_seed(0)
    model = build_model(config, torch.float32, device="cpu").train()
    set_checkpointing(model, checkpointing, kept)
    ids = torch.arange(2 * 32).reshape(2, 32) % 300
    torch.manual_seed(1)  # of dropout
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Counted("aten._scaled_dot_product") as counted:
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, counted.times


class Counted(TorchDispatchMode):
    """How often an operation of a forward pass ran, by the beginning of its name."""

    def __init__(self, name):
        super().__init__()
        self.name, self.times = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times += str(func).startswith(self.name) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


# -- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, kept",
    [
        (LLAMA, ("attention",)),
        (LLAMA, ("64x32", "64x64", "64x160:3")),
        (LLAMA, ("attention", "64x32", "64x64", "64x160", "160x64")),
        (NEOX, ("attention:2", "64x192", "64x160:1")),  # a layer has a bias
        (LLAMA, ("attention@cpu", "64x160@cpu:3", "64x64:1", "64x64@cpu")),
        (NEOX, ("attention:2", "attention@cpu", "64x192@cpu")),
        (GPT2, ("64x192", "64x256")),  # transposed weights
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, tuple) else "-".join(one),
)
def test_the_gradients_are_the_same(config, kept):
    plain, _ = gradients(config, (), checkpointing=False)
    bare, again = gradients(config, ())
    found, fewer = gradients(config, kept)
    assert again == 4 and fewer == sum(not {"attention", "attention@cpu"} & names for names in of_blocks(kept, 4))
    for name, gradient in plain.items():
        assert torch.equal(bare[name], gradient) and torch.equal(found[name], gradient), name


@pytest.mark.parametrize("peft", [None, "lora"])  # QLoRA's products are counted as LoRA's
def test_what_is_kept_is_not_computed_again(peft):
    """FLOPs by PyTorch's counter: each result saves its own product in each block that keeps it."""
    how = {"model_id": LLAMA, "batch_size": 2, "sequence_length": 32, "peft": peft, "precision": "bf16"}

    def flops(*kept, on=True):
        return training_flops(**how, gradient_checkpointing=on, kept_results=kept).total

    tokens, none, every = 2 * 32, flops(), flops("attention", "64x32", "64x64", "64x160")
    assert none - flops("64x160") == 4 * 2 * (2 * tokens * 64 * 160)
    assert none - flops("64x160:1") == (none - flops("64x160")) / 4
    assert none - flops("64x32", "64x64:3") == 4 * 2 * (2 * tokens * 64 * 32) + 3 * 2 * (2 * tokens * 64 * 64)
    assert flops("160x64") == none  # the last of a block: backward stops before it
    # Under LoRA A and B of queries and values come again, and the first block's input has a gradient, which it has not
    # without checkpointing.
    adapters = 4 * 2 * tokens * 8 * (2 * 64 + 64 + 32)
    first = 2 * tokens * (64 * 64 + 2 * 64 * 32 + 2 * 64 * 8)
    assert every - flops(on=False) == (adapters + first if peft else 0)


class FourBit(torch.nn.Module):
    """A block of bitsandbytes' own layers, of real numbers on the CPU."""

    def __init__(self):
        super().__init__()
        from bitsandbytes.nn import Linear4bit

        how = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4", "compress_statistics": True}
        self.up, self.down = (Linear4bit(*sizes, **how).to("cpu") for sizes in ((64, 160), (160, 64)))
        self.config = LLAMA

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x))).sin()


IMPORTS = ("import itertools", "import contextlib", "from torch.utils._", "from torch.utils.checkpoint")


def script_s_contexts(recipe, model):
    """What the script of a plan with this recipe gives `checkpoint`, from its own lines."""
    plan = Plan(make_request(LLAMA, "L4", length=32, batch=4), recipe, 1, 4, 0, {}, 0, 0, 0, None)
    script = plan.files("torch")["train.py"]
    lines = script[script.index("kept = ") : script.index("if hasattr(model")]
    names = {"model": model, "torch": torch}
    exec("\n".join(line for line in script.splitlines() if line.startswith(IMPORTS)), names)
    exec(lines, names)
    return names["contexts"]


@pytest.mark.parametrize("by", ["instrument", "script"])
@pytest.mark.parametrize(
    "kept, again", [((), 2), (("64x160:4",), 1), (("64x160@cpu",), 1), (("64x160", "160x64@cpu"), 0)]
)
def test_a_4_bit_layer_s_result_stays(by, kept, again):
    """bitsandbytes multiplies in an operation of its own, `gemm_4bit`."""
    model = FourBit()
    recipe = Recipe("qlora", "mixed_bf16", "adamw_fused", checkpointing=True, kept=kept)
    if by == "instrument":
        contexts = context_fn(kept, 4, model, leave=leaving(None, Counter())) if kept else None
    else:
        contexts = script_s_contexts(recipe, model) if kept else None
    x = torch.randn(2, 8, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    how = {"context_fn": contexts} if kept else {}
    out = checkpoint(model, x, use_reentrant=False, **how)
    with Counted("bitsandbytes.gemm_4bit") as counted:
        out.sum().backward()
    assert counted.times == again and torch.equal(x.grad, expected)


def test_attention_with_dropout_is_computed_again():
    """Kept, it would draw no numbers, and the dropout after it those that were its own."""
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", checkpointing=True)
    for dropout, there in ((0.1, False), (0.0, True)):
        config = GPT2Config(vocab_size=300, n_embd=64, n_layer=4, n_head=4, n_positions=64, attn_pdrop=dropout)
        names = [one.name for one in results_of(make_request(config, "L4", length=32), recipe)]
        assert ("attention" in names) == there and "64x192" in names
        how = {"model_id": config, "batch_size": 1, "sequence_length": 32, "gradient_checkpointing": True}
        flops = [training_flops(**how, kept_results=kept).total for kept in ((), ("attention",))]
        assert (flops[1] < flops[0]) == there


def test_a_result_that_the_model_changes_in_place_is_refused():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OlmoConfig(vocab_size=300, clip_qkv=8.0, **sizes)
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", checkpointing=True)
    assert [one.name for one in results_of(make_request(config, "L4", length=32), recipe)] == ["attention"]
    how = {"model_id": config, "batch_size": 1, "sequence_length": 32, "gradient_checkpointing": True}
    assert training_flops(**how, kept_results=("attention:1",)).total < training_flops(**how).total
    with pytest.raises(WrongValue, match="clip_qkv"):
        training_flops(**how, kept_results=("attention", "64x64:1"))


# -- what it holds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "peft, precision", [(None, "mixed_bf16"), ("lora", "autocast_fp16"), ("qlora", "autocast_fp16")]
)
def test_a_prediction_is_the_run(peft, precision):
    config = replace_depth(LLAMA, 8)
    how = {
        "gpu": "T4" if "fp16" in precision else "L4", "model_id": config, "batch_size": 2, "sequence_length": 64,
        "gradient_accumulation_steps": 6, "gradient_checkpointing": True, "peft": peft, "precision": precision,
        "kept_results": ("attention", "64x160"), "optimizer": "adamw_fused",
    }  # fmt: skip
    found, run = predict_memory(**how), predict_memory(**how, full=True)
    assert found.method == "depth" and run.method == "run"
    assert (found.needed_bytes, found.reserved_bytes) == (run.needed_bytes, run.reserved_bytes)


def replace_depth(config, layers):
    return LlamaConfig(**config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})


def test_bytes_at_the_peak():
    """A result lies there in every block that keeps it; of the block computed again it would lie there anyway."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=4096, **sizes)
    how = {
        "gpu": "L4", "model_id": config, "batch_size": 1, "sequence_length": 4096, "gradient_checkpointing": True,
        "peft": "lora", "precision": "autocast_bf16", "optimizer": "adamw_fused",
    }  # fmt: skip

    def needed(*kept):
        return predict_memory(**how, kept_results=kept).needed_bytes

    each, none = 4096 * 2 * 512 * 2, needed()
    for blocks in (1, 2, 3, 4):  # the last ones: the one that is computed again first is among them
        assert needed(f"128x512:{blocks}") - none == (blocks - 1) * each
    assert needed("128x512") - none == 3 * each
    assert needed("128x512@cpu") == none and needed("128x512:2", "128x512@cpu") == needed("128x512:2")


# -- as far as it fits ------------------------------------------------------------------------------------------------

WIDE = {
    "vocab_size": 512, "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 4096, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.stress), 2])
def test_nothing_better_fits(gpus):
    """Against all that all blocks could keep, and one block more, measured one by one."""
    config, batch = LlamaConfig(**WIDE), 2 * gpus
    ask = {"length": 32 * 1024, "batch": batch, "methods": ("lora",), "selective": True}
    plans = plan_training(config, "T4", gpus, **ask)
    kept = next(plan for plan in plans if plan.recipe.kept)
    bare = next(plan for plan in plans if plan.recipe == replace(kept.recipe, kept=()))
    assert kept.fits and (kept.micro_batch, kept.accumulation) == (1, 2) and kept.flops < bare.flops
    request, recipe = plans.request, replace(kept.recipe, kept=())
    results = results_of(request, recipe)
    assert [one.worth for one in results] == sorted((one.worth for one in results), reverse=True)
    names = [one.name for one in results]
    *whole, last = kept.recipe.kept
    name, _, blocks = last.partition(":")
    assert whole == names[: len(whole)] and name == names[len(whole)] and 1 <= int(blocks) < 16
    one_more = replace(recipe, kept=(*whole, f"{name}:{int(blocks) + 1}"))
    assert not measure(request, one_more, 1, 2).fits
    # The linear relaxation, by what was measured with the result in no block and in all: no more than what a block of
    # it and the allocator's rests are worth is lost, and whatever all blocks could keep is no more ahead than a block.
    first, beyond = (measure(request, replace(recipe, kept=some), 1, 2) for some in ((*whole,), (*whole, name)))
    relaxed = first.flops - first.left_bytes / (beyond.needed_bytes - first.needed_bytes) * (first.flops - beyond.flops)
    block = (first.flops - beyond.flops) / 16
    assert relaxed <= kept.flops <= relaxed + 2 * block
    assert kept.beyond_best >= 1 - relaxed / kept.flops and kept.beyond_best < 0.02
    assert bare.beyond_best is None and kept.to_dict()["beyond_best"] == kept.beyond_best
    subsets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))
    better = [some for some in subsets if measure_flops(request, recipe, some) < kept.flops - block]
    assert not any(measure(request, replace(recipe, kept=some), 1, 2).fits for some in better)


def measure_flops(request, recipe, kept):
    return request.batch * training_flops(setting_of(request, replace(recipe, kept=kept), 1, 1)).total


def test_nothing_is_kept_where_nothing_is_computed_twice():
    """A batch that accumulates without checkpointing; and who wants memory left over."""
    config = LlamaConfig(**WIDE | {"num_hidden_layers": 2})
    ask = {"length": 32 * 1024, "batch": 8, "methods": ("lora",), "selective": True}
    plans = plan_training(config, "T4", **ask)
    assert any(plan.recipe.checkpointing for plan in plans) and plans.best.accumulation > 1
    assert not any(plan.recipe.kept for plan in plans)
    plans = plan_training(LlamaConfig(**WIDE), "T4", **ask, prefer="margin")
    assert {plan.recipe.checkpointing for plan in plans} == {True} and not any(plan.recipe.kept for plan in plans)
    assert any("margin" in why for _, why in plans.skipped)


def test_a_recipe_whose_results_cannot_be_kept_is_a_plan_all_the_same(monkeypatch):
    def cannot(request, recipe):
        raise RuntimeError("mutated")

    monkeypatch.setattr(search, "keep_what_fits", cannot)
    ask = {"length": 32 * 1024, "batch": 2, "methods": ("lora",), "selective": True}
    plans = plan_training(LlamaConfig(**WIDE), "T4", **ask)
    assert len(plans) and any("mutated" in why and "RuntimeError" in why for _, why in plans.skipped)


def test_the_request_says_so():
    with pytest.raises(WrongValue, match="selective"):
        make_request("gpt2", selective="yes")


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "attn",
        ["64x"],
        ["64x64:0"],
        ["x64"],
        [64],
        7,
        None,
        ["attention", "attention:3"],
        ["64 x 64"],
        ["0x64"],
        ["attention@gpu"],
        ["attention:3@cpu"],
        ["64x64@cpu", "64x64@cpu:2"],
    ],
)
def test_names_are_checked(value):
    with pytest.raises(WrongValue, match="kept_results"):
        kept_results(value)


def test_one_name_is_a_list_of_one():
    assert kept_results("attention") == ("attention",) and kept_results(()) == ()


def test_a_layer_that_the_model_does_not_have_is_refused_and_nothing_is_left():
    how = {"gpu": "T4", "model_id": LLAMA, "batch_size": 1, "sequence_length": 32, "kept_results": ["64x65"]}
    with pytest.raises(WrongValue, match="64x160"):
        predict_memory(**how, gradient_checkpointing=True)
    with pytest.raises(WrongValue, match="gradient_checkpointing"):
        predict_memory(**how)


def test_a_recipe_at_once_keeps_nothing():
    recipe = Recipe("lora", "mixed_fp16", "adamw_fused", checkpointing=True, kept=("attention",))
    assert recipe.at_once == Recipe("lora", "mixed_fp16", "adamw_fused")
