"""Expert parallelism: a plan is what a rank of its script takes, and real processes learn what one does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers.distributed
from forked import run_forked
from safetensors.torch import load_file
from test_plan_files import llama, rehearse
from transformers import AfmoeConfig, GptOssConfig, Qwen3MoeConfig

from virtual_gpu.cards import card
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.plan import Recipe, plan_training
from virtual_gpu.plan.files import KINDS
from virtual_gpu.plan.host import host_need
from virtual_gpu.plan.in_experts import experts_step
from virtual_gpu.plan.measure import held, measure
from virtual_gpu.plan.plans import Plan
from virtual_gpu.plan.request import make_request
from virtual_gpu.shards import experts
from virtual_gpu.shards.experts import why_no_experts
from virtual_gpu.step.flops import count_flops

pytestmark = pytest.mark.skipif(
    "ep_size" not in vars(transformers.distributed.DistributedConfig), reason="a newer transformers' expert parallelism"
)
ROOT = Path(__file__).parent.parent
BIG, WORKSPACE = "Qwen/Qwen3-30B-A3B", 8_519_680
IN_TWOS = Recipe("full", "mixed_bf16", "adamw_fused", 3, expert_parallel=2)


def moe(folder, family=Qwen3MoeConfig, **more):
    """A small mixture of eight experts, of which each token goes to two."""
    name = {"num_local_experts": 8} if family is GptOssConfig else {"num_experts": 8, "moe_intermediate_size": 256}
    sizes = {"hidden_size": 1024, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4, **name}
    return llama(folder, family, **sizes | {"num_experts_per_tok": 2, "num_key_value_heads": 8} | more)


def test_the_bytes_are_those_of_the_table_of_levers():
    """benchmarks/levers.json, of a program that loads the model itself: the peak, and what is sent."""
    given = {"weights": torch.float32, "mixed": True, "batch_size": 1, "sequence_length": 2048, "checkpointing": True}
    table = json.loads((ROOT / "benchmarks" / "levers.json").read_text(encoding="utf-8"))["rows"]["moe-x8"]
    for degree, lever in ((1, "base"), (4, "experts_in_fours"), (8, "experts")):
        step, row = experts_step(BIG, 8, degree, card("H100"), **given), table[lever]
        counted = sum(step.at_peak.values()) - step.at_peak["fragmentation"]
        sent = step.sent + step.sent_experts + step.sent_tokens
        assert (counted, sent) == pytest.approx((row["peak"], row["sent"]), rel=1e-5)  # but for its messages' sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, gpus, way, family",
    [
        (IN_TWOS, 2, (2, 2), Qwen3MoeConfig),
        (replace(IN_TWOS, checkpointing=True), 4, (4, 1), Qwen3MoeConfig),
        (replace(IN_TWOS, expert_parallel=4, precision="bf16"), 4, (2, 2), Qwen3MoeConfig),
        (replace(IN_TWOS, expert_parallel=4), 4, (2, 1), GptOssConfig),
        (replace(IN_TWOS, checkpointing=True), 2, (2, 2), Qwen3MoeConfig),
        (IN_TWOS, 2, (2, 2), AfmoeConfig),  # with a bias that no gradient changes
    ],
    ids=["all have some", "two share", "bf16", "gpt-oss", "checkpointed", "frozen"],
)
def test_a_rank_of_the_file_holds_what_was_counted(recipe, gpus, way, family, tmp_path):
    moe(tmp_path / "model", family, vocab_size=16_384, max_position_embeddings=256)
    (tmp_path / "text.txt").write_text("abcdefgh" * 10_000, encoding="utf-8")
    request = make_request(
        str(tmp_path / "model"), "L4", gpus, length=256, batch=way[0] * way[1] * gpus, methods="full",
        expert_parallel=recipe.expert_parallel,
    )  # fmt: skip
    plan = measure(request, recipe, *way)
    plan.save(tmp_path / "plan")
    words = ["--gpu", "L4", "--gpus", str(gpus), "--no-advise", "--report", str(tmp_path / "report.json"), "--"]
    words += ["torchrun", "--nproc_per_node", str(gpus), "train.py", "--text", str(tmp_path / "text.txt")]
    status, _, err = run_forked(["-m", "virtual_gpu", "run", *words, "--max-steps", "3"], folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    most = max(allocated for phase, (allocated, _) in report["phases"].items() if phase != "loading")
    assert report["host"]["at_peak"]["loading"] == host_need(plan).loading.low == 0  # each reads its own part
    # Backward's thread has its workspace in later steps; the plan is of a first one.
    assert report["steps"] == 3 and abs(plan.tensors_bytes + WORKSPACE - most) < 0.002 * most


@pytest.mark.slow
@pytest.mark.parametrize("several, tied", [(2, True), (4, False)])
def test_experts_of_their_own_make_the_steps_of_one_process(several, tied, tmp_path):
    """Real processes, each with four of the eight experts, or half of each of these; what they save is the model."""
    model = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    config = moe(model, vocab_size=258, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **sizes,
                 tie_word_embeddings=tied)  # fmt: skip
    torch.manual_seed(0)
    build_model(config, torch.float32, device="cpu").save_pretrained(model)
    text, learned = "abcdefgh" * 48, {}  # blocks that are all alike: half a batch has the batch's gradient
    for ranks in (1, several):
        request = make_request(str(model), "L4", ranks, length=32, batch=8, methods="full")
        recipe = Recipe("full", "fp32", "sgd", 3 * (ranks > 1), expert_parallel=min(ranks, 2))
        plan = Plan(request.of(recipe), recipe, 1, 8 // ranks, 0, {}, 0, 0, 0, None)
        learned[ranks] = rehearse(plan, "torch", tmp_path / f"{ranks}", text, 2, ranks)
    before = load_file(model / "model.safetensors")
    assert before.keys() == learned[1].keys() <= learned[several].keys()  # a tied head is gathered apart
    moved = max((learned[1][name] - before[name]).abs().max() for name in before)
    apart = max((learned[several][name] - learned[1][name]).abs().max() for name in before)
    assert moved > 1e-2 and apart < 1e-4 * moved, (moved, apart)


def test_the_planner_counts_experts_that_are_asked_for():
    given = {"length": 512, "batch": 8, "methods": ("full", "lora"), "precision": "mixed_bf16"}
    plans = plan_training(BIG, "8 x H100", expert_parallel=8, **given)
    assert plans.plans and all(plan.recipe.expert_parallel == 8 for plan in plans.plans)
    assert "고르게" in str(plans)
    labels = [what for what, _ in plans.skipped]
    assert "LoRA · 전문가 병렬" in labels and "전문가 병렬 · 텐서 병렬" in labels
    one = plans.best
    assert one.at_peak["gathered"] < 2**30 and "전문가 병렬 8" in one.title
    counted, states = held(one.request, one.recipe), {kind: one.at_peak[kind] for kind in ("parameters", "optimizer")}
    assert {kind: counted[kind] for kind in states} == pytest.approx(states, rel=1e-4)
    assert [kind for kind in KINDS if has_files(one, kind)] == ["torch"]
    other = plan_training(BIG, "8 x H100", **given | {"methods": ("full",)})
    assert any("전문가 병렬" in what and "expert_parallel=" in why for what, why in other.skipped)
    alike = next(plan for plan in other.plans if replace(plan.recipe, expert_parallel=8) == one.recipe)
    assert one.sent_bytes < alike.sent_bytes and one.needed_bytes < alike.needed_bytes


def has_files(plan, kind):
    try:
        return bool(plan.files(kind))
    except NotSupported:
        return False


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"model": "Qwen/Qwen3-8B"}, "base_model_ep_plan"),
        ({"expert_parallel": 3}, "3로 나누어떨어져야 한다"),
        ({"expert_parallel": 16, "gpu": "16 x H100"}, "한 컴퓨터"),
        ({"expert_parallel": 0}, "전문가 병렬 크기"),
        ({"methods": ("lora",)}, "전체 미세 조정에서만"),
        ({"optimizer": "adamw_8bit"}, "AdamW"),
        ({"tensor_parallel": 2}, "함께 실행해 보지 않았다"),
    ],
)
def test_experts_that_cannot_be_are_refused(wrong, said):
    given = {"model": BIG, "gpu": "8 x H100", "batch": 16, "expert_parallel": 8, "methods": ("full",)} | wrong
    with pytest.raises(WrongValue, match=said):
        make_request(given.pop("model"), given.pop("gpu"), **given)


def test_experts_are_counted_among_the_flops():
    """Each token goes through two of them: three matrices, and in backward each twice."""
    one, other = (
        count_flops(
            build_model(load_config_of(moe_intermediate_size=width), torch.bfloat16),
            {name: torch.zeros(2, 64, dtype=torch.int64) for name in ("input_ids", "labels")},
        )
        for width in (256, 512)
    )
    more = 2 * 3 * (2 * 64) * 2 * 1024 * 256 * 4  # FLOPs of a product, matrices, tokens, experts of each, sizes, layers
    assert (other.forward - one.forward, other.backward - one.backward) == (more, 2 * more)


def load_config_of(**sizes):
    return Qwen3MoeConfig(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, num_experts=8,
        num_experts_per_tok=2, vocab_size=258, **sizes,
    )  # fmt: skip


def test_an_older_transformers_says_so(monkeypatch):
    monkeypatch.setattr(experts, "has_experts", lambda: False)
    for name in (BIG, "Qwen/Qwen3-8B"):  # its plans say it otherwise, or not at all
        assert "5.23" in why_no_experts(load_config(name), 8, 8)
