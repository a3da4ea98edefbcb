"""GRPO over several cards with an engine on each: as TRL's trainer under accelerate's FSDP2 holds it."""

import json
from dataclasses import replace

import pytest
from forked import free_port, run_forked
from test_completions import words
from test_plan_files import ACCELERATE, llama, one_rank
from test_plan_files import small as small  # a fixture

from virtual_gpu.errors import WrongValue
from virtual_gpu.models.configs import load_config
from virtual_gpu.plan import Recipe, plan_training
from virtual_gpu.plan.candidates import left_out, recipes_of
from virtual_gpu.plan.engine import ASLEEP, AWAKE
from virtual_gpu.plan.measure import held, measure
from virtual_gpu.plan.request import make_request
from virtual_gpu.shards.fake_rank import run_rank
from virtual_gpu.shards.generated import Generated
from virtual_gpu.shards.layout import CONVENTIONS, Layout
from virtual_gpu.shards.ledger import closed_form, count_elements, padded_elements
from virtual_gpu.shards.rank_step import rank_need, rank_step
from virtual_gpu.step.completions import Completions

FULL, LORA = (Recipe(method, "mixed_bf16", "adamw_fused", 3, fused_lm_head=True) for method in ("full", "lora"))
WAYS = [
    (replace(FULL, checkpointing=True, vllm=AWAKE), 2, {}),
    (replace(FULL, stage=2, vllm=ASLEEP), 2, {"iterations": 2}),
    (replace(FULL, checkpointing=True, vllm=ASLEEP), 8, {"beta": 0.1}),  # whose peak is the reference, gathered whole
    (replace(FULL, stage=2, checkpointing=True, vllm=ASLEEP), 2, {"beta": 0.1}),  # which stays so
    (replace(LORA, vllm=AWAKE), 2, {}),
    (replace(LORA, checkpointing=True, vllm=ASLEEP), 4, {"beta": 0.1}),
]


def planned(folder, recipe, gpus, **more):
    """A plan of a model of two layers, and its files beside it."""
    llama(folder / "model", vocab_size=32_768, hidden_size=1024, intermediate_size=2816, max_position_embeddings=256)
    request = make_request(
        str(folder / "model"), "L4", gpus, length=256, batch=4 * gpus, objective="grpo", completion_length=64,
        generations=4, vllm=AWAKE, **more,
    )  # fmt: skip
    plan = measure(request, recipe, 2, 2)
    plan.save(folder / "plan")
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("recipe, gpus, more", WAYS, ids=lambda value: getattr(value, "title", str(value)))
def test_a_rank_of_the_files_holds_what_the_plan_counted(recipe, gpus, more, tmp_path):
    """GRPOTrainer under `accelerate launch` as the script says, while it is trained, and while an engine gets weights.

    Head and embedding are more than half of the model: what is gathered for an engine is far more than a layer.
    """
    plan = planned(tmp_path, recipe, gpus, **more)
    request = plan.request
    report = one_rank(plan, [*ACCELERATE, "train.py", *words(tmp_path, 192, "--max-steps", "3")], tmp_path)
    share = int(plan.engine.share(request) * request.spec.memory_bytes)
    beside = share if recipe.vllm == AWAKE else 0
    assert sum(report["at_peak"].values()) == report["allocated"] and report["at_peak"]["engine"] >= beside
    phases = report["phases"]
    trained = max(phases[phase][0] for phase in ("evaluation", "forward", "backward", "step")) - beside
    assert plan.training_bytes == pytest.approx(trained, rel=0.01)
    if recipe.vllm == ASLEEP:  # the engine is there while it is handed the weights alone
        synced, reserved = phases["between"]
        assert plan.generation_bytes == pytest.approx(synced - share, rel=0.01)
        # What of the cache could be given back before it woke, to a segment or two.
        assert abs(plan.engine.trained - (reserved - share)) < 40 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_who_sends_once_a_step_keeps_whole_gradients(stage, tmp_path):
    """The script says that each micro-batch's are split. A file that does not has them whole, as `--from` counts."""
    recipe = replace(FULL, stage=stage, checkpointing=True, vllm=AWAKE)
    plan = planned(tmp_path, recipe, 4)
    script = tmp_path / "plan" / "train.py"
    text = script.read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if "sync_each_batch" in line]
    script.write_text(text.replace(line + "\n", ""), encoding="utf-8")
    report = one_rank(plan, [*ACCELERATE, "train.py", *words(tmp_path, 192, "--max-steps", "3")], tmp_path)
    share = int(plan.engine.share(plan.request) * plan.request.spec.memory_bytes)
    trained = max(report["phases"][phase][0] for phase in ("forward", "backward")) - share
    given = {"batch_size": 2, "sequence_length": 256, "completion_length": 64, "rollout": 4, "gpu": "L4"}
    given |= {"objective": "grpo", "gradient_checkpointing": True, "accumulating": True}
    each, once = (rank_step(plan.request.model, 4, stage, **given, whole_gradients=w) for w in (False, True))
    assert each.total == plan.training_bytes and once.total == pytest.approx(trained, rel=0.01)
    assert once.total > 1.1 * each.total


