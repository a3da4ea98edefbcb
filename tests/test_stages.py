"""Pipeline parallelism: a model's parts give what it gives, and a plan of stages is what a run of PyTorch's takes."""

import copy
import json
import random
from dataclasses import replace

import pytest
import torch
from forked import run_forked
from safetensors.torch import load_file
from test_architectures import small as shrunk
from test_plan_files import llama, rehearse
from test_plan_files import small as small  # a fixture
from transformers import AutoModelForCausalLM

from virtual_gpu.cards import card
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models.build import build_model
from virtual_gpu.plan import Recipe, in_stages, plan_training
from virtual_gpu.plan.command import main
from virtual_gpu.plan.files import KINDS
from virtual_gpu.plan.in_stages import staged_step
from virtual_gpu.plan.measure import held, measure
from virtual_gpu.plan.plans import Plan
from virtual_gpu.plan.request import make_request
from virtual_gpu.shards.stages import FAMILIES, Part, keep_layers, why_no_stages

STAGED = Recipe("full", "mixed_bf16", "adamw_fused", 3, pipeline_parallel=2)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parts_make_the_model_s_logits(family):
    config = shrunk(family, num_hidden_layers=4, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    x = ids = torch.randint(0, config.vocab_size, (2, 16))
    names = []
    for start in (0, 2):
        part = copy.deepcopy(model)
        keep_layers(part, range(start, start + 2))
        part = Part(part, start == 0, start == 2)
        x = part(x)
        names += [name for name, _ in part.model.named_parameters() if "layers." not in name]
        assert len(part.groups()) == 3
    assert torch.equal(x, model(input_ids=ids).logits)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters() if "layers." not in name)


