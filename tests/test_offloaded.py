"""Checkpoints that wait on the CPU: what leaves the card, what comes back, and where the planner says so."""

import inspect
from dataclasses import replace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from test_plan_files import (
    ACCELERATE,
    ALONE,
    TEXT,
    TOKENS,
    TORCHRUN,
    WIDTH,
    llama,
    on_the_virtual_card,
    one_rank,
    plan_of,
)
from torch.autograd.graph import save_on_cpu
from transformers import (
    Gemma3nTextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedModel,
    modeling_utils,
)

from virtual_gpu.cards import CATALOG
from virtual_gpu.errors import WrongValue
from virtual_gpu.models import offloaded
from virtual_gpu.models.build import build_model
from virtual_gpu.models.offloaded import can_offload, pinned_bytes
from virtual_gpu.plan import Recipe, anything_that_fits, cheapest, plan_training
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.request import make_request
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.run import enable_checkpointing
from virtual_gpu.step.setting import Setting

LAYERS = 4  # of `llama`
INPUT = TOKENS * WIDTH * 2  # bytes of a block's input there, in half precision


def setting(model, **more):
    given = {"peft": "lora", "precision": "autocast_fp16", "optimizer": "adamw_fused", "gradient_checkpointing": True}
    return Setting(**{"batch_size": 4, "sequence_length": 128, "model_id": str(model)} | given | more)


def test_every_input_but_the_one_in_use_leaves_the_card(tmp_path):
    llama(tmp_path / "model", num_hidden_layers=12)
    one = setting(tmp_path / "model", fused_lm_head=True)
    here, there = (predict_memory(replace(one, offload_checkpoints=on), gpu="T4", full=True) for on in (False, True))
    assert here.peak_bytes - there.peak_bytes == 11 * INPUT
    assert here.offloaded_bytes == 0 and there.offloaded_bytes == 12 * INPUT
    assert there.to_dict()["offloaded_bytes"] == 12 * INPUT


@pytest.mark.parametrize("accumulation", [1, 7])
def test_a_prediction_by_depth_is_the_whole_run(accumulation, tmp_path):
    llama(tmp_path / "model", num_hidden_layers=12)
    one = setting(tmp_path / "model", offload_checkpoints=True, gradient_accumulation_steps=accumulation)
    by_depth, whole = (predict_memory(one, gpu="T4", full=full) for full in (False, True))
    assert by_depth.method == "depth" and whole.method == "run"
    for name in ("peak_bytes", "reserved_bytes", "offloaded_bytes", "at_peak"):
        assert getattr(by_depth, name) == getattr(whole, name), name
    assert whole.offloaded_bytes == accumulation * 12 * INPUT


def test_hidden_states_in_fp32_are_twice_the_bytes(tmp_path):
    llama(tmp_path / "model")
    report = predict_memory(
        setting(tmp_path / "model", peft=None, precision="mixed_fp16", offload_checkpoints=True), gpu="T4"
    )
    assert report.offloaded_bytes == LAYERS * INPUT * 2


CONFIGS = [
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    ),
    GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32),
    GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=32,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_gradients_are_the_same(config, monkeypatch):
    """On the CPU by the library itself, with dropout where the model has some: what comes back is what went.

    Not pinned: that wants an accelerator.
    """
    moved = []

    def unpinned(pin_memory, device_type):
        moved.append(pin_memory)
        return save_on_cpu(pin_memory=False)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", unpinned)
    torch.manual_seed(0)
    model = build_model(config, torch.float32, device="cpu").train()
    ids = torch.arange(32).reshape(2, 16)
    gradients = []
    for offload in (False, True):
        enable_checkpointing(model, offload=offload)
        model.zero_grad()
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert moved == [True] * 3
    assert gradients[0] and all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())


# -- plans ------------------------------------------------------------------------------------------------------------