@pytest.mark.slow
def test_trl_merges_adapters_into_shards(tmp_path):
    """By two real processes: each weight that an engine is given is the one that a whole model's merging makes."""
    (tmp_path / "merged.py").write_text(MERGED, encoding="utf-8")
    status, out, err = run_forked([str(tmp_path / "merged.py")], 2, port=free_port(), folder=tmp_path)
    assert status == 0, err[-2000:]
    assert "21 given, 0 differ" in out


MERGED = """
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from virtual_gpu.step import rollout

dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" not in name}
model.merge_adapter()
whole = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" not in name}
model.unmerge_adapter()
assert any(not torch.equal(before[name], whole[name]) for name in whole)
for block in model.get_base_model().model.layers:
    fully_shard(block)
fully_shard(model)
given = {}


class Engine(rollout._Takes):
    def __call__(self, weights=()):
        given.update((name, weight.clone()) for name, weight in weights)


rollout._Takes = Engine
rollout.hand_over(model, 2)
for name, parameter in model.named_parameters():  # and taken out again
    assert "lora" in name or torch.allclose(parameter.full_tensor(), before[name], atol=1e-6)
plain = {name.removeprefix("base_model.model.").replace(".base_layer", ""): weight for name, weight in whole.items()}
assert given.keys() == plain.keys()
apart = [name for name in plain if not torch.allclose(given[name], plain[name], atol=1e-6)]
if dist.get_rank() == 0:
    print(f"{len(given)} given, {len(apart)} differ")
dist.destroy_process_group()
"""


def test_what_a_rank_holds_is_as_its_shapes_say(small):
    config = load_config(str(small))
    for stage, beta in ((3, 0.0), (3, 0.1), (2, 0.1)):
        layout = Layout(4, stage, as_accelerate=True)
        of = Generated(Completions(4, 2, 6, 2, beta, vllm=True))
        ran = run_rank(
            config, layout, CONVENTIONS["mixed"].fp32_shards, batch_size=2, sequence_length=8, fused_lm_head=True,
            generated=of,
        )  # fmt: skip
        memory = closed_form(str(small), layout, second=beta > 0, fp32_shards=True)
        for kind in ("parameters", "gradients", "momentum", "variance", *(["gathered"] if stage == 2 else [])):
            assert ran.held[kind] == getattr(memory, kind), (stage, beta, kind)
        given = run_rank(
            config, layout, CONVENTIONS["mixed"].fp32_shards, batch_size=2, sequence_length=8, generated=of.at("sync"),
            update=False,
        )  # fmt: skip
        gathered = given.sent_activation_bytes["all_gather_into_tensor"]
        assert gathered == 4 * padded_elements(str(small), layout)


