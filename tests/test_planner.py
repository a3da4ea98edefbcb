"""The planner: what it returns fits, nothing better was overlooked, and its files train."""

import ast
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from forked import run_forked
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)

from helpers import plan_training, predict_memory
from helpers.chapters.c9_planner.heads import with_each_line
from helpers.models import byte_tokenizer
from virtual_gpu.cards import CATALOG, Range
from virtual_gpu.drawing.svg import text_width
from virtual_gpu.errors import ExistingFile
from virtual_gpu.language import set_language
from virtual_gpu.models.adapters import add_adapters
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import architectures, load_config
from virtual_gpu.plan import METHODS, Recipe, cheapest, search
from virtual_gpu.plan.candidates import left_out, recipes_of
from virtual_gpu.plan.command import main
from virtual_gpu.plan.frontier import frontier
from virtual_gpu.plan.measure import held, measure, setting_of
from virtual_gpu.plan.pictures import _legend_places, too_much
from virtual_gpu.plan.plans import kind_label
from virtual_gpu.plan.ranking import criteria
from virtual_gpu.plan.recipes import cpu_offload_label
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.tensors import degrees_of, tensor_plan, why_not
from virtual_gpu.room import room_on
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.step.flops import training_flops
from virtual_gpu.trace.edits import with_ddp
from virtual_gpu.units import GiB, human_bytes

