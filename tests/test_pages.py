"""Paged and other optimizers of bitsandbytes: where their states are, in a run, in a plan and in a reader's file."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import virtual_gpu
from helpers.experiment import predict_memory
from virtual_gpu.cards import CATALOG
from virtual_gpu.counting.gpu import VirtualGPU
from virtual_gpu.plan import Recipe, anything_that_fits, plan_training
from virtual_gpu.plan.candidates import recipes_of
from virtual_gpu.plan.host import holds_step, host_need
from virtual_gpu.plan.measure import _lower_bound, held, measure
from virtual_gpu.plan.request import make_request
from virtual_gpu.step.optimizers import BITSANDBYTES, estimate_memory_of_optimizer, make_optimizer, paged_bytes
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.states import states_of

GiB = 2**30


def model():
    """An embedding, a matrix whose state is paged and one whose state is too small for that."""
    layers = nn.ModuleList([nn.Embedding(1000, 300), nn.Linear(500, 400, bias=False), nn.Linear(300, 300, bias=False)])
    return layers.to("meta")


def after_a_step(name, fp32_embedding_state=False):
    """(bytes of the state on a plain virtual GPU, in pages)."""
    gpu, layers = VirtualGPU(CATALOG["T4"]), model()
    gpu.place(layers)
    optimizer = make_optimizer(name, layers, gpu=gpu, fp32_embedding_state=fp32_embedding_state)
    for parameter in layers.parameters():
        parameter.grad = torch.empty_like(parameter)
    before = gpu.memory_allocated()
    with gpu.record(layers, optimizer) as record, record.phase("step"):
        optimizer.step()
    on_card = estimate_memory_of_optimizer(optimizer)
    assert on_card <= gpu.memory_allocated() - before + sum(table.nbytes for table in optimizer.name2qmap.values())
    assert gpu.memory_allocated() - before < on_card + 512 * 20
    return on_card, paged_bytes(optimizer)


def in_a_program(name):
    """(bytes that bitsandbytes' own code leaves on a program's virtual card, in managed memory)."""
    import bitsandbytes as bnb

    with virtual_gpu.cuda("T4") as card:
        layers = nn.ModuleList(nn.Linear(*reversed(p.shape), bias=False) for p in model().parameters()).cuda()
        optimizer = getattr(bnb.optim, BITSANDBYTES[name])(layers.parameters())
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        managed, on_card = card.managed_bytes, estimate_memory_of_optimizer(optimizer)
        del optimizer
        bnb.functional.GlobalPageManager._instance = None
        return on_card, managed


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_the_states_are_those_of_bitsandbytes_own_code(name):
    assert after_a_step(name) == in_a_program(name)


def test_what_is_remembered_of_embeddings_is_in_32_bits_where_the_trainer_has_it_so():
    count, blocks = 1000 * 300, -(-1000 * 300 // 256)
    (eight, _), (kept, _) = after_a_step("adamw_8bit"), after_a_step("adamw_8bit", True)
    assert kept - eight == 2 * (3 * count - 4 * blocks)
    (_, eight), (_, kept) = after_a_step("paged_lion_8bit"), after_a_step("paged_lion_8bit", True)
    assert kept - eight == 3 * count
    assert after_a_step("paged_adamw", True) == after_a_step("paged_adamw")  # they are in 32 bits anyway


@pytest.mark.parametrize("name", ["paged_adamw_8bit", "paged_lion", "lion_8bit"])
def test_a_run_its_prediction_and_its_states_agree(name):
    setting = Setting(
        1, model_id="gpt2", precision="bf16", optimizer=name, sequence_length=32, fp32_embedding_state=True
    )
    ran, predicted = (predict_memory(setting, gpu="L4", full=full) for full in (True, False))
    assert predicted.method == "depth" and ran.method == "run"
    for field in ("optimizer_bytes", "paged_bytes", "peak_bytes"):
        assert getattr(ran, field) == getattr(predicted, field)
    assert ran.optimizer_bytes == states_of(setting)["optimizer"]
    assert ran.optimizer_bytes <= ran.at_peak["optimizer"] < ran.optimizer_bytes + 2 * 2**20  # whole blocks
    assert (ran.paged_bytes > 0) is name.startswith("paged") is ("페이지" in ran.verdict)


def test_only_8_bits_of_all_weights_spare_the_embeddings():
    for peft, optimizer, said in (
        (None, "adamw_8bit", True),
        (None, "adamw", False),
        ("lora", "adamw_8bit", False),
    ):
        setting = Setting(1, peft=peft, optimizer=optimizer, fp32_embedding_state=True)
        assert setting.fp32_embedding_state is said
        assert ("fp32_embedding_state" in setting.to_dict()) is said
        assert ("임베딩" in setting.title) is said


# -- in the planner --------------------------------------------------------------------------------------------------

FULL = {"methods": ("full",), "length": 128, "batch": 4}
NARROW = "2.5 GiB, 8.0"  # gpt2-medium in bf16 with 8-bit states wants more, in pages less


def test_pages_are_proposed_where_nothing_fits():
    """What travels takes time that nobody here has measured, and no such memory is there on Windows."""
    narrow = plan_training("openai-community/gpt2-medium", NARROW, **FULL)
    assert not narrow.plans and anything_that_fits(narrow.request) is None
    assert any("페이지" in what and "paged_adamw_8bit" in why for what, why in narrow.skipped)
    change = next(change for change in narrow.changes if change.what == "optimizer")
    assert change.value == "paged_adamw_8bit" and "옵티마이저를 바꾼다: paged_adamw_8bit" in str(change)
    assert "WSL2" in str(change) and "RAM으로 오간다" in str(change)
    plan = change.plan
    assert plan.fits and plan.at_peak["optimizer"] < 0.05 * plan.paged_bytes
    asked = plan_training("openai-community/gpt2-medium", NARROW, optimizer="paged_adamw_8bit", **FULL)
    assert asked.best == plan


def test_smaller_states_are_proposed_too():
    """Where one optimizer was asked for: 8 bits, pages, and those that train differently, each with what it takes."""
    asked = {"optimizer": "adamw_fused", "precision": "mixed_bf16", **FULL}
    plans = plan_training("openai-community/gpt2-medium", "4.8 GiB, 8.0", **asked)
    changes = {change.value: change.plan for change in plans.changes if change.what == "optimizer"}
    assert list(changes) == ["adamw_8bit", "paged_adamw_8bit", "lion_8bit", "adafactor"] and not plans.plans
    assert all(plan.fits and plan.recipe.optimizer == name for name, plan in changes.items())
    state = {name: plan.at_peak["optimizer"] for name, plan in changes.items()}
    assert state["adafactor"] < state["lion_8bit"] < state["adamw_8bit"]


def test_what_finds_no_room_travels():
    request = make_request("openai-community/gpt2-medium", NARROW, **FULL)
    recipe = Recipe("full", "bf16", "paged_adamw_8bit", checkpointing=True)
    plan = measure(request, recipe, 1, 4)
    assert 0 < plan.evicted_bytes == plan.needed_bytes + plan.paged_bytes - request.room.possible_bytes
    assert plan.evicted_bytes < plan.paged_bytes and plan.to_cpu_bytes == plan.evicted_bytes
    there = measure(replace(request, gpu="L4"), recipe, 1, 4)
    assert there.paged_bytes == plan.paged_bytes and there.to_cpu_bytes == 0
    assert sum(held(request, recipe).values()) + plan.paged_bytes == pytest.approx(
        sum(held(request, replace(recipe, optimizer="adamw_8bit")).values()), rel=1e-3
    )
    need = host_need(plan)
    assert (need.state.low, need.state.high) == (plan.evicted_bytes, plan.paged_bytes)
    assert need.needed.high >= plan.paged_bytes and "페이지" in need.line(None)
    assert need.to_dict()["state_bytes"] == [plan.evicted_bytes, plan.paged_bytes]
    more = replace(plan, paged_bytes=4 * GiB)
    assert holds_step(replace(more, request=replace(request, host="8GB")))
    assert not holds_step(replace(more, request=replace(request, host="2GB")))


def test_the_bound_counts_the_link():
    """Pages travel beside the work, checkpoints between it."""
    request = make_request("openai-community/gpt2-medium", "T4", methods=("full",), length=128, batch=4)
    assert request.spec.link_bytes_per_s == pytest.approx(15.754e9, rel=1e-4)  # 8 GT/s, 16 lanes
    recipe = Recipe("full", "mixed_fp16", "adamw_fused", checkpointing=True)
    plain, moved = (measure(request, replace(recipe, offload=offload), 1, 4) for offload in (False, True))
    assert moved.seconds == plain.seconds + 2 * moved.offloaded_bytes / request.spec.link_bytes_per_s
    paged = measure(request, replace(recipe, optimizer="paged_adamw"), 1, 4)
    assert paged.seconds == plain.seconds and not paged.evicted_bytes
    many = replace(paged, paged_bytes=200 * GiB)  # takes longer to come and go than the work
    assert many.evicted_bytes > 180 * GiB
    assert _lower_bound(many) == many.evicted_bytes / request.spec.link_bytes_per_s > 5 * plain.seconds
    unknown = replace(moved, request=replace(request, gpu="B200"))
    assert _lower_bound(unknown) == _lower_bound(replace(unknown, offloaded_bytes=0))


def test_an_optimizer_that_is_asked_for_is_the_only_one():
    for name, ours in (("paged_adamw_32bit", "paged_adamw"), ("lion_8bit", "lion_8bit")):
        request = make_request("gpt2", "T4", optimizer=name, **FULL)
        assert {recipe.optimizer for recipe in recipes_of(request)} == {ours}
    assert plan_training("gpt2", "T4", optimizer="paged_lion_8bit", **FULL).best.paged_bytes > 0