def test_a_reference_is_gathered_whole_and_adapters_need_none():
    given = {"objective": "grpo", "sequence_length": 512, "rollout": 8, "batch_size": 2}
    given["gradient_checkpointing"] = True
    model, ranks = "meta-llama/Llama-3.2-1B", 8
    alone, beside = (rank_step(model, ranks, **given, beta=beta) for beta in (0.0, 0.1))
    whole = 2 * 2 * count_elements(model)  # in one piece, and as its parameters
    assert beside.phase == "scoring" and alone.phase == "backward"
    assert whole < beside.total < 2 * whole
    assert beside.memory.parameters == 2 * alone.memory.parameters and alone.handing_over is not None
    assert beside.parameters_and_gradients_sent == alone.parameters_and_gradients_sent
    # All weights in the shards' fp32, and for each of four micro-batches' scores in 16 bits; of a reference too.
    padded = padded_elements(model, Layout(ranks))
    assert (alone.sent_once_bytes, beside.sent_once_bytes) == ((4 + 8) * padded, (4 + 16) * padded)
    lora = [rank_step(model, ranks, peft="lora", **given, beta=beta) for beta in (0.0, 0.1)]
    assert lora[0].total == lora[1].total
    need = rank_need(model, ranks, 3, **given)
    assert need.rollout == alone.rollout_bytes >= sum(need.at_generation.values())
    # One parameter after another, and the last one is there while the next is gathered: no third copy of the largest.
    largest = 4 * 128_256 * 2048
    assert largest < need.at_generation["gathered"] < 1.1 * largest


@pytest.mark.parametrize("wrong, said", [
    ({"stage": 1}, "predict_memory"),
    ({"objective": "ppo", "tensor_parallel": 2}, "ppo"),
    ({"tensor_parallel": 2}, "objective='grpo'"),
    ({"peft": "qlora"}, "qlora"),
    ({"completion_length": 64}, "completion_length=64"),
    ({"rollout": 3}, "rollout=3"),
    ({"beta": -1}, "beta"),
    ({"iterations": 0}, "iterations"),
    ({"replicas": 2}, "grpo"),
    ({"context_parallel": 2}, "grpo"),
])  # fmt: skip
def test_what_is_not_counted_is_refused(wrong, said):
    given = {"batch_size": 2, "sequence_length": 64, "objective": "grpo"} | wrong
    with pytest.raises(WrongValue, match=said):
        rank_step("meta-llama/Llama-3.2-1B", 8, **given)


def test_the_planner_splits_what_grpo_trains():
    """8B of all weights fit no card with an engine; eight of them hold a share each."""
    plans = plan_training(
        "Qwen/Qwen3-8B", "8 x H100", length=1024, batch=64, methods="full", objective="grpo", vllm=AWAKE,
        optimizer="adamw_fused",
    )  # fmt: skip
    assert {plan.recipe.stage for plan in plans.plans} == {2, 3}
    assert {plan.recipe.stage for plan in plans.losers} == {0}
    for plan in plans.plans:
        assert sum(held(plan.request, plan.recipe).values()) <= plan.needed_bytes
        assert plan.engine.least_share(plan.request) < plan.engine.share(plan.request) < 1
        files = plan.files()
        assert "fsdp_version: 2" in files["accelerate.yaml"] and "ACCELERATE_USE_FSDP" in files["train.py"]
        assert "fsdp_cpu_ram_efficient_loading: true" in files["accelerate.yaml"]
    second = measure(replace(plans.best.request, beta=0.1), replace(FULL, vllm=AWAKE), 1, 8)
    assert "fsdp_cpu_ram_efficient_loading: false" in second.files()["accelerate.yaml"]


def test_who_generates_by_himself_is_not_split(small):
    for vllm, split in ((None, False), (AWAKE, True)):
        request = make_request(str(small), "2 x L4", length=64, batch=8, objective="grpo", generations=4, vllm=vllm)
        stages = {(recipe.method, recipe.stage) for recipe in recipes_of(request)}
        assert ({("full", 2), ("full", 3), ("lora", 3)} <= stages) == split
        said = dict(left_out(request))
        assert ("ZeRO" in said) != split and (split or "vllm='colocate'" in said["ZeRO"])


@pytest.mark.slow
def test_a_rehearsal_of_two_ranks_has_no_engine(small, tmp_path):
    from test_pairs import launched

    request = make_request(str(small), "L4", 2, length=32, batch=8, objective="grpo", generations=4, vllm=AWAKE)
    measure(request, replace(FULL, vllm=AWAKE), 2, 2).save(tmp_path / "plan")
    given = words(tmp_path, 16, "--cpu", "--max-steps", "2")
    program, environment = launched(tmp_path / "plan", [str(tmp_path / "plan" / "train.py"), *given])
    status, _, err = run_forked(program, 2, environment, free_port(), folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