ROOT = Path(__file__).resolve().parent.parent
# As many weights as gpt2-large in a third of its layers: what is run in full beside the planner takes a third as long.
WIDE = GPT2Config(n_layer=12, n_embd=2048, n_head=32)
# Too shallow for `models.depth` to make less work of it: one run a setting.
SIZES = {"vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
HEAVY = GPT2Config(n_layer=4, n_embd=4096, n_head=32)  # a billion weights
SMALL = {"model": WIDE, "gpu": "T4", "length": 1024, "batch": 16}


def config(**more):
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(**sizes, intermediate_size=128, max_position_embeddings=128, **more)


@pytest.fixture(scope="module")
def plans():
    return plan_training(**SMALL)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A small GPT-NeoX with weights and a tokenizer, as `from_pretrained` finds them."""
    folder = tmp_path_factory.mktemp("model")
    neox = GPTNeoXConfig(
        vocab_size=258, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    build_model(neox, torch.float32, device="cpu").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def predicted(plan):
    """What a plan of one GPU is by a prediction that does not go through the planner, every layer run."""
    setting = setting_of(plan.request, plan.recipe, plan.micro_batch, plan.accumulation)
    return predict_memory(setting, gpu=plan.request.gpu, full=True)


# -- what fits -------------------------------------------------------------------------------------------------------


def test_every_plan_fits_with_its_margin_and_makes_the_batch(plans):
    assert len(plans) >= 4
    capacity = CATALOG["T4"].capacity_bytes
    for plan in plans:
        assert plan.micro_batch * plan.accumulation == 16
        report = predicted(plan)
        assert plan.tensors_bytes == report.needed_bytes
        assert plan.needed_bytes == sum(plan.at_peak.values())
        assert report.timeline.trace.reserved_peak(plan.needed_bytes) <= plan.needed_bytes
        if plan.at_peak["fragmentation"]:
            with pytest.raises(MemoryError):
                report.timeline.trace.reserved_peak(plan.needed_bytes - report.needed_bytes // 128)
        assert plan.needed_bytes <= plans.request.limit_bytes < capacity
        assert plan.verdict == "fits"
        assert plan.left_bytes == plans.request.limit_bytes - plan.needed_bytes


def test_the_next_larger_micro_batch_does_not_fit(plans):
    assert plans.refused
    for recipe, miss in plans.refused.items():
        fit = next(plan for plan in plans if plan.recipe == recipe)
        assert miss.micro_batch > fit.micro_batch
        between = [size for size in (1, 2, 4, 8, 16) if fit.micro_batch < size < miss.micro_batch]
        assert 16 % miss.micro_batch == 0 and not between
        assert miss.tensors_bytes == predicted(miss).needed_bytes
        assert miss.needed_bytes > plans.request.limit_bytes


def everything(request):
    """Every recipe with every micro-batch, one by one, whatever a search would leave out.

    Checkpoints on the CPU where a recipe does not fit otherwise, or where what is left is what counts.
    """

    def measured(recipe, **more):
        return [
            measure(request, replace(recipe, **more, fused_lm_head=fused), size, request.per_gpu // size)
            for fused in (False, True)
            for size in range(1, request.per_gpu + 1)
            if request.per_gpu % size == 0
        ]

    found = [plan for one in recipes_of(request) for on in (False, True) for plan in measured(one, checkpointing=on)]
    fits = {plan.recipe.at_once for plan in found if plan.fits}
    moved = [one for one in recipes_of(request) if request.prefer == "margin" or one not in fits]
    moved = [one for one in moved if one.method != "qlora" or one.stage or not one.rest_in_fp32]  # 16 bits come first
    return found + [plan for one in moved for plan in measured(one, checkpointing=True, offload=True)]


def compare_with_everything(plans):
    """The ranking is that of all there is: the plans, what did not fit, and the next larger micro-batches."""
    measured = everything(plans.request)
    fitting = [plan for plan in measured if plan.fits]
    assert min(fitting, key=lambda plan: plan.key) == plans.best
    best = {}
    for plan in sorted(fitting, key=lambda plan: plan.key):
        best.setdefault(plan.recipe, plan)
    found = {plan.recipe: plan for plan in plans}
    assert found.items() <= best.items()
    for recipe in best.keys() - found.keys():  # only what adds work where the whole batch fits without it
        if not recipe.rest_in_fp32:  # nor what stays in 16 bits where it fits in fp32
            assert any(plan.recipe.at_once == replace(recipe.at_once, rest_in_fp32=True) for plan in plans)
            continue
        if recipe.offload:  # with a fused head or without, whichever takes less
            assert any(plan.recipe.offload and plan.recipe.at_once == recipe.at_once for plan in plans)
            continue
        without = [replace(recipe, checkpointing=False), replace(recipe, checkpointing=False, fused_lm_head=False)]
        if recipe.checkpointing and any(one in found and found[one].accumulation == 1 for one in without):
            continue
        unfused = found[replace(recipe, fused_lm_head=False)]
        more = best[recipe].micro_batch > unfused.micro_batch  # samples at once, which count under checkpointing alone
        assert recipe.fused_lm_head and not (more and recipe.checkpointing)
    needs = {(p.recipe, p.micro_batch): p.needed_bytes for p in measured if p.accumulation > 1}
    assert all(needs[r, s] < needs[r, 2 * s] for r, s in needs if (r, 2 * s) in needs)
    lost = {plan.recipe for plan in measured} - best.keys()
    shown = {plan.recipe: plan for plan in plans.losers}
    for recipe in lost:
        if (
            recipe.fused_lm_head or recipe.offload
        ) and recipe not in shown:  # what it can save is not enough, or not wanted
            continue
        if shown.get(recipe) is None or shown[recipe].at_least:  # its states alone were too much
            assert shown[replace(recipe, checkpointing=False)].at_least
        else:
            assert shown[recipe].needed_bytes == min(p.needed_bytes for p in measured if p.recipe == recipe)
    assert plans.refused.items() <= {(plan.recipe, plan) for plan in measured if not plan.fits}


@pytest.fixture(scope="module")
def small_llama():
    return LlamaConfig(**SIZES, intermediate_size=2048, max_position_embeddings=2048)


# What is measured does not depend on the card's size, nor on what is preferred: so these three measure once.
FOUR = {"length": 512, "batch": 4}


def test_nothing_better_was_overlooked(small_llama):
    compare_with_everything(plan_training(small_llama, "1.6GiB, 7.5", **FOUR))


@pytest.mark.stress
@pytest.mark.parametrize(
    "gpu, methods",
    [("3GiB, 8.6", ("full",)), ("2GiB, 7.5", ("lora", "qlora")), ("8GiB, 9.0", METHODS)],
)
def test_nothing_better_was_overlooked_wherever_a_search_begins(gpu, methods):
    sizes = SIZES | {"num_hidden_layers": 6}  # continued from shallow runs, as four layers are not
    model = LlamaConfig(**sizes, intermediate_size=2048, max_position_embeddings=2048)
    compare_with_everything(plan_training(model, gpu, length=1024, batch=8, methods=methods))


@pytest.mark.stress
def test_nothing_better_was_overlooked_of_a_large_model(plans):
    compare_with_everything(plans)


def test_the_ranking_is_the_stated_one(plans):
    keys = [plan.key for plan in plans]
    assert keys == sorted(keys)
    order = [METHODS.index(plan.recipe.method) for plan in plans]
    assert order == sorted(order)
    for first, second in zip(plans, list(plans)[1:], strict=False):
        if first.recipe.method == second.recipe.method and first.recipe.optimizer == second.recipe.optimizer:
            assert first.extra_flops <= second.extra_flops
    assert plans[1].why_after(plans[0]) in ("추가 연산이 많다", "학습 방법을 더 많이 바꾼다")


def test_the_frontier_joins_what_no_plan_betters(plans):
    measured = [*plans.plans, *plans.refused.values(), *(plan for plan in plans.losers if not plan.at_least)]
    line = frontier(measured)
    for plan in measured:
        better = [
            o for o in measured if (o.flops, o.needed_bytes) != (plan.flops, plan.needed_bytes)
            and o.flops <= plan.flops and o.needed_bytes <= plan.needed_bytes
        ]  # fmt: skip
        same = any((o.flops, o.needed_bytes) == (plan.flops, plan.needed_bytes) for o in line)
        assert same == (not better)
    drawn = plans.frontier().svg()
    assert all(f">{place}</text>" in drawn for place in range(1, len(plans) + 1))
    assert drawn.count("<circle") >= 2 and drawn.count("<polygon") >= 2 and plans.verdict in drawn


def test_a_legend_stays_on_its_sheet():
    kinds = ("parameters", "gathered", "gradients", "optimizer", "activations", "other", "fragmentation")
    labels = [kind_label(kind) for kind in kinds]
    places = _legend_places(labels)
    assert all(x + 17 + text_width(label, 12) <= 760 for label, (x, _) in zip(labels, places, strict=True))
    assert places[0] == (20.0, 44) and len({y for _, y in places}) == 2  # it took a second line


def test_a_margin_is_kept():
    tight = plan_training(**SMALL, margin=0.0)
    wide = plan_training(**SMALL, margin=0.5)
    sure = room_on(CATALOG["T4"]).sure_bytes
    assert tight.request.limit_bytes == sure
    assert wide.request.limit_bytes * 1.5 <= sure < wide.request.limit_bytes * 1.5 + 2
    assert max(p.needed_bytes for p in wide) <= wide.request.limit_bytes < max(p.needed_bytes for p in tight)


@pytest.mark.parametrize("gpu, mixed", [("T4", "mixed_fp16"), ("V100", "mixed_fp16"), ("L4", "mixed_bf16")])
def test_precisions_are_the_gpus(gpu, mixed):
    found = {recipe.precision for recipe in recipes_of(make_request("gpt2", gpu))}
    assert found == ({mixed} if gpu in ("T4", "V100") else {mixed, "bf16"})


def test_states_are_the_same_at_any_length_batch_and_gpu():
    for method in METHODS:
        request = make_request("gpt2", "T4", methods=(method,), length=256, batch=4)
        recipe = recipes_of(request)[0]
        report = predict_memory(setting_of(request, recipe, 4, 1), gpu="T4")
        states = report.parameters_bytes + report.gradients_bytes + report.optimizer_bytes
        assert sum(held(request, recipe).values()) == states < report.needed_bytes


# -- FLOPs and the bound ---------------------------------------------------------------------------------------------


def test_flops_are_counted_and_linear_in_the_batch():
    request = make_request("gpt2", "T4", methods=("full", "lora"), length=128, batch=6)
    recipes = [Recipe(method, "mixed_fp16", "adamw_fused", checkpointing=True) for method in ("full", "lora")]
    full, lora = (measure(request, recipe, 2, 3) for recipe in recipes)
    one = training_flops(batch_size=6, model_id="gpt2", sequence_length=128, gradient_checkpointing=True)
    plain = training_flops(batch_size=6, model_id="gpt2", sequence_length=128)
    assert full.flops == one.total and full.least_flops == plain.total
    assert full.extra_flops == one.total - plain.total > 0
    assert lora.least_flops < 0.8 * full.least_flops  # no gradients of frozen weights


def test_the_time_is_a_bound_by_published_rates(plans):
    for plan in plans:
        assert plan.seconds >= plan.flops / 65e12


def test_without_a_published_rate_there_is_no_bound_on_time():
    plan = plan_training("gpt2", "RTX 3060", methods=("lora",), length=64, batch=1, price_per_hour=1).best
    assert plan.seconds is None and plan.price is None and plan.to_dict()["lower_bound_seconds"] is None
    with pytest.raises(ValueError, match=r"RTX 3060.*fidelity"):
        make_request("gpt2", "RTX 3060", prefer="speed")


# -- several GPUs ----------------------------------------------------------------------------------------------------


def test_several_gpus_are_the_ledgers(small_llama):
    request = {"length": 1024, "batch": 8, "methods": ("full",)}
    plans = plan_training(small_llama, "RTX 4090", 4, **request)
    stages = {plan.recipe.stage for plan in plans}
    assert stages >= {2, 3}
    for plan in plans:
        assert plan.micro_batch * plan.accumulation * 4 == 8 and plan.fits
        if plan.recipe.stage:
            step = rank_step(
                plan.request.model, 4, plan.recipe.stage, sequence_length=1024,
                precision="mixed" if "mixed" in plan.recipe.precision else "bf16", batch_size=plan.micro_batch,
                gradient_checkpointing=plan.recipe.checkpointing, gpu="RTX 4090", accumulating=plan.accumulation > 1,
                as_accelerate=True, fp32_shards=True,
            )  # fmt: skip
            assert (plan.tensors_bytes, plan.needed_bytes) == (step.total, step.card_bytes)
        else:
            setting = setting_of(plan.request, plan.recipe, plan.micro_batch, plan.accumulation)
            report = predict_memory(setting, gpu="L4")
            edited = with_ddp(report.timeline.trace).through()[0].timeline()
            assert plan.tensors_bytes == edited.peak_bytes > report.peak_bytes
            ranks = plan.request.gpus  # an all-reduce in a ring: everything but one share, twice
            assert plan.sent_bytes == 2 * report.gradients_bytes * (ranks - 1) // ranks
    what = dict(plans.skipped)
    assert "pipeline_parallel=" in what["전체 미세 조정 · 파이프라인 병렬"]
    assert "누적이 없을 때만" in what["전체 미세 조정 · ZeRO-1"]
    shown = plans._repr_html_()
    assert "보내는 양" in shown and human_bytes(plans.best.sent_bytes) in shown


def test_gpus_that_share_a_layer_are_the_ledgers(small_llama):
    """Asked for, with every other method: the samples are a group's, and what each GPU sends has two parts."""
    request = {"length": 1024, "batch": 6, "methods": ("full", "lora"), "precision": "mixed_bf16"}
    plans = plan_training(small_llama, "RTX 4090", 4, tensor_parallel=2, **request)
    assert {(plan.recipe.method, plan.recipe.stage) for plan in plans} == {("full", 2), ("full", 3)}
    for plan in plans:
        recipe = plan.recipe
        assert "텐서 병렬 2" in plan.title and recipe.tensor_parallel == plan.to_dict()["tensor_parallel"] == 2
        assert plan.micro_batch * plan.accumulation * (4 // 2) == 6 and plan.fits
        step = rank_step(
            plan.request.model, 4, recipe.stage, tensor_parallel=2, sequence_length=1024, batch_size=plan.micro_batch,
            gradient_checkpointing=recipe.checkpointing, gpu="RTX 4090", accumulating=plan.accumulation > 1,
            fp32_shards=True, sequence_parallel=True,
        )  # fmt: skip
        assert recipe.sequence_parallel and (plan.tensors_bytes, plan.needed_bytes) == (step.total, step.card_bytes)
        once = step.parameters_and_gradients_sent // 2 + step.activations_sent // 2  # round rings of two
        assert plan.sent_bytes == pytest.approx(plan.accumulation * once, rel=1e-3)
        assert step.activations_sent > 0.1 * step.parameters_and_gradients_sent
    assert "전체 미세 조정만" in dict(plans.skipped)["LoRA · 텐서 병렬"]
    assert "DTensor" in dict(plans.skipped)["텐서 병렬 · ZeRO-1"]
    # Two groups of two beside that of all ranks have buffers of their own.
    alone = make_request(small_llama, "RTX 4090", 4, **request | {"batch": 8})
    assert alone.limit_bytes > plans.best.request.limit_bytes > alone.limit_bytes - 3.5 * GiB


def test_copies_of_the_model_are_the_ledgers(small_llama):
    """Of two nodes a copy in each: what it holds more fits, and of what is sent only gradients leave a node."""
    request = {"length": 512, "batch": 16, "methods": ("full", "lora"), "precision": "mixed_bf16"}
    plans = plan_training(small_llama, "RTX 4090", 16, **request)
    (copies,), (one, *_) = (
        [plan for plan in plans if (plan.recipe.method, plan.recipe.stage, plan.recipe.replicas) == ("full", 3, n)]
        for n in (2, 1)
    )
    assert "HSDP 2벌" in copies.title and copies.to_dict()["replicas"] == 2
    step = rank_step(
        plans.request.model, 16, replicas=2, sequence_length=512, gpu="RTX 4090", as_accelerate=True, fp32_shards=True
    )
    assert (copies.tensors_bytes, copies.needed_bytes) == (step.total, step.card_bytes)
    numbers = {kind: 2 * count for kind, count in step.sent.items()}  # of 16 bits
    within = (numbers["allgather_base"] + numbers["reduce_scatter_base"]) * 7 // 8
    assert copies.sent_bytes == within + numbers["allreduce"]  # in an all-reduce twice, of two ranks a half
    assert copies.between_nodes_bytes == 8 * numbers["allreduce"] < one.between_nodes_bytes == one.sent_bytes
    assert copies.sent_bytes < one.sent_bytes and plans.plans.index(copies) < plans.plans.index(one)
    assert "전체 미세 조정만" in dict(plans.skipped)["LoRA · HSDP"]
    four = make_request(small_llama, "RTX 4090", 16, replicas=4, **request)
    assert {recipe.replicas for recipe in recipes_of(four)} == {4}
    assert {recipe.replicas for recipe in recipes_of(make_request(small_llama, "RTX 4090", 8, **request))} == {1}
    # Of parameters so large that their shares fit once, in 16 parts, there is no second copy.
    large = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    full = plan_training(large, "12GiB, 8.6", 16, **request | {"methods": ("full",), "optimizer": "adamw_fused"})
    assert {plan.recipe.replicas for plan in full} == {1}
    assert "남는 메모리" in dict(full.skipped)["전체 미세 조정 · mixed_bf16 · HSDP"]


def test_fewer_samples_than_gpus_are_shared(small_llama):
    request = {"length": 256, "methods": ("full", "lora"), "precision": "mixed_bf16", "context_parallel": 1}
    for batch, degree in ((2, 2), (1, 4)):
        plans = plan_training(small_llama, "RTX 4090", 4, batch=batch, **request)
        assert {plan.recipe.tensor_parallel for plan in plans} == {degree} and plans.best.micro_batch == 1
        assert f"배치 {batch}" in dict(plans.skipped)["텐서 병렬 없이"]
        assert {plan.recipe.stage for plan in plans} == ({2, 3} if degree < 4 else {3})
    step = rank_step(
        plans.request.model, 4, 3, tensor_parallel=4, sequence_length=256, gpu="RTX 4090",
        gradient_checkpointing=plans.best.recipe.checkpointing, fp32_shards=True, sequence_parallel=True,
    )  # fmt: skip
    assert plans.best.tensors_bytes == step.total and plans.best.sent_bytes == step.activations_sent * 3 // 4
    # The weights of a quarter of each layer are read twice, which takes longer than so few tokens' FLOPs.
    few = plan_training(small_llama, "RTX 4090", 4, batch=1, **request | {"length": 8}).best
    layers = 4 * (4 * 768 * 768 + 3 * 768 * 2048)
    assert few.seconds == pytest.approx(2 * 2 * layers / 4 / few.request.spec.bandwidth_bytes_per_s)
    assert plan_training(small_llama, "RTX 4090", 4, batch=4, **request).best.recipe.tensor_parallel == 1


@pytest.mark.parametrize("gpu, degree", [("15GiB, 8.6", 2), ("11GiB, 8.6", 4)])
def test_a_layer_is_shared_where_nothing_fits_otherwise(gpu, degree):
    """An MLP as wide as this takes most, and each GPU has its part of it: no more of them than make room."""
    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 32768, "num_hidden_layers": 3}
    wide = LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=32768)
    request = {"methods": ("full",), "precision": "mixed_bf16", "optimizer": "adamw_fused", "context_parallel": 1}
    plans = plan_training(wide, gpu, 4, length=32768, batch=4, **request)
    assert plans.best.recipe.tensor_parallel == degree and plans.best.recipe.checkpointing
    assert {plan.recipe.tensor_parallel for plan in plans} == {degree}
    assert {plan.recipe.tensor_parallel for plan in plans.losers} >= {1, 2}
    assert ("전체 미세 조정 · mixed_bf16 · 텐서 병렬" in dict(plans.skipped)) == (degree < 4)