ONCE = {("lora", "torch"), ("lora", "trl"), ("qlora", "accelerate"), ("full", "trainer")}  # each kind and method


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, kind",
    [
        pytest.param(method, kind, marks=() if (method, kind) in ONCE else pytest.mark.stress)
        for method in ("lora", "qlora", "full")
        for kind in ALONE
    ],
)
def test_the_files_send_checkpoints_to_the_cpu(kind, method, tmp_path):
    """Run on a virtual card that tells the CPU from the card: what leaves it there is what the plan counts."""
    llama(tmp_path / "model", num_hidden_layers=12)
    precision = "mixed_bf16" if method == "full" else "mixed_fp16"
    rest_in_fp32 = method != "qlora" or kind != "trl"  # TRL never makes fp32 of it
    recipe = Recipe(method, precision, "adamw_fused", 0, True, fused_lm_head=True, rest_in_fp32=rest_in_fp32)
    gpu = "L4" if method == "full" else "T4"
    plans = [plan_of(tmp_path / "model", replace(recipe, offload=on), gpu=gpu) for on in (False, True)]
    held = [on_the_virtual_card(plan, kind, tmp_path) for plan in plans]
    room = plans[0].tensors_bytes - plans[1].tensors_bytes
    assert room >= 11 * INPUT and abs(held[0] - held[1] - room) < 2**14
    in_fp32 = method == "full" or (method == "qlora" and rest_in_fp32)  # what the blocks pass on
    assert plans[1].offloaded_bytes == 2 * 12 * INPUT * (2 if in_fp32 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind, launcher", [("torch", TORCHRUN), ("trainer", ACCELERATE)])
def test_so_do_the_files_of_a_split_model(kind, launcher, tmp_path):
    """One of four ranks, launched as the script says: FSDP2's, in PyTorch's words and as accelerate.yaml has it."""
    llama(tmp_path / "model", num_hidden_layers=12)
    (tmp_path / "text.txt").write_text(TEXT * 1000, encoding="utf-8")
    recipe, held = Recipe("lora", "mixed_fp16", "adamw_fused", 3, True, True), []
    plans = [plan_of(tmp_path / "model", replace(recipe, offload=on), gpus=4) for on in (False, True)]
    for plan in plans:
        folder = tmp_path / f"{plan.recipe.offload}"
        plan.save(folder / "plan", kind=kind)
        report = one_rank(plan, [*launcher, "train.py", "--text", str(tmp_path / "text.txt")], folder)
        held.append(max(nbytes for phase, (nbytes, _) in report["phases"].items() if phase != "loading"))
    room = plans[0].tensors_bytes - plans[1].tensors_bytes
    # Of the trainer's one input more leaves: accelerate wraps the blocks itself.
    assert room == 11 * INPUT and held[0] - held[1] == (11 + (kind == "trainer")) * INPUT
    assert plans[1].offloaded_bytes == 2 * 12 * INPUT and plans[1].sent_bytes == plans[0].sent_bytes


def test_a_plan_that_fits_only_with_checkpoints_on_the_cpu(tmp_path, monkeypatch):
    """Eight GB are too few for so long a text; the room of the blocks' inputs is what is missing."""
    llama(tmp_path / "model", num_hidden_layers=48, hidden_size=1024, max_position_embeddings=65536)
    request = {"length": 65536, "batch": 1, "methods": ("lora",), "lora_targets": "attention"}
    plans = plan_training(str(tmp_path / "model"), "RTX 4060", **request)
    assert [plan.recipe.offload for plan in plans.plans] == [True]
    best = plans.best
    assert best.fits and best.recipe.checkpointing and best.offloaded_bytes == 48 * 65536 * 1024 * 2
    here = measure(best.request, replace(best.recipe, offload=False), best.micro_batch, best.accumulation)
    assert not here.fits and here.flops == best.flops and here.tensors_bytes - best.tensors_bytes >= 46 * 2**27
    need = best.to_dict()["host"]
    assert need["checkpoints_bytes"] == 48 * 2**27 and need["needed_bytes"][1] > 2 * need["checkpoints_bytes"]
    assert "체크포인팅(오프로드)" in best.title and "CPU로 보내는 양" in plans._repr_html_()
    monkeypatch.setattr(offloaded, "can_offload", lambda stage=0: False)
    old = plan_training(str(tmp_path / "model"), "RTX 4060", **request)
    assert not old.plans and any("transformers 5.17" in why for _, why in old.skipped)


GEMMA = {
    "num_hidden_layers": 20, "hidden_size": 512, "intermediate_size": [1024] * 20, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192, "vocab_size_per_layer_input": 8192,
    "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 20,
    "max_position_embeddings": 65536,
}  # fmt: skip
LLAMA_70B = {
    "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, gpu, request_of",
    [
        # Neither the fused head nor the CPU is enough alone.
        (LlamaConfig(**LLAMA_70B), "L40S", {"length": 10240, "methods": ("qlora",)}),
        # Only the whole batch at once: it keeps no gradients, and autocast's copies are not the samples'.
        ("EleutherAI/polyglot-ko-1.3b", "T4", {"length": 256, "batch": 16, "methods": ("full",)}),
        # Blocks that take four hidden states each and more beside them.
        pytest.param(
            Gemma3nTextConfig(**GEMMA), "RTX 3060", {"length": 40960, "methods": ("lora",)}, marks=pytest.mark.stress
        ),
        (GPT2Config(n_layer=4), "T4", {"length": 16, "batch": 8}),
        ("Qwen/Qwen3-14B", "T4", {"length": 16384, "methods": ("qlora",)}),
    ],
    ids=["70B", "at once", "Gemma 3n", "small", "nothing"],
)
def test_what_fits_is_found_by_each_way_of_asking(model, gpu, request_of):
    given = {"batch": 1} | request_of
    request, plans = make_request(model, gpu, **given), plan_training(model, gpu, **given)
    spares = plan_training(model, gpu, **given, prefer="margin")
    fits = [bool(plans.plans), bool(spares.plans), anything_that_fits(request) is not None, cheapest(request).fits]
    assert fits == [gpu != "T4" or request.length < 16384] * 4
    assert all(plan.fits for plan in plans.plans)


def test_ram_too_small_for_a_micro_batch_takes_a_smaller_one(tmp_path):
    llama(tmp_path / "model", num_hidden_layers=48, hidden_size=1024, max_position_embeddings=32768)
    request = {"length": 32768, "batch": 2, "methods": ("lora",), "lora_targets": "attention"}
    plans = {
        host: plan_training(str(tmp_path / "model"), "6.4GiB, 8.9", host=host, **request) for host in (None, "6GB")
    }
    ways = {host: (found.best.micro_batch, found.best.accumulation) for host, found in plans.items()}
    assert ways == {None: (2, 1), "6GB": (1, 2)}
    pinned = {host: found.best.pinned_bytes for host, found in plans.items()}
    assert pinned == {None: 2 * 48 * 2**26, "6GB": 48 * 2**26}


def test_tensors_of_different_sizes_are_pinned_one_by_one():
    """Gemma 3n's blocks take two: four hidden states in one, in fp32, and a part of what is made for all layers."""
    layers = {"num_hidden_layers": 4, "intermediate_size": [1024] * 4, "activation_sparsity_pattern": [0.0] * 4}
    request = make_request(Gemma3nTextConfig(**GEMMA | layers), "L4", length=3072, batch=1)
    plan = measure(request, Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True, offload=True), 1, 1)
    large, small = 4 * 3072 * 512 * 4, 3072 * 64 * 2
    assert plan.offloaded_bytes == 4 * (large + small)
    assert plan.pinned_bytes == 4 * (pinned_bytes(large) + pinned_bytes(small))