WAYS = [
    (STAGED, 2, (2, 4), 0),
    (STAGED, 2, (2, 4), 1),
    (replace(STAGED, checkpointing=True), 4, (2, 4), 0),
    (replace(STAGED, stage=2), 4, (1, 6), 2),
    (replace(STAGED, precision="bf16", pipeline_parallel=4, checkpointing=True), 4, (1, 8), 0),
    (replace(STAGED, pipeline_parallel=4), 4, (1, 12), 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe, gpus, way, rank", WAYS, ids=lambda value: getattr(value, "title", str(value)))
def test_a_rank_of_the_file_holds_what_was_counted(recipe, gpus, way, rank, tmp_path):
    """Launched by torchrun as the script says, on a rank of the first stage, of the last, or of one between."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "max_position_embeddings": 256, "vocab_size": 16_384}
    llama(tmp_path / "model", num_hidden_layers=8, **sizes)
    (tmp_path / "text.txt").write_text("abcdefgh" * 10_000, encoding="utf-8")
    stages = recipe.pipeline_parallel
    batch = way[0] * way[1] * gpus // stages
    request = make_request(
        str(tmp_path / "model"), "L4", gpus, length=256, batch=batch, methods="full", pipeline_parallel=stages
    )
    plan = measure(request, recipe, *way)
    plan.save(tmp_path / "plan")
    words = ["--gpu", "L4", "--gpus", str(gpus), "--rank", str(rank), "--no-advise"]
    words += ["--report", str(tmp_path / "report.json"), "--", "torchrun", "--nproc_per_node", str(gpus), "train.py"]
    words += ["--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--max-steps", "3"]
    status, _, err = run_forked(["-m", "virtual_gpu", "run", *words], folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    most = max(allocated for phase, (allocated, _) in report["phases"].items() if phase != "loading")
    of = staged_step(
        request.model, gpus, stages, recipe.stage, card("L4"), batch_size=way[0], sequence_length=256,
        weights=torch.float32 if recipe.precision == "mixed_bf16" else torch.bfloat16, half=torch.bfloat16,
        micro_batches=way[1], checkpointing=recipe.checkpointing, only=rank * stages // gpus,
    )  # fmt: skip
    counted = sum(nbytes for kind, nbytes in of.at_peak.items() if kind != "fragmentation")
    assert abs(counted / most - 1) < 0.01


@pytest.mark.parametrize("stage, zero, checkpointing", [(0, 3, False), (1, 2, True), (3, 3, False)])
def test_many_micro_batches_are_a_few_and_more_like_them(stage, zero, checkpointing, monkeypatch):
    """To the byte, and where the allocator puts them too."""
    given = {"weights": torch.float32, "half": torch.bfloat16, "batch_size": 1, "sequence_length": 256}
    given |= {"checkpointing": checkpointing, "micro_batches": 13, "only": stage}
    few = staged_step("Qwen/Qwen3-8B", 8, 4, zero, card("H100"), **given)
    monkeypatch.setattr(in_stages, "with_more_in_flight", lambda trace, more: None if more else trace)
    run = staged_step("Qwen/Qwen3-8B", 8, 4, zero, card("H100"), **given)
    assert few.at_peak["gradients"] > 0
    assert few.needed == run.needed and (few.sent, few.sent_to_next) == (run.sent, run.sent_to_next)
    for kind, nbytes in few.at_peak.items():  # a number of its loss, each
        assert abs(nbytes - run.at_peak[kind]) <= 13 * 512, kind


def test_the_second_stage_may_need_most():
    """Of many micro-batches more comes in there than the first holds more of."""
    given = {"weights": torch.float32, "half": torch.bfloat16, "batch_size": 1, "sequence_length": 4096}
    given |= {"checkpointing": True, "micro_batches": 64}
    model, where = "mistralai/Mistral-7B-v0.3", (16, 4, 3, card("H100"))
    first, second, last = (staged_step(model, *where, **given, only=stage) for stage in (0, 1, 3))
    fullest = staged_step(model, *where, **given)
    assert second.needed > max(first.needed, last.needed)
    assert (fullest.stage, fullest.needed) == (1, second.needed)
    assert second.sent_to_next == 2 * first.sent_to_next == 2 * last.sent_to_next
    assert fullest.sent + fullest.sent_to_next == max(one.sent + one.sent_to_next for one in (first, second, last))


@pytest.mark.slow
@pytest.mark.parametrize("gpus, stages, zero", [(2, 2, 3), (4, 2, 2)])
def test_stages_make_the_steps_of_one_process(gpus, stages, zero, tmp_path):
    """By real processes, of blocks that all differ, unclipped; and what they save is the whole model."""
    model = tmp_path / "model"
    sizes = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = llama(model, **sizes, intermediate_size=128, tie_word_embeddings=False)
    torch.manual_seed(0)
    build_model(config, torch.float32, device="cpu").save_pretrained(model)
    letters = random.Random(0)
    text, learned = "".join(letters.choice("abcdefghij") for _ in range(8 * 32)), {}
    recipe = Recipe("full", "fp32", "sgd", zero, pipeline_parallel=stages, checkpointing=zero == 2)
    one = replace(recipe, stage=0, pipeline_parallel=1)
    for name, ranks, way, times in (("one", 1, one, 8), ("stages", gpus, recipe, 8 // (gpus // stages))):
        request = make_request(str(model), "L4", ranks, length=32, batch=8, methods="full")
        plan = Plan(replace(request, pipeline_parallel=way.pipeline_parallel), way, 1, times, 0, {}, 0, 0, 0, None)
        learned[name] = rehearse(plan, "torch", tmp_path / name, text, 1, ranks, clip="1e9")
    before = load_file(model / "model.safetensors")
    assert learned["stages"].keys() == learned["one"].keys()
    moved = max((learned["one"][name] - before[name]).abs().max() for name in before)
    apart = max((learned["one"][name] - learned["stages"][name]).abs().max() for name in before)
    assert moved > 1e-2 and apart < 1e-4 * moved, (moved, apart)
    AutoModelForCausalLM.from_pretrained(tmp_path / "stages" / "out")


def test_the_planner_counts_stages_that_are_asked_for():
    given = {"length": 1024, "batch": 32, "methods": "full", "optimizer": "adamw_fused", "precision": "mixed_bf16"}
    plans = plan_training("Qwen/Qwen3-8B", "8 x H100", pipeline_parallel=4, **given)
    assert {plan.recipe.stage for plan in plans.plans} == {2, 3}
    for plan in plans.plans:
        assert plan.recipe.pipeline_parallel == 4 and plan.accumulation >= 4
        assert sum(held(plan.request, plan.recipe).values()) <= plan.tensors_bytes
        assert "파이프라인 병렬 4" in plan.title and "pipeline parallel 4" in plan.files()["train.py"]
        for kind in KINDS:
            if kind != "torch":
                with pytest.raises(NotSupported, match="pipelining"):
                    plan.files(kind)
    whole = plan_training("Qwen/Qwen3-8B", "8 x H100", **given)
    assert any("pipeline_parallel" in why for _, why in whole.skipped)
    assert {plan.recipe.pipeline_parallel for plan in whole.plans} == {1}
    least = min(plan.sent_bytes for plan in whole.plans)
    assert min(plan.sent_bytes for plan in plans.plans) < least / 2  # what is sent is what they are for


@pytest.mark.parametrize("model, wrong, said", [
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 5}, "8"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 8}, "36"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 4, "batch": 6}, "8"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 4, "tensor_parallel": 2}, "함께"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 4, "methods": "lora"}, "LoRA"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 4, "optimizer": "adamw_8bit"}, "adamw_fused"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 0}, "스테이지"),
    ("Qwen/Qwen3-0.6B", {"pipeline_parallel": 4}, "한 텐서"),
    ("google/gemma-3-1b-pt", {"pipeline_parallel": 2}, "gemma3_text"),
    ("gpt2", {"pipeline_parallel": 2}, "gpt2"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 4, "device_map": True}, "함께"),
    ("Qwen/Qwen3-8B", {"pipeline_parallel": 4, "gpus": 24}, "두 컴퓨터"),
])  # fmt: skip
def test_stages_that_cannot_be_are_refused(model, wrong, said):
    with pytest.raises(WrongValue, match=said):
        make_request(model, "H100", **{"gpus": 8, "batch": 96, "length": 256, "methods": "full"} | wrong)


def test_layers_that_differ_are_not_cut(tmp_path):
    """A later stage's first layers would get the masks of the model's first."""
    for more, said in (
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "layer_types"),
        ({}, ""),
    ):
        config = shrunk("qwen3", num_hidden_layers=4, tie_word_embeddings=False, **more)
        assert said in why_no_stages(config, 2) and bool(said) == bool(why_no_stages(config, 2))
    config = shrunk("gpt_neox", num_hidden_layers=4, tie_word_embeddings=False, hidden_dropout=0.1)
    assert "hidden_dropout" in why_no_stages(config, 2)


def test_the_terminal_writes_a_script_of_stages(small, tmp_path, capsys):
    given = ["--model", str(small), "--gpu", "2 x L4", "--length", "32", "--batch", "4", "--methods", "full"]
    given += ["--optimizer", "adamw_fused", "--precision", "bf16", "--pipeline-parallel", "2"]
    assert main([*given, "--save", str(tmp_path / "plan"), "--language", "en"]) == 0
    assert "pipeline parallel 2" in capsys.readouterr().out
    script = (tmp_path / "plan" / "train.py").read_text(encoding="utf-8")
    assert "Schedule1F1B" in script and "torchrun --nproc_per_node 2" in script
    assert main([*given[:-1], "3", "--language", "en"]) == 2
    assert "pipeline_parallel=3" in capsys.readouterr().err