def test_tokens_are_shared_with_the_layer_where_they_can_be():
    """Half of what lies between the matrices, and of the logits; what a model or a length does not allow is said."""
    made = make_request(LlamaConfig(**SIZES | {"vocab_size": 32768}), "L4", 2, length=2048, batch=2)
    recipe = Recipe("full", "bf16", "adamw_fused", 3, tensor_parallel=2)
    whole, split = (measure(made, replace(recipe, sequence_parallel=tokens), 1, 2) for tokens in (False, True))
    logits = 2048 * 32768 * 2  # whole they are there in fp32 with their gradient, and in 16 bits
    assert whole.at_peak["activations"] - split.at_peak["activations"] > 1.5 * logits
    assert split.sent_bytes < whole.sent_bytes  # logits are not gathered, nor gradients of q, k and v added up apart
    assert split.recipe.title.endswith("텐서 병렬 2 · 시퀀스 병렬")
    for model, length, words in (
        (LlamaConfig(**SIZES), 255, "길이(255)"),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), 256, "한 텐서"),
        (GPTNeoXConfig(**SIZES), 256, "Llama와 같은 구조"),
    ):
        asked = make_request(model, "L4", 2, length=length, batch=2, methods=("full",))
        assert {one.sequence_parallel for one in recipes_of(asked)} == {False}
        assert words in dict(left_out(asked))["텐서 병렬 2 · 시퀀스 병렬"]
    asked = replace(made, sequence_parallel=False)
    assert {one.sequence_parallel for one in recipes_of(made)} == {False, True}
    assert {one.sequence_parallel for one in recipes_of(asked)} == {False}
    assert "텐서 병렬 2 · 시퀀스 병렬" not in dict(left_out(asked))