def test_nothing_goes_to_the_cpu_where_it_fits_without():
    plans = plan_training("gpt2", "T4", length=256, batch=4)
    assert plans.plans and not any(plan.recipe.offload for plan in (*plans.plans, *plans.losers))


def test_pinned_ram_is_rounded_to_a_power_of_two():
    assert [pinned_bytes(n) for n in (1, 2, 3, 2**20, 2**20 + 1)] == [1, 2, 4, 2**20, 2**21]


# -- bad input --------------------------------------------------------------------------------------------------------


def test_without_checkpointing_there_is_nothing_to_move():
    with pytest.raises(WrongValue, match=r"offload_checkpoints=True.*gradient_checkpointing=True"):
        Setting(1, offload_checkpoints=True)
    with pytest.raises(WrongValue, match=r"offload_checkpoints=True.*gradient_checkpointing=True"):
        rank_step("gpt2", 2, offload_checkpoints=True)


def test_who_moves_checkpoints_says_so_in_its_code(monkeypatch):
    newest = getattr(PreTrainedModel, "activation_checkpointing_enable", PreTrainedModel.gradient_checkpointing_enable)
    assert can_offload() == ("offload" in inspect.signature(newest).parameters)
    fields = FullyShardedDataParallelPlugin.__dataclass_fields__
    assert can_offload(3) == (can_offload() and "activation_checkpointing_offload" in fields)
    monkeypatch.setattr(offloaded.metadata, "version", {"transformers": "5.17.0.dev0", "accelerate": "1.14.2"}.get)
    assert (can_offload(), can_offload(3)) == (True, False)
    monkeypatch.setattr(offloaded.metadata, "version", {"transformers": "4.57.6", "accelerate": "1.15.0"}.get)
    assert (can_offload(), can_offload(3)) == (False, False)


def test_an_older_transformers_is_named(monkeypatch):
    monkeypatch.setattr(offloaded, "can_offload", lambda stage=0: False)
    with pytest.raises(WrongValue, match=r"5\.17"):
        Setting(1, gradient_checkpointing=True, offload_checkpoints=True)


def test_the_library_is_left_as_it_was(tmp_path):
    before = modeling_utils.save_on_cpu
    llama(tmp_path / "model")
    predict_memory(setting(tmp_path / "model", offload_checkpoints=True), gpu=CATALOG["T4"])
    assert modeling_utils.save_on_cpu is before