def test_a_text_is_shared_where_whole_ones_do_not_fit():
    """By no more GPUs than make room; the model is split over all of them, and keys and values go round the group."""
    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 32768, "num_hidden_layers": 3}
    wide = LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=32768)
    request = {"methods": ("full",), "precision": "mixed_bf16", "optimizer": "adamw_fused", "tensor_parallel": 1}
    plans = plan_training(wide, "15GiB, 8.6", 4, length=32768, batch=4, **request)
    plan, recipe = plans.best, plans.best.recipe
    assert recipe.context_parallel == 2 and "컨텍스트 병렬 2" in plan.title and plan.fits
    assert {one.recipe.context_parallel for one in plans} == {2} < {one.recipe.context_parallel for one in plans.losers}
    assert plan.micro_batch * plan.accumulation * 2 == 4
    assert held(plans.request, recipe) == held(plans.request, recipe.whole_layers)
    step = rank_step(
        plans.request.model, 4, context_parallel=2, sequence_length=32768, batch_size=plan.micro_batch, gpu="A10",
        gradient_checkpointing=recipe.checkpointing, accumulating=plan.accumulation > 1, fp32_shards=True,
        as_accelerate=True,
    )  # fmt: skip
    assert (plan.tensors_bytes, plan.needed_bytes) == (step.total, step.card_bytes)
    keys_and_values = plan.micro_batch * 16384 * 2 * 1024 * 3  # elements of a rank in three layers
    gathers = 3 if recipe.checkpointing else 2
    assert step.sent_activations == {
        "all_gather_into_tensor": gathers * 2 * keys_and_values, "all_to_all_single": 2 * keys_and_values,
    }  # fmt: skip
    back = step.sent_activation_bytes["all_to_all_single"]
    assert back == 2 * keys_and_values * 4  # gradients go round in fp32
    sent = step.parameters_and_gradients_sent * 3 // 4 + (step.activations_sent - back) // 2 + back
    assert plan.sent_bytes == pytest.approx(plan.accumulation * sent, rel=1e-3)


def test_texts_that_cannot_be_shared_are_left_out_by_name():
    request = {"length": 64, "batch": 2, "methods": ("full",)}
    slides = MistralConfig(**SIZES, intermediate_size=2048, num_key_value_heads=4, sliding_window=32)
    for model, more, words in (
        ("gpt2", {}, "self_attn"),
        (slides, {}, "앞의 토큰을 일부만"),
        (config(), {"length": 65}, "GPU 수의 두 배"),
        (config(), {"precision": "fp32"}, "bf16에서만"),
    ):
        asked = make_request(model, "L4", 2, **request | more)
        assert words in dict(left_out(asked))["전체 미세 조정 · 컨텍스트 병렬"]
        assert {recipe.context_parallel for recipe in recipes_of(asked)} == {1}
        with pytest.raises(ValueError, match=rf"context_parallel=2: .*{words}"):
            make_request(model, "L4", 2, context_parallel=2, **request | more)
    with pytest.raises(ValueError, match=r"context_parallel=2: .*함께"):
        make_request(config(), "L4", 4, context_parallel=2, tensor_parallel=2, **request)
    assert {one.context_parallel for one in recipes_of(make_request(config(), "L4", 2, **request))} == {1, 2}
    alone = make_request(config(), "L4", 2, tensor_parallel=1, replicas=1, cpu_offload=True, **request)
    rows = dict(left_out(alone))  # asked without the other two, context parallelism is still there
    assert all("함께" in rows[f"컨텍스트 병렬 · {what}"] for what in ("ZeRO-2", cpu_offload_label()))


def test_what_cannot_be_shared_is_left_out_by_name():
    request = {"length": 64, "batch": 4, "methods": ("full",)}
    for model, gpu, words in (
        ("gpt2", "L4", "gpt2"),
        (config(num_key_value_heads=1), "L4", "키·값 헤드 1개"),
        ("Qwen/Qwen3-0.6B", "T4", "bf16이나 fp32"),
    ):
        asked = make_request(model, gpu, 2, **request)
        assert words in dict(left_out(asked))["전체 미세 조정 · 텐서 병렬"]
        assert {recipe.tensor_parallel for recipe in recipes_of(asked)} == {1}
        with pytest.raises(ValueError, match=f"tensor_parallel=2: .*{words}"):
            make_request(model, gpu, 2, tensor_parallel=2, **request)
    alone = make_request(config(), "L4", 2, tensor_parallel=1, **request)
    assert {recipe.tensor_parallel for recipe in recipes_of(alone)} == {1}
    # Three of 24 GPUs would not all stay in a node of 8; the blocks' experts are no matrices of parallelize_module.
    twelve = LlamaConfig(**SIZES, intermediate_size=3072)
    assert degrees_of(make_request(twelve, "L4", **request).model, 6) == (2, 3, 6)
    assert degrees_of(make_request(twelve, "L4", **request).model, 24) == (2, 4)
    assert tensor_plan(make_request(config(), "L4", **request).model).beyond == ()
    for model in architectures():
        assert isinstance(degrees_of(model, 8), tuple)
    for model, words in (
        ("google/gemma-4-31B", "층마다 다른"),
        ("google/gemma-3n-E4B", "activation_sparsity_pattern"),
        ("allenai/OLMo-2-1124-7B", "q_proj"),
    ):
        assert words in why_not(model, 2, 2)
    experts = Qwen3MoeConfig(**SIZES, num_key_value_heads=4, head_dim=64, num_experts=4, moe_intermediate_size=256)
    assert "experts" in why_not(make_request(experts, "L4", **request).model, 2, 2)


def test_accumulating_holds_the_gradients_from_the_beginning():
    setting = {"batch_size": 1, "sequence_length": 256, "precision": "mixed"}
    plain, holding = (rank_step("gpt2", 4, 3, **setting, accumulating=on) for on in (False, True))
    held = holding.at_peak["gradients"]  # with the rests that the allocator does not split off
    assert holding.memory.gradients <= held < 1.01 * holding.memory.gradients
    assert plain.total <= holding.total <= plain.total + held


@pytest.mark.parametrize("gpu, half", [("RTX 3090", torch.bfloat16), ("T4", torch.float16)])
def test_adapters_are_sharded_on_two_gpus(gpu, half, small_llama):
    plans = plan_training(small_llama, f"2 x {gpu}", length=256, batch=4, methods=("lora", "qlora"))
    assert plans.request.gpus == 2
    assert {(plan.recipe.method, plan.recipe.stage) for plan in plans} == {
        ("lora", 0), ("lora", 3), ("qlora", 0), ("qlora", 3),
    }  # fmt: skip
    assert [what for what, _ in plans.skipped if "QLoRA" in what and "ZeRO-2" in what]
    assert "DDP" in dict(plans.skipped)["QLoRA · ZeRO-1"]
    for plan in plans:
        if plan.recipe.stage:
            step = rank_step(
                plans.request.model, 2, 3, peft=plan.recipe.method, batch_size=plan.micro_batch, sequence_length=256,
                gradient_checkpointing=plan.recipe.checkpointing, gpu=gpu, accumulating=plan.accumulation > 1,
                as_accelerate=True,
            )  # fmt: skip
            assert step.adapters.dtype == half and step.total == plan.tensors_bytes
            whole = next(p for p in plans if p.recipe == replace(plan.recipe, stage=0))
            assert plan.at_peak["parameters"] < 0.65 * whole.at_peak["parameters"]
            assert plan.sent_bytes > whole.sent_bytes


def test_what_is_trained_whole_is_beside_the_adapters_alone(small_llama):
    """A copy of embeddings and head; of what cannot be trained so the reason is said."""
    ends = {"modules_to_save": ("lm_head", "embed_tokens"), "length": 64, "batch": 4}
    for gpus in (1, 2):
        without, whole = (
            make_request(small_llama, "RTX 4090", gpus, **{"length": 64, "batch": 4} | more) for more in ({}, ends)
        )
        assert whole.modules_to_save == ("embed_tokens", "lm_head")
        assert recipes_of(without) == recipes_of(whole)
        for recipe in recipes_of(whole):
            sizes = [sum(held(request, recipe).values()) for request in (without, whole)]
            assert (sizes[0] < sizes[1]) == (recipe.method != "full"), recipe
            setting = setting_of(whole, recipe, 1, 1)
            assert setting.modules_to_save == (() if recipe.method == "full" else whole.modules_to_save)
    old = make_request(small_llama, "T4", **ends)
    assert {(r.method, r.rest_in_fp32) for r in recipes_of(old)} == {("full", True), ("qlora", True)}
    reasons = dict(left_out(old))
    assert "GradScaler" in reasons["LoRA"] and "GradScaler" in reasons["QLoRA · 나머지는 16비트"]
    tied = make_request("Qwen/Qwen3-0.6B", "RTX 4090", 2, modules_to_save=["lm_head"])
    assert all(not r.stage or r.method == "full" for r in recipes_of(tied))
    assert "임베딩과 한 텐서" in dict(left_out(tied))["QLoRA · ZeRO-3"]
    assert make_request(small_llama, "T4", methods=("full",), modules_to_save=["lm_head"]).modules_to_save == ()
    dense_first = DeepseekV3Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=3, first_k_dense_replace=2, num_attention_heads=4,
        intermediate_size=128, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    late = make_request(
        dense_first, "RTX 4090", length=64, batch=4, lora_targets="all-linear", modules_to_save=["gate"]
    )
    assert late.modules_to_save == ("gate",)  # which the first layers have not


def test_an_optimizer_whose_split_states_are_not_counted_is_told():
    request = make_request("gpt2", "2 x L4", length=32, batch=2, optimizer="sgd")
    assert not any(recipe.stage for recipe in recipes_of(request))
    assert any("sgd" in what and "adamw_fused" in why for what, why in left_out(request))


def test_two_names_of_how_many_gpus_must_agree():
    assert make_request("gpt2", "2xT4", 2).gpus == make_request("gpt2", "2 × T4").gpus == 2
    with pytest.raises(ValueError, match="서로 다른 수"):
        make_request("gpt2", "2xT4", 4)


@pytest.mark.parametrize("prefer, gpu", [("speed", "T4"), ("margin", "1.6GiB, 7.5")])
def test_the_first_plan_is_the_preferred_of_all_there_are(prefer, gpu, small_llama):
    plans = plan_training(small_llama, gpu, **FOUR, methods=("full", "lora"), prefer=prefer)
    fitting = [plan for plan in everything(plans.request) if plan.fits]
    assert plans.best == min(fitting, key=lambda plan: plan.key)
    assert [plan.key for plan in plans] == sorted(plan.key for plan in plans)
    first = {"speed": "seconds", "margin": "needed_bytes"}[prefer]
    assert getattr(plans.best, first) == min(getattr(plan, first) for plan in fitting)
    assert plans[1].why_after(plans[0]) in criteria(prefer)


def test_a_price_is_a_bound_by_the_given_rate():
    plan = plan_training("gpt2", "2 x T4", length=64, batch=2, methods=("lora",), price_per_hour=0.35).best
    seconds_of_a_million = plan.seconds * 1e6 / (2 * 64)
    assert plan.price == pytest.approx(2 * 0.35 * seconds_of_a_million / 3600)
    assert plan.to_dict()["lower_bound_price_per_million_tokens"] == plan.price
    # Without one: the least rent that was found of the card, where one was.
    found = replace(plan, request=replace(plan.request, price_per_hour=None))
    rent = found.request.spec.rent
    assert rent.low <= rent.high and found.price == pytest.approx(plan.price / 0.35 * rent.low)
    nobody_s = replace(plan.request, price_per_hour=None, gpu="24GiB, 7.5")
    assert replace(plan, request=nobody_s).price is None


# -- nothing fits ----------------------------------------------------------------------------------------------------


def test_when_nothing_fits_the_smallest_changes_do():
    plans = plan_training(HEAVY, "6GiB, 8.6", length=128, batch=4, methods=("full",))
    assert not plans.plans and plans.best is None
    limit = plans.request.limit_bytes
    assert all(plan.needed_bytes > limit for plan in plans.losers) and plans.closest.needed_bytes > limit
    assert "모자란다" in plans.verdict
    changes = {change.what: change for change in plans.changes}
    assert set(changes) == {"methods", "optimizer", "cpu_offload", "gpu", "gpus"}  # no length: the states are too much
    assert changes["methods"].value == "lora"
    for change in changes.values():  # what the planner would say if it were asked so
        asked = asdict(change.plan.request)
        again = plan_training(asked.pop("model"), asked.pop("gpu"), asked.pop("gpus"), **asked)
        assert again.best.recipe == change.plan.recipe and again.best.needed_bytes == change.plan.needed_bytes
    cards = [spec for spec in CATALOG.values() if spec.platform == "cuda"]
    for spec in cards:  # no smaller GPU, no smaller number of them
        if spec.capacity_bytes < CATALOG[changes["gpu"].value].capacity_bytes:
            smaller = replace(plans.request, gpu=spec.name)
            states = min(sum(held(smaller, recipe).values()) for recipe in recipes_of(smaller))
            assert states > smaller.limit_bytes or not cheapest(smaller).fits
    fewer = changes["gpus"].value // 2
    assert not cheapest(replace(plans.request, gpus=fewer, batch=max(4, fewer))).fits


def test_a_shorter_length_is_found_by_searching(small_llama):
    plans = plan_training(small_llama, "1.4GiB, 7.5", length=2048, batch=1, methods=("full",), optimizer="adamw_fused")
    assert not plans.plans
    change = next(change for change in plans.changes if change.what == "length")
    assert change.value % 64 == 0 and change.plan.fits
    assert not cheapest(replace(plans.request, length=change.value + 64)).fits


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"model": "polyglot-ko-5.9b"}, "polyglot-ko-5.8b"),
        ({"model": 7}, "transformers"),
        ({"gpu": "T5"}, "T4"),
        ({"gpus": 0}, "1 이상의 정수"),
        ({"gpus": 3}, "15, 18"),
        ({"gpus": 32}, "배수로 한다: 32$"),
        ({"tensor_parallel": 2, "gpu": "L4"}, "GPU 1개"),
        ({"tensor_parallel": 0}, "텐서 병렬 크기"),
        ({"replicas": 0}, "벌 수"),
        ({"replicas": 3, "gpus": 8, "gpu": "L4"}, "replicas=3: GPU 8개"),
        ({"replicas": 8, "gpus": 8, "gpu": "L4"}, "2개 이상씩"),
        ({"replicas": 2, "gpus": 8, "gpu": "L4", "tensor_parallel": 2}, "텐서 병렬과 함께"),
        ({"replicas": 2, "gpus": 8, "gpu": "L4", "methods": ("lora",)}, "replicas=2: .*전체 미세 조정"),
        ({"replicas": 2, "gpus": 8}, "replicas=2: .*bf16이나 fp32"),
        ({"tensor_parallel": 2, "gpus": 4, "methods": ("lora",)}, "전체 미세 조정"),
        ({"tensor_parallel": 2, "gpus": 4, "gpu": "L4", "objective": "dpo"}, "SFT"),
        ({"tensor_parallel": 3, "gpus": 8, "gpu": "L4", "model": LlamaConfig()}, "3개씩"),
        ({"tensor_parallel": 2, "gpus": 4, "gpu": "L4", "model": LlamaConfig(), "batch": 7}, "2의 배수로 한다: 6, 8"),
        ({"length": 4096}, "1024"),
        ({"length": -1}, "sequence_length=-1"),
        ({"batch": 1.5}, "1 이상의 정수"),
        ({"methods": ()}, "하나 이상"),
        ({"methods": ("prefix",)}, "qlora"),
        ({"precision": "mixed_bf16"}, "bf16 연산 장치"),
        ({"precision": "fp8"}, "mixed_fp16"),
        ({"optimizer": "adamw_9bit"}, "adamw"),
        ({"prefer": "fast"}, "fidelity"),
        ({"prefer": "speed", "gpu": "8GiB, 8.6"}, "대역폭"),
        ({"price_per_hour": -1}, "price_per_hour=-1"),
        ({"margin": 2}, "0에서 1"),
        ({"margin": "많이"}, "0에서 1"),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"batch": 10**12}, "너무 크다"),
        ({"methods": 5}, "methods=5"),
        ({"gpu": 3}, "gpu=3"),
        ({"gpu": "MI300X"}, "ROCM"),
        ({"optimizer": "adamw_torch_xla"}, "adamw_torch_xla"),
    ],
)
def test_bad_input_is_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        plan_training(**SMALL | wrong)


# -- files and terminal ----------------------------------------------------------------------------------------------


def rehearse(folder, text, *more):
    """(status, stdout, stderr) of the written script, two steps on the CPU."""
    program = [folder / "train.py", "--text", text, "--output", folder / "out", "--cpu", "--max-steps", "2", *more]
    return run_forked(list(map(str, program)), folder=folder)


def test_grouped_heads_below_ampere_come_with_the_line_that_repeats_them():
    def asked(model, gpu):
        return make_request(model, gpu, length=128, batch=1)

    assert "use_gqa_in_sdpa = lambda" in asked("Qwen/Qwen3-0.6B", "T4").caution
    assert not asked("Qwen/Qwen3-0.6B", "L4").caution and not asked("gpt2", "T4").caution
    assert "flash-linear-attention" in asked("Qwen/Qwen3.5-0.8B", "L4").caution


@pytest.mark.slow
def test_the_lines_for_a_t4_save_what_their_table_says():
    request = make_request("Qwen/Qwen3-0.6B", "T4", length=512, batch=16, methods=("lora",))
    recipe = Recipe("lora", "mixed_fp16", "adamw_fused")
    (row,) = with_each_line(("Qwen/Qwen3-0.6B", "lora", False, 512))
    counted = [measure(request, replace(recipe, fused_lm_head=fused), 1, 16).needed_bytes for fused in (False, True)]
    assert list(row[4:6]) == [f"{needed / GiB:.2f}" for needed in counted]  # the planner takes the first for granted
    assert float(row[2]) > float(row[4]) > float(row[5]) > float(row[3]) and row[6] == "–"  # parameters; no QLoRA
    (row,) = with_each_line(("Qwen/Qwen3-0.6B", "qlora", False, 512))
    assert float(row[5]) > float(row[6])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_script_trains(method, model_folder, tmp_path):
    gpu = "L4" if method == "lora" else "T4"
    plans = plan_training(model_folder, gpu, length=32, batch=4, methods=(method,), lora_targets="all-linear")
    paths = plans.best.save(tmp_path)
    names = {path.name for path in paths}
    assert names == {"train.py", "training_arguments.json", "accelerate.yaml"} | (
        {"lora_config.json"} if method != "full" else set()
    )
    text = tmp_path / "text.txt"
    text.write_text("대한민국의 수도는 서울이다.\n" * 40, encoding="utf-8")
    status, _, err = rehearse(tmp_path, text)
    assert status == 0, err[-2000:]
    saved = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    assert (tmp_path / "out" / saved).is_file()
    if method == "full":
        text.write_text("짧다", encoding="utf-8")
        status, _, err = rehearse(tmp_path, text)
        assert status != 0 and "fewer than one block of 32" in err


def test_files_say_what_the_plan_says(small_llama):
    plans = plan_training(small_llama, "1.75GiB, 8.9", length=512, batch=4, methods=("full",))
    assert {plan.recipe.checkpointing for plan in plans} == {False, True}
    assert {plan.recipe.precision for plan in plans} == {"mixed_bf16", "bf16"}
    for plan in plans:
        arguments = json.loads(plan.files()["training_arguments.json"])
        assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 4
        assert arguments["gradient_checkpointing"] == plan.recipe.checkpointing
        assert arguments["bf16"] == (plan.recipe.precision == "mixed_bf16") and not arguments["fp16"]
        assert "torch.bfloat16" in plan.files()["train.py"] or plan.recipe.precision == "mixed_bf16"
        compile(plan.files()["train.py"], "train.py", "exec")


def test_weights_in_bf16_come_with_a_caution():
    """A step of 1e-5 moves few of them: the page, the table, the script and its learning rate say so."""
    request = {"length": 128, "batch": 1, "methods": ("full",), "optimizer": "adamw_fused"}
    plans = plan_training("meta-llama/Llama-3.2-1B", "RTX 3060", **request)
    assert plans.best.recipe.precision == "bf16" and plans.best.recipe.caution
    assert "bf16 ⚠" in plans._repr_html_() and plans.best.recipe.caution in plans._repr_html_()
    assert plans.best.recipe.caution in repr(plans) and plans.to_dict()["plans"][0]["caution"]
    files = plans.best.files()
    assert json.loads(files["training_arguments.json"])["learning_rate"] == 5e-5
    assert "round small updates away" in ast.get_docstring(ast.parse(files["train.py"]))
    mixed = plan_training("gpt2", "L4", length=64, batch=1, methods=("full",)).best
    assert not mixed.recipe.caution and "away" not in mixed.files()["train.py"]
    assert json.loads(mixed.files()["training_arguments.json"])["learning_rate"] == 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, stage, way", [("full", 3, (1, 4)), ("lora", 0, (1, 4)), ("lora", 3, (4, 1)), ("qlora", 3, (4, 1))]
)
def test_the_files_of_several_gpus_run(method, stage, way, tmp_path):
    """`accelerate launch` as the script says, as one of four ranks on a virtual card: what the plan counted is held."""
    llama = LlamaConfig(
        vocab_size=258, hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2816
    )  # fmt: skip
    llama.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("대한민국의 수도는 서울이다.\n" * 1000, encoding="utf-8")
    request = make_request(str(tmp_path / "model"), "L4", 4, length=256, batch=16, methods=(method,))
    plan = measure(request, Recipe(method, "mixed_bf16", "adamw_fused", stage=stage), *way)
    plan.save(tmp_path / "plan")
    virtual = ["run", "--gpu", "L4", "--gpus", "4", "--no-advise", "--report", str(tmp_path / "report.json")]
    launch = ["accelerate", "launch", "--config_file", "accelerate.yaml", "train.py", "--text"]
    program = ["-m", "virtual_gpu", *virtual, "--", *launch, str(tmp_path / "text.txt")]
    status, _, err = run_forked(program, folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    tensors = plan.needed_bytes - plan.at_peak["fragmentation"]
    # Of this small model DDP's first broadcast, in buckets of 250 MiB, is larger than the step: it is not the plan's.
    held = max(allocated for phase, (allocated, _) in report["phases"].items() if phase != "loading")
    assert report["steps"] == 3 and abs(held / tensors - 1) < 0.06


@pytest.mark.parametrize("method, stage", [("lora", 0), ("lora", 3), ("qlora", 0), ("qlora", 3)])
def test_the_files_of_sharded_adapters_load_where_fsdp_can_split(method, stage):
    request = make_request(config(), "2 x T4", length=32, batch=2, methods=(method,))
    files = measure(request, Recipe(method, "mixed_fp16", "adamw_fused", stage=stage), 1, 1).files()
    called = [
        node for node in ast.walk(ast.parse(files["train.py"]))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained")
    ]  # fmt: skip
    loading = {word.arg: ast.unparse(word.value) for word in called[-1].keywords}
    place = {("lora", 3): None, ("qlora", 3): "{'': 'cpu'}"}
    whole = "{'': 'cpu' if args.cpu else PartialState().local_process_index}"
    assert loading.get("device_map") == place.get((method, stage), whole)
    stored = "bnb_4bit_quant_storage=dtype" in loading.get("quantization_config", "")
    assert stored == (method == "qlora" and stage == 3)
    assert ("prepare_model_for_kbit_training" in files["train.py"]) == (method == "qlora" and not stage)
    assert ("fsdp_version: 2" in files["accelerate.yaml"]) == bool(stage) and "fp16" in files["accelerate.yaml"]


def test_accelerate_reads_the_configuration(tmp_path, small_llama):
    from accelerate.commands.config.config_args import load_config_from_file

    plans = plan_training(small_llama, "L4", 4, length=256, batch=8, methods=("full", "lora"))
    for plan in plans:
        text = plan.files()["accelerate.yaml"]
        (tmp_path / "accelerate.yaml").write_text(text, encoding="utf-8")
        read = load_config_from_file(str(tmp_path / "accelerate.yaml"))
        kind = "FSDP" if plan.recipe.stage else "MULTI_GPU"
        assert read.num_processes == 4 and str(read.distributed_type).split(".")[-1] == kind
        if plan.recipe.stage:
            shards = yaml.safe_load(text)["fsdp_config"]
            assert shards["fsdp_reshard_after_forward"] == (plan.recipe.stage == 3)
            assert shards["fsdp_activation_checkpointing"] == plan.recipe.checkpointing


def test_a_configuration_is_a_model_too():
    plans = plan_training(config(), "T4", length=64, batch=2, methods=("lora",))
    assert plans.best.tensors_bytes == predicted(plans.best).needed_bytes
    assert 'add_argument("--model", required=True)' in plans.best.files()["train.py"]


def test_the_terminal(capsys, tmp_path):
    base = ["--model", "gpt2", "--length", "64", "--batch", "2", "--methods", "lora"]
    assert main([*base, "--json", "--save", str(tmp_path / "plan")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["plans"][0]["method"] == "lora" and found["request"]["gpu"] == "T4"
    assert (tmp_path / "plan" / "train.py").is_file()
    assert main(base) == 0
    assert "예상이 아니다" in capsys.readouterr().out
    assert main([*base, "--batch", "둘"]) == 2
    assert "오류" in capsys.readouterr().err
    assert main(["--model", "gpt3"]) == 2
    assert main(["--gpu", "T4"]) == 2
    assert main(["gpt3"]) == 2 and main(["gpt2", "--model", "polyglot-ko-1.3b"]) == 2
    assert "--from" in capsys.readouterr().err


def test_the_terminal_when_nothing_fits_and_in_english(capsys):
    try:
        words = ["--model", "Llama-3.1-8B", "--length", "64", "--batch", "1", "--methods", "full", "--language", "en"]
        assert main(words) == 1
        assert "nothing fits" in capsys.readouterr().out
    finally:
        set_language("ko")


def test_the_module_runs():
    command = [sys.executable, "-m", "helpers.planner", "--model", "gpt2", "--gpu", "없음"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert result.returncode == 2 and result.stdout == "" and "T4" in result.stderr


# -- what is unknown -------------------------------------------------------------------------------------------------


def test_a_verdict_is_certain_only_at_the_worst_of_the_unknowns():
    for nccl in (None, Range(10**8, 10**9)):
        room = room_on(CATALOG["T4"], nccl)
        sure, possible = room.sure_bytes, room.possible_bytes
        assert [room.verdict(size) for size in (sure, sure + 1, possible, possible + 1)] == [
            "fits", "tight", "tight", "does not fit",
        ]  # fmt: skip
        assert room.needed(sure).high <= room.memory.low and room.needed(possible).low == room.memory.high
    alone, four = (make_request("gpt2", "T4", gpus, batch=4).room for gpus in (1, 4))
    assert [part.what for part in four.outside] == ["context", "NCCL"]
    assert four.sure_bytes < alone.sure_bytes and four.possible_bytes < alone.possible_bytes


def test_what_is_tight_is_no_plan_and_says_so():
    plans = plan_training(**SMALL, methods=("full",), optimizer="adamw_fused")
    miss = min(plans.refused.values(), key=lambda plan: plan.needed_bytes)
    room = plans.request.room
    between = replace(miss, needed_bytes=(room.sure_bytes + room.possible_bytes) // 2)
    assert between.verdict == "tight" and not between.fits
    assert "빠듯" in too_much(between) and between.to_dict()["verdict"] == "tight"


def test_progress_grows_to_the_whole_answer():
    seen = []
    plans = plan_training("gpt2", "T4", length=64, batch=4, progress=lambda found: seen.append(len(found)))
    assert seen == sorted(seen) and seen[-1] == len(plans) and len(seen) > 3


@pytest.mark.parametrize(
    "request_",
    [
        {},  # the whole batch fits at once, without checkpointing
        {"gpu": "2GiB, 8.6", "length": 512},  # the first computes something twice
        {"gpu": "2 x T4", "methods": ("full",)},
        {"host": "8GB"},
        {"objective": "dpo", "methods": ("full", "lora")},
    ],
)
def test_once_the_first_plan_is_settled_it_stays_first(request_):
    seen = []
    request_ = {"gpu": "T4", "length": 64, "batch": 4} | request_
    plans = plan_training("gpt2", progress=lambda found: seen.append((found.settled, found.best)), **request_)
    sure = [settled for settled, _ in seen]
    assert sure == sorted(sure) and plans.settled and {best for settled, best in seen if settled} == {plans.best}
    assert 0 < sum(sure) < len(sure)  # before the end, and not from the beginning


def test_by_another_preference_the_last_plan_may_be_the_first():
    seen = []
    plan_training("gpt2", "T4", length=64, batch=4, prefer="speed", progress=lambda found: seen.append(found.settled))
    assert seen and not any(seen)


# -- models whose layers differ, methods that cannot be run ----------------------------------------------------------


def hybrid():
    return Lfm2Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=128, block_multiple_of=8,
        layer_types=["conv", "conv", "full_attention", "conv"],
    )  # fmt: skip


@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_the_written_adapters_are_those_that_were_measured(targets):
    request = make_request(hybrid(), "T4", length=32, batch=1, methods=("lora",), lora_targets=targets)
    plan = measure(request, recipes_of(request)[0], 1, 1)
    written = set(json.loads(plan.files()["lora_config.json"])["target_modules"])
    model = add_adapters(build_model(load_config(request.model), torch.float16), targets=targets)
    trained = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert written == trained >= {"q_proj", "v_proj"}


def test_modules_are_named_on_the_command_line(capsys, tmp_path):
    model = ["--model", "Qwen/Qwen3-0.6B", "--gpu", "RTX 4090", "--length", "64", "--batch", "2"]
    saved = ["--save", str(tmp_path), "--files", "torch"]
    assert main([*model, "--methods", "lora", "--modules-to-save", "embed_tokens,lm_head", *saved]) == 0
    assert 'modules_to_save=["embed_tokens", "lm_head"]' in (tmp_path / "train.py").read_text(encoding="utf-8")
    assert main([*model, "--modules-to-save", "embed"]) == 2
    assert "embed_tokens, lm_head" in capsys.readouterr().err


def test_a_target_that_only_a_late_layer_has():
    settings = {"batch_size": 1, "peft": "lora", "lora_targets": ["layers.9.self_attn.q_proj"], "sequence_length": 16}
    deep = LlamaConfig(**config().to_dict() | {"num_hidden_layers": 11})
    report = predict_memory(model_id=deep, gpu="T4", **settings)
    assert report.peak_bytes == predict_memory(model_id=deep, gpu="T4", full=True, **settings).peak_bytes


def test_a_method_that_cannot_be_run_is_a_loser_with_the_reason(monkeypatch):
    real = search.measure

    def refuse(request, recipe, *way):
        if recipe.method == "qlora":
            raise RuntimeError("expected scalar type Byte")
        return real(request, recipe, *way)

    monkeypatch.setattr(search, "measure", refuse)
    plans = plan_training("gpt2", "T4", length=32, batch=1)
    assert {plan.recipe.method for plan in plans} == {"full", "lora"}
    assert any("QLoRA" in what and "expected scalar type Byte" in why for what, why in plans.skipped)
    with pytest.raises(RuntimeError, match="Byte"):
        plan_training("gpt2", "T4", length=32, batch=1, methods=("qlora",))


def test_phi_has_fused_projections_and_takes_adapters():
    phi = Phi3Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    plans = plan_training(phi, "T4", length=32, batch=1, methods=("lora",))
    assert json.loads(plans.best.files()["lora_config.json"])["target_modules"] == ["qkv_proj"]


# -- files that are not to be trusted, or not to be lost ------------------------------------------------------------


@pytest.mark.parametrize("name", ['x"""', "x\\new\\x41", 'x"""\nraise SystemExit(7)\n"""', "모델'{dtype}"])
def test_a_folder_s_name_is_data(name, tmp_path):
    folder = tmp_path / name
    config().save_pretrained(folder)
    plan = plan_training(folder, "T4", length=16, batch=1, methods=("lora",)).best
    script = plan.files()["train.py"]
    tree = ast.parse(script)
    assert str(folder) in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert not any(isinstance(node, ast.Raise) and "7" in ast.unparse(node) for node in ast.walk(tree))
    assert str(folder) not in ast.get_docstring(tree)
    assert script.count("trust_remote_code=False") == 2


def test_nothing_is_written_over(tmp_path, capsys):
    plan = plan_training("gpt2", "T4", length=16, batch=1, methods=("lora",)).best
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "train.py").symlink_to(precious)
    for force in (False, True):
        with pytest.raises(ExistingFile, match=r"train\.py"):
            plan.save(tmp_path, force=force)
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(ExistingFile, match="--force"):
        plan.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "train.py"]
    plan.save(tmp_path, force=True)
    assert precious.read_text() == "mine" and "Trainer" in (tmp_path / "train.py").read_text()
    with pytest.raises(ExistingFile, match="폴더"):
        plan.save(precious / "below")


def test_the_folder_is_looked_at_before_the_search(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text("mine")
    monkeypatch.setattr("virtual_gpu.plan.command.plan_training", lambda *_, **__: pytest.fail("searched"))
    assert main(["--model", "gpt2", "--save", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err


def test_a_plan_that_cannot_be_saved_is_printed(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise ExistingFile("disk full")

    monkeypatch.setattr("virtual_gpu.plan.plans.write", fail)
    words = ["--model", "gpt2", "--length", "16", "--batch", "1", "--methods", "lora", "--save", str(tmp_path)]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "LoRA" in captured.out and "disk full" in captured.err
