"""DPO: the loss is its libraries', its bytes a real card's and those of TRL's own trainer, and the planner's files."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from forked import free_port, run_forked
from safetensors.torch import load_file
from test_plan_files import ACCELERATE, CUBLAS, WIDTH, WORDS, llama, one_rank
from test_plan_files import small as small  # a fixture
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3Config

from helpers.models import byte_tokenizer
from virtual_gpu.allocator import round_size
from virtual_gpu.cards import CATALOG
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models import fused_head as fused_head_module
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config, model_name
from virtual_gpu.models.depth import forget_shallow_runs, with_depth
from virtual_gpu.models.fused_head import fused_head
from virtual_gpu.plan import Plan, Recipe, plan_training
from virtual_gpu.plan.candidates import recipes_of
from virtual_gpu.plan.command import main
from virtual_gpu.plan.files import KINDS
from virtual_gpu.plan.host import host_need
from virtual_gpu.plan.measure import held, measure, setting_of
from virtual_gpu.plan.recipes import METHODS, cpu_offload_label
from virtual_gpu.plan.request import make_request
from virtual_gpu.program.runner import run
from virtual_gpu.shards import rank_step as rank_step_module
from virtual_gpu.shards.adapters import Adapters
from virtual_gpu.shards.fake_rank import run_rank
from virtual_gpu.shards.layout import CONVENTIONS, Layout
from virtual_gpu.shards.ledger import ConfigKey, closed_form, elements_sent
from virtual_gpu.shards.rank_step import rank_step
from virtual_gpu.shards.second_model import Pairs
from virtual_gpu.step.flops import training_flops
from virtual_gpu.step.pairs import BETA, preference_loss, side_by_side
from virtual_gpu.step.predict import predict_memory
from virtual_gpu.step.setting import Setting
from virtual_gpu.step.states import states_of
from virtual_gpu.trace.edits import resized

BESIDE = Path(__file__).parent.parent / "benchmarks" / "claims" / "beside.json"
TINY = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=128,
)  # fmt: skip
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def by_name(model, **inputs):
    return model(**inputs)


# -- the loss ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(request, tmp_path):
    """TRL's DPOTrainer on the CPU, of all weights or of adapters that are not zero, and a batch of two pairs."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(0)
    LlamaForCausalLM(TINY).save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    pairs = [
        {"prompt": "하나", "chosen": " 둘 셋", "rejected": " 다섯"},
        {"prompt": "a b", "chosen": " c", "rejected": " d e f"},
    ]
    adapters = LoraConfig(**LORA, init_lora_weights=False) if request.param == "lora" else None
    arguments = DPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2)
    made = DPOTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=byte_tokenizer(),
        peft_config=adapters,
    )  # fmt: skip
    if adapters is None:  # a policy that has learned something
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return made, next(iter(made.get_train_dataloader()))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["full", "lora"], indirect=True)
@pytest.mark.parametrize(
    "how",
    [{"fused_lm_head": True}, {"fused_lm_head": False}, {"fused_lm_head": False, "by_row": True}],
    ids=["tiles", "whole", "rows"],
)
def test_the_loss_is_the_trainer_s(trainer, how):
    """Its value and its gradients, of sequences of different lengths whose prompts do not count."""
    made, batch = trainer
    theirs = made.compute_loss(made.model, dict(batch))
    theirs.backward()
    gradients = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
    made.model.zero_grad()
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {"input_ids": batch["input_ids"], "labels": labels}
    ours = preference_loss(by_name, made.model, inputs, reference=made.ref_model, **how)
    ours.backward()
    assert abs(float(theirs) - torch.log(torch.tensor(2.0))) > 1e-3  # the reference is not the policy
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(made.model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-5)


def test_a_reference_under_reentrant_checkpointing_warns_of_nothing(small, recwarn):
    """PyTorch does, of every block: nothing asks for a gradient there."""
    predict_memory(
        Setting(
            2, gradient_checkpointing=True, use_reentrant=True, model_id=str(small), sequence_length=32, peft="lora",
            objective="dpo", precision="autocast_bf16",
        ),
        gpu="L4",
    )  # fmt: skip
    assert not [one for one in recwarn if "requires_grad" in str(one.message)]


def test_what_is_known_of_the_reference_is_not_computed_again():
    torch.manual_seed(0)
    model, before = LlamaForCausalLM(TINY), LlamaForCausalLM(TINY)
    ids = torch.randint(300, (3, 2, 16))
    inputs = side_by_side({"input_ids": ids, "labels": ids})
    assert torch.equal(inputs["input_ids"][:3], ids[:, 0]) and torch.equal(inputs["input_ids"][3:], ids[:, 1])
    logits = before(inputs["input_ids"]).logits[:, :-1].log_softmax(-1)
    known = logits.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0].sum(-1).detach()
    how = {"fused_lm_head": False}
    told = preference_loss(by_name, model, inputs, known=known, **how)
    torch.testing.assert_close(told, preference_loss(by_name, model, inputs, reference=before, **how))
    same = preference_loss(by_name, model, inputs, reference=model, **how)
    torch.testing.assert_close(same, torch.log(torch.tensor(2.0)))
    assert BETA == 0.1
    with fused_head(model, virtual=False), fused_head(before, virtual=False):
        tiles = preference_loss(by_name, model, inputs, reference=before)
    torch.testing.assert_close(tiles, told, rtol=1e-4, atol=1e-5)


# -- its bytes --------------------------------------------------------------------------------------------------------

ON_H100 = {
    "DPO 4": {},
    "DPO 4, precomputed": {"reference": "precomputed"},
    "DPO 4, lora": {"peft": "lora", "lora_rank": 16, "lora_targets": "all-linear"},
}


@pytest.mark.parametrize("row", ON_H100)
def test_a_step_takes_what_trl_s_took_on_an_h100(row):
    """Llama-3.2-1B, four pairs of 512 tokens, DPOTrainer (benchmarks/claims); ids, masks and metrics are more."""
    [measured] = [one for one in json.loads(BESIDE.read_text(encoding="utf-8")) if one["row"] == row]
    setting = Setting(
        4, model_id="meta-llama/Llama-3.2-1B", sequence_length=512, gradient_checkpointing=True, fused_lm_head=True,
        objective="dpo", optimizer="adamw_fused", precision="mixed_fp16", **ON_H100[row],
    )  # fmt: skip
    for full in (False, True):
        report = predict_memory(setting, gpu="H100", full=full)
        assert 0 < measured["peak"][0] - report.peak_bytes < 2**17
        assert abs(report.reserved_bytes / measured["reserved"][0] - 1) < 0.01


# Qwen3's architecture, 8 layers 1,024 wide and 151,936 words, in bf16 with checkpointing: what DPOTrainer of TRL 1.8
# took under `virtual-gpu run --gpu A100-80GB` (two steps; answers of half the length, of two lengths).
BY_ROW = {
    ("lora", "autocast_bf16", 256, 2): (3046726144, 3166699520),
    ("lora", "autocast_bf16", 1024, 1): (4936705536, 6689914880),
    (None, "autocast_bf16", 256, 2): (5638925312, 6488588288),
    (None, "autocast_bf16", 1024, 1): (7532407808, 9974054912),
    (None, "bf16", 256, 2): (4897899520, 5230297088),  # logits that stay in 16 bits
}


@pytest.mark.parametrize("peft, precision, length, pairs", BY_ROW)
def test_an_older_trl_takes_what_its_trainer_took(peft, precision, length, pairs, tmp_path):
    Qwen3Config(
        vocab_size=151936, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, tie_word_embeddings=False, dtype="bfloat16",
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    adapters = {"peft": peft, "lora_rank": 16, "lora_targets": "all-linear"} if peft else {}
    setting = Setting(
        pairs, gradient_checkpointing=True, model_id=str(tmp_path / "model"), sequence_length=length, padded=True,
        precision=precision, optimizer="adamw_fused", objective="dpo", logits_by_row=True, **adapters,
    )  # fmt: skip
    report, (allocated, reserved) = predict_memory(setting, gpu="A100-80GB"), BY_ROW[peft, precision, length, pairs]
    assert abs(report.peak_bytes / allocated - 1) < 0.001
    assert abs(report.reserved_bytes / reserved - 1) < 0.01
    assert predict_memory(replace(setting, logits_by_row=False), gpu="A100-80GB").peak_bytes > 1.15 * allocated
    assert "로짓을 시퀀스별로" in setting.title


RECIPES = [
    Recipe("full", "mixed_fp16", "adamw_fused", checkpointing=True),
    Recipe("full", "mixed_bf16", "adamw_fused"),  # autocast's copies of both models' weights
    Recipe("full", "mixed_bf16", "adamw_8bit", reference="precomputed"),
    Recipe("full", "bf16", "adamw_fused"),
    Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True),
    Recipe("lora", "mixed_fp16", "adamw_fused", checkpointing=True, offload=True),
    Recipe("qlora", "mixed_fp16", "adamw_fused", rest_in_fp32=False),
]


def planned(model, recipe, gpu="L4", length=128, way=(4, 2)):
    """That recipe as a plan of pairs, measured; DPOTrainer's head is always fused."""
    request = make_request(str(model), gpu, length=length, batch=way[0] * way[1], objective="dpo")
    return measure(request, replace(recipe, fused_lm_head=True), *way)


def words(folder, pairs=24, *more):
    """The script's arguments, and its data beside it: the second answer ends two tokens before the length."""
    row = {"prompt": "a", "chosen": "b" * 200, "rejected": "c" * 124}
    (folder / "pairs.jsonl").write_text("\n".join([json.dumps(row)] * pairs), encoding="utf-8")
    return ["--pairs", str(folder / "pairs.jsonl"), "--output", str(folder / "out"), *more]


def on_the_virtual_card(plan, folder):
    """What DPOTrainer's script holds at its peak."""
    plan.save(folder / "plan", force=True)
    report = run(str(folder / "plan" / "train.py"), words(folder), gpu=plan.request.gpu)
    assert report.status == "fits" and report.steps == 3, report.text()
    return report.allocated


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_the_files_hold_what_the_plan_counted(recipe, tmp_path):
    """A prompt of one token: the planner counts all of a sequence as the answer. With padding, as the plan has it."""
    llama(tmp_path / "model")
    plan = planned(tmp_path / "model", recipe, "T4" if "fp16" in recipe.precision else "L4")
    # On a card TRL's head copies the hidden states that have a loss, and puts their gradients back; of four answers the
    # last two tokens have none, here all do (16 bytes a logit).
    answers = 2 * 4 * 127
    less = 4 * 2 * WORDS * 16
    assert (
        -(2**17) - answers * WIDTH * 4
        < plan.tensors_bytes - on_the_virtual_card(plan, tmp_path)
        < 2**17 + less + (answers * WIDTH * 4)
    )


def test_padding_is_a_mask_of_every_layer(tmp_path):
    """Where nothing is computed again each layer keeps its own, in the type that it computes in."""
    llama(tmp_path / "model", max_position_embeddings=512)
    common = {"model_id": str(tmp_path / "model"), "sequence_length": 512, "precision": "bf16", "objective": "dpo"}
    common |= {"peft": "lora"}
    peaks = [
        predict_memory(Setting(4, **common, padded=padded, fused_lm_head=True), gpu="L4").peak_bytes
        for padded in (False, True)
    ]
    mask = 8 * 512 * 512 * 2
    assert 3.9 * mask < peaks[1] - peaks[0] < 6 * mask  # another kernel's statistics are a little less


def test_the_routers_loss_counts_where_trl_adds_it(tmp_path):
    """Of a mixture of experts, by the coefficient of its configuration: of the policy, and not of the reference."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 8}
    losses = []
    for coefficient in (0.0, 0.5):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(**sizes, router_aux_loss_coef=coefficient))
        ids = torch.randint(512, (2, 16))
        with fused_head(model, virtual=False):
            losses.append(preference_loss(by_name, model, {"input_ids": ids, "labels": ids}, reference=model))
            outputs = model(ids, output_router_logits=True)
    torch.testing.assert_close(losses[1] - losses[0], 0.5 * outputs.aux_loss)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [
    Recipe("full", "fp32", "adamw_fused"),
    Recipe("full", "fp32", "adamw_fused", reference="precomputed"),
    Recipe("lora", "mixed_bf16", "adamw_fused", checkpointing=True),
], ids=["full", "precomputed", "lora"])  # fmt: skip
def test_the_files_learn_on_a_cpu(recipe, small, tmp_path):
    """Rehearsed: the adapters or the weights that are saved moved."""
    planned(small, recipe, length=32, way=(2, 2)).save(tmp_path / "plan")
    given = words(tmp_path, 8, "--cpu", "--max-steps", "2")
    status, _, err = run_forked([str(tmp_path / "plan" / "train.py"), *given], folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    [saved] = (tmp_path / "out").glob("*model.safetensors")
    learned = load_file(saved)
    if recipe.method == "lora":
        assert any(value.abs().max() > 0 for name, value in learned.items() if "lora_B" in name)
        return
    before = load_file(small / "model.safetensors")
    assert max(float((learned[name] - value).abs().max()) for name, value in before.items()) > 0


# -- over several GPUs ------------------------------------------------------------------------------------------------

SPLIT = [
    (Recipe("full", "mixed_bf16", "adamw_fused", 3), 2, (2, 2)),
    (Recipe("full", "mixed_bf16", "adamw_fused", 2), 2, (2, 2)),
    (Recipe("full", "mixed_bf16", "adamw_fused", 2, True), 8, (2, 1)),
    (Recipe("full", "mixed_bf16", "adamw_fused", 3, True, reference="precomputed"), 2, (2, 2)),
    (Recipe("full", "mixed_bf16", "adamw_fused", 3, True, reference="precomputed"), 8, (2, 1)),  # the reference alone
    (Recipe("lora", "mixed_fp16", "adamw_fused", 3, True), 4, (4, 1)),
    (Recipe("qlora", "mixed_bf16", "adamw_fused", 3, rest_in_fp32=False), 2, (2, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe, gpus, way", SPLIT, ids=lambda value: getattr(value, "title", str(value)))
def test_a_rank_of_the_files_holds_what_the_plan_counted(recipe, gpus, way, tmp_path):
    """DPOTrainer under `accelerate launch` as the script says; head and embedding are more than half of the model."""
    llama(tmp_path / "model", vocab_size=32_768, hidden_size=1024, intermediate_size=2816, max_position_embeddings=256)
    gpu, batch = "T4" if "fp16" in recipe.precision else "L4", way[0] * way[1] * gpus
    request = make_request(str(tmp_path / "model"), gpu, gpus, length=256, batch=batch, objective="dpo")
    plan = measure(request, replace(recipe, fused_lm_head=True), *way)
    plan.save(tmp_path / "plan")
    row = {"prompt": "a", "chosen": "b" * 400, "rejected": "c" * 252}
    (tmp_path / "pairs.jsonl").write_text("\n".join([json.dumps(row)] * 3 * batch), encoding="utf-8")
    words = ["--pairs", str(tmp_path / "pairs.jsonl"), "--output", str(tmp_path / "out")]
    report = one_rank(plan, [*ACCELERATE, "train.py", *words], tmp_path)
    phases = {phase: allocated for phase, (allocated, _) in report["phases"].items()}
    most = max(nbytes for phase, nbytes in phases.items() if phase != "loading")
    # The plan is of a first step: backward's thread has its workspace in later ones, also while the reference is run.
    assert -CUBLAS - 0.015 * most < plan.tensors_bytes - most < 0.01 * most
    if recipe.method == "full":  # the second model comes to the card whole, and is cut there
        whole = 4 * sum(p.numel() for p in build_model(load_config(request.model), torch.float16).parameters())
        assert whole < phases["loading"] < 1.01 * whole * (1 + 1 / gpus) + 2**26
        assert phases["loading"] < plan.tensors_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, stage, tied, more",
    [
        ("full", 3, False, {"checkpointing": True}),
        ("full", 2, True, {}),
        ("full", 3, True, {"reference": "precomputed"}),
        ("lora", 3, False, {}),
        ("qlora", 3, True, {"checkpointing": True}),
    ],
)
def test_two_ranks_learn_what_one_does(method, stage, tied, more, tmp_path):
    """By real processes under accelerate's own FSDP2: of pairs that are all alike half a batch has its gradient."""
    sizes = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = llama(tmp_path / "model", **sizes, intermediate_size=128, tie_word_embeddings=tied)
    torch.manual_seed(0)
    build_model(config, torch.float32, device="cpu").save_pretrained(tmp_path / "model")
    losses = {}
    for ranks in (1, 2):
        precision = "fp32" if method == "full" else "mixed_bf16"
        recipe = Recipe(method, precision, "adamw_fused", stage if ranks == 2 else 0, rest_in_fp32=False, **more)
        recipe = replace(recipe, fused_lm_head=True)
        request = make_request(str(tmp_path / "model"), "L4", ranks, length=32, batch=4, objective="dpo")
        folder = tmp_path / f"{ranks}"
        Plan(request, recipe, 1, 4 // ranks, 0, {}, 0, 0, 0, None).save(folder)
        script = (folder / "train.py").read_text(encoding="utf-8")
        for old, new in (("logging_steps=10", "logging_steps=1"), ("LEARNING_RATE = ", "LEARNING_RATE = 1e-3  # ")):
            assert old in script
            script = script.replace(old, new)
        script = script.replace("torch.bfloat16  # of", "torch.float32  # of")
        (folder / "train.py").write_text(script + "print(json.dumps(trainer.state.log_history))\n", encoding="utf-8")
        (folder / "train.py").write_text("import json\n" + (folder / "train.py").read_text(encoding="utf-8"))
        row = {"prompt": "a", "chosen": "b" * 20, "rejected": "c" * 12}
        (folder / "pairs.jsonl").write_text("\n".join([json.dumps(row)] * 12), encoding="utf-8")
        words = ["--pairs", "pairs.jsonl", "--output", "out", "--cpu", "--max-steps", "3"]
        program = [str(folder / "train.py"), *words]
        environment = dict(os.environ)
        if ranks == 2:
            program, environment = launched(folder, program)
        port = free_port() if ranks == 2 else "0"
        status, out, err = run_forked(program, ranks, environment, port, folder=folder)
        assert status == 0, err[-2000:]
        history = json.loads(next(line for line in out.splitlines()[::-1] if line.startswith("[")))
        losses[ranks] = [(step["loss"], step["grad_norm"]) for step in history if "loss" in step]
    assert losses[1][0][0] == pytest.approx(math.log(2), rel=1e-6)  # the reference is the model that it was
    assert losses[1][-1][0] < losses[1][0][0] - 1e-3
    within = 5e-3 if method == "qlora" else 1e-5  # alone its adapters are TRL's, in bf16
    for one, two in zip(losses[1], losses[2], strict=True):
        assert two == pytest.approx(one, rel=within)


def launched(folder, program):
    """The program and its environment, as `accelerate launch` starts it by the folder's file, on a CPU in fp32."""
    chosen = ["--config_file", str(folder / "accelerate.yaml"), "--mixed_precision", "no", "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(chosen))
    return [str(Path(__file__).with_name("fsdp2_on_cpu.py")), *program], os.environ | prepare_multi_gpu_env(arguments)


def tiny(tied=False):
    """Shapes that no number of ranks divides."""
    return LlamaConfig(
        vocab_size=301, hidden_size=48, intermediate_size=100, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("reference", ["same", "precomputed"])
def test_a_rank_holds_and_sends_what_shapes_say(stage, precision, reference, tied):
    """Of the second model too: fp32 like the first, cut alike, gathered whole and in bf16."""
    config, pairs = tiny(tied), Pairs(reference)
    model, layout = model_name(config), Layout(5, stage, as_accelerate=True)
    ran = run_rank(config, layout, CONVENTIONS[precision], pairs=pairs)
    memory = closed_form(model, layout, precision, second=pairs.on_the_card, fp32_shards=True)
    gathered = ran.held.pop("gathered")
    assert ran.held == {kind: getattr(memory, kind) for kind in ran.held}
    assert gathered == memory.gathered if stage == 2 else not memory.gathered
    assert ran.sent == elements_sent(model, layout, second=pairs.on_the_card)
    assert memory.parameters == closed_form(model, layout, "fp32").parameters * (1 + pairs.on_the_card)


def test_a_second_model_is_gathered_at_once_and_goes_or_stays():
    """In one piece and as its parameters, beside the shards; at stage 2 from the first micro-batch on."""
    config = tiny()
    whole = 2 * sum(p.numel() for p in build_model(config, torch.float16).parameters())
    live = {}
    for stage in (2, 3):
        for moment in ("step", "first", "alone"):
            pairs = Pairs("precomputed" if moment == "alone" else "same", moment=moment)
            ran = run_rank(config, Layout(4, stage, as_accelerate=True), CONVENTIONS["mixed"], pairs=pairs)
            curves = ran.trace.timeline().phases
            live[stage, moment] = [int(curve.live[0].sum()) for curve in curves]
            assert whole < ran.whole["received"] < 1.1 * whole and ran.whole["cast"] == ran.whole["received"] // 4
            top = max(int(curve.live.sum(axis=1).max()) for curve in curves)
            if moment != "step" or stage == 3:
                assert top > live[stage, moment][0] + 2 * whole
    assert live[2, "step"][0] > live[2, "first"][0] + 0.9 * whole
    assert live[3, "step"] == live[3, "first"]


def test_pieces_of_a_second_model_are_told_from_blocks_of_their_size():
    """An MLP's results of so many tokens are as large as what is cast of the shard, in the allocator's steps."""
    layout = Layout(4, 3, as_accelerate=True)
    ran = run_rank(tiny(), layout, CONVENTIONS["mixed"], batch_size=2, sequence_length=63, pairs=Pairs())
    sizes = {kind: ran.trace.nbytes[entries].tolist() for kind, entries in ran.whole_at.items()}
    assert sizes == {kind: [round_size(nbytes)] for kind, nbytes in ran.whole.items()}
    alike = ran.trace.nbytes == round_size(ran.whole["cast"])
    assert (alike & ran.trace.allocates).sum() > 10
    changed = resized(ran.trace, ran.whole_at["cast"], 1)
    assert (changed.nbytes == 1).sum() == 2 and ((changed.nbytes == 1) <= alike).all()  # it comes, and goes


@pytest.mark.parametrize("stage, pairs", [
    (3, Pairs()), (2, Pairs()), (2, Pairs(moment="first")), (3, Pairs("precomputed", moment="alone")),
], ids=lambda value: getattr(value, "moment", value))  # fmt: skip
def test_a_deep_second_model_is_continued_as_a_full_run_has_it(stage, pairs):
    """Its pieces grow with the depth; and what one micro-batch has shown holds for another."""
    config, layout = with_depth(load_config("meta-llama/Llama-3.2-1B"), 9), Layout(4, stage, as_accelerate=True)
    forget_shallow_runs()
    for samples in (1, 2):
        full = run_rank(
            config, layout, CONVENTIONS["mixed"], batch_size=samples, sequence_length=64, checkpointing=True,
            pairs=pairs,
        )  # fmt: skip
        trace, *_ = rank_step_module._trace.__wrapped__(
            ConfigKey.of(config), layout, "mixed", samples, 64, True, CATALOG["H100"], None, False, True, False, pairs
        )
        for column in ("nbytes", "born", "category", "stream"):
            assert np.array_equal(getattr(trace, column), getattr(full.trace, column)), column


def test_the_fullest_moment_of_a_split_training_counts():
    """On many GPUs the shards are little, and a reference that is gathered before the training is the most."""
    settings = {"sequence_length": 64, "gradient_checkpointing": True, "objective": "dpo", "exact": False}
    model = "meta-llama/Llama-3.2-1B"
    few, many = (rank_step(model, ranks, **settings, reference="precomputed") for ranks in (2, 64))
    assert few.phase == "backward" and many.phase == "reference"
    assert many.at_peak["optimizer"] == many.at_peak["gradients"] == 0
    elements = sum(p.numel() for p in build_model(load_config(model), torch.float16).parameters())
    assert many.total > 4 * elements
    same = rank_step(model, 64, **settings)
    assert same.total > many.total and "DPO" in same.title
    more = same.parameters_and_gradients_sent - many.parameters_and_gradients_sent
    assert more == pytest.approx(2 * elements, rel=0.01)
    stays, first = (rank_step(model, 2, 2, **settings, reference=name) for name in ("same", "precomputed"))
    assert stays.phase == first.phase == "backward"
    assert stays.at_peak["gathered"] - first.at_peak["gathered"] == pytest.approx(2 * elements, rel=0.01)
    assert stays.at_peak["parameters"] == pytest.approx(2 * first.at_peak["parameters"], rel=1e-3)
    assert stays.parameters_and_gradients_sent == first.parameters_and_gradients_sent  # once in a training


def test_adapters_are_switched_off_in_the_split_model():
    """No second model, and the base model gathered once more in every micro-batch."""
    config, layout, adapters = tiny(), Layout(4, 3, as_accelerate=True), Adapters("lora", 4)
    sent = [
        run_rank(config, layout, CONVENTIONS["mixed"], adapters=adapters, fused_lm_head=True, pairs=pairs).sent_bytes
        for pairs in (None, Pairs(second=False))
    ]
    assert sent[1]["reduce_scatter_base"] == sent[0]["reduce_scatter_base"]
    assert sent[1]["allgather_base"] == pytest.approx(1.5 * sent[0]["allgather_base"], rel=0.1)
    head = sent[0]["all_gather_into_tensor"]
    assert head > 0 and sent[1]["all_gather_into_tensor"] == 2 * head
    with pytest.raises(WrongValue, match="ppo"):
        rank_step("gpt2", 2, objective="ppo")
    with pytest.raises(WrongValue, match="half"):
        rank_step("gpt2", 2, objective="dpo", reference="half")
    for how in ({"stage": 0}, {"stage": 3, "tensor_parallel": 2}):
        with pytest.raises(WrongValue, match=r"dpo|as_accelerate"):
            rank_step("Qwen/Qwen3-0.6B", 4, objective="dpo", **how)


def test_the_planner_splits_pairs():
    plans = plan_training(
        "meta-llama/Llama-3.2-1B", "2 x RTX 3090", length=256, batch=4, methods=("full", "lora"), objective="dpo",
        optimizer="adamw_fused",
    )  # fmt: skip
    ways = {(plan.recipe.method, plan.recipe.stage, plan.recipe.reference) for plan in plans.plans}
    assert {("full", 2, "same"), ("full", 3, "same"), ("lora", 3, "same")} <= ways
    whole = [plan for plan in (*plans.plans, *plans.losers) if plan.recipe.method == "full" and not plan.recipe.stage]
    assert whole and not any(plan.fits for plan in whole if plan.recipe.reference == "same")
    said = dict(plans.skipped)
    assert not any("아직 세지 않는다" in why for why in said.values())
    for stage in (2, 3):
        assert any(f"ZeRO-{stage}" in what and "기준" in why for what, why in plans.skipped)
    best = next(plan for plan in plans.plans if plan.recipe.stage == 3 and plan.recipe.method == "full")
    states = held(best.request, best.recipe)
    first = held(best.request, replace(best.recipe, reference="precomputed"))
    assert states["parameters"] == 2 * first["parameters"] and states["optimizer"] == first["optimizer"]
    assert best.at_peak["parameters"] >= states["parameters"]
    for plan in plans.plans:
        assert sum(held(plan.request, plan.recipe).values()) <= plan.tensors_bytes
    files = best.files()
    assert "fsdp_cpu_ram_efficient_loading: false" in files["accelerate.yaml"]  # who reads the second for the others?
    assert "device_map" not in files["train.py"] and "PartialState" not in files["train.py"]
    lora = next(plan for plan in plans.plans if plan.recipe.stage and plan.recipe.method == "lora")
    assert "fsdp_cpu_ram_efficient_loading: true" in lora.files()["accelerate.yaml"]
    one = measure(replace(best.request, objective="sft"), best.recipe, best.micro_batch, best.accumulation)
    assert host_need(best).loading.low == 4 * host_need(one).loading.low  # two models, by each of two ranks
    with pytest.raises(NotSupported, match="ZeRO-3"):
        one.files("trl")


# -- settings and numbers ---------------------------------------------------------------------------------------------


def test_what_a_setting_says_of_pairs():
    dpo = Setting(2, model_id="gpt2", sequence_length=64, objective="dpo", peft="lora", reference="half")
    assert (dpo.rows, dpo.pairs, dpo.lora_dropout, dpo.reference) == (4, True, 0.0, "same")
    assert Setting(2, reference="half", precision="mixed_fp16", objective="dpo").reference == "half"
    assert Setting(2, reference="half", precision="fp16", objective="dpo").reference == "same"
    rows = [Setting(2, logits_by_row=True, **how).logits_by_row for how in ({}, {"objective": "dpo"})]
    assert rows == [False, True]
    sft = Setting(2, model_id="gpt2", reference="precomputed")
    assert (sft.rows, sft.reference) == (2, "same") and not {"objective", "reference"} & {*sft.to_dict()}
    assert {"objective": "dpo", "reference": "same"}.items() <= dpo.to_dict().items() and "DPO" in dpo.title
    for wrong, said in (
        ({"objective": "ppo"}, "ppo"),
        ({"reference": "elsewhere"}, "elsewhere"),
        ({"objective": "dpo", "holds_outputs": True}, "holds_outputs"),
    ):
        with pytest.raises(WrongValue, match=said):
            Setting(2, **wrong)
    with pytest.raises(WrongValue):
        Setting(2**10, sequence_length=2**15, objective="dpo", model_id="Qwen/Qwen3-0.6B")


def test_dropout_is_off_in_both_models():
    """GPT-2's own, of a tenth: its masks and results are not there, with a reference and without."""
    for reference in ("same", "precomputed"):
        common = {"sequence_length": 64, "objective": "dpo", "reference": reference, "precision": "fp32"}
        peaks = []
        for rates in ({}, dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)):
            setting = Setting(2, model_id=GPT2Config(n_layer=2, **rates), **common)
            peaks.append(predict_memory(setting, gpu="L4", full=True).peak_bytes)
        assert peaks[0] == peaks[1]


def test_pairs_without_a_reference_are_refused(small):
    model = LlamaForCausalLM(TINY)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(WrongValue, match="LlamaForCausalLM"):
        preference_loss(by_name, model, {"input_ids": ids, "labels": ids}, fused_lm_head=False)
    with pytest.raises(NotSupported, match="objective='dpo'"):
        predict_memory(Setting(1, model_id=t5(small.parent), sequence_length=16, objective="dpo"), gpu="T4")


@pytest.mark.parametrize(
    "trl, more, by_row",
    [
        ("1.16.0", {"use_weighting": True}, False),
        ("1.8.0", {}, True),
        ("1.13.0", {}, True),
        ("1.8.0", {"use_weighting": True}, None),
        ("1.8.0", {"loss_type": ["sigmoid", "sft"]}, None),
        ("1.5.0", {}, None),
        ("1.14.0", {}, None),
    ],
)
def test_a_dpo_config_of_an_older_trl_is_counted_in_its_order_or_refused(trl, more, by_row, tmp_path, monkeypatch):
    from trl import DPOConfig

    version = fused_head_module.metadata.version
    monkeypatch.setattr(fused_head_module.metadata, "version", lambda name: trl if name == "trl" else version(name))
    arguments = DPOConfig(str(tmp_path), bf16=False, report_to="none", **more)
    if by_row is None:
        with pytest.raises(NotSupported, match=r"1\.13"):
            Setting.from_training_arguments(arguments, model="gpt2", sequence_length=32)
    else:
        setting = Setting.from_training_arguments(arguments, model="gpt2", sequence_length=32)
        assert (setting.logits_by_row, setting.fused_lm_head) == (by_row, not by_row)


def test_a_dpo_config_is_read_from_the_object(tmp_path):
    from trl import DPOConfig

    arguments = DPOConfig(str(tmp_path), use_cpu=True, bf16=False, precompute_ref_log_probs=True)
    setting = Setting.from_training_arguments(arguments, model="gpt2", sequence_length=64)
    assert (setting.objective, setting.reference, setting.fused_lm_head) == ("dpo", "precomputed", True)
    assert setting.padded  # two answers are seldom of one length
    with pytest.raises(NotSupported, match="disable_dropout"):
        arguments.disable_dropout = False
        Setting.from_training_arguments(arguments, model="gpt2", sequence_length=64)


def test_states_and_work_of_two_models():
    settings = {"model_id": "meta-llama/Llama-3.2-1B", "sequence_length": 64, "precision": "mixed_bf16"}
    sft = states_of(Setting(1, **settings))
    for reference, more in {"same": sft["parameters"], "half": sft["parameters"] // 2, "precomputed": 0}.items():
        dpo = states_of(Setting(1, **settings, objective="dpo", reference=reference))
        assert dpo == sft | {"parameters": sft["parameters"] + more}
    once = training_flops(Setting(1, **settings, fused_lm_head=True))
    twice = training_flops(Setting(1, **settings, fused_lm_head=True, objective="dpo"))
    assert twice.forward == 4 * once.forward and twice.backward == 2 * once.backward
    known = training_flops(Setting(1, **settings, fused_lm_head=True, objective="dpo", reference="precomputed"))
    assert known.forward == 2 * once.forward and known.backward == twice.backward
    lora = {**settings, "precision": "autocast_bf16", "peft": "lora", "fused_lm_head": True}
    once, twice = training_flops(Setting(1, **lora)), training_flops(Setting(1, **lora, objective="dpo"))
    assert 3.9 * once.forward < twice.forward < 4 * once.forward  # the reference has no adapters


# -- the planner ------------------------------------------------------------------------------------------------------


def test_the_planner_searches_pairs():
    plans = plan_training("meta-llama/Llama-3.2-1B", "RTX 3090", length=512, batch=8, objective="dpo")
    assert plans.best and "DPO" in plans.verdict
    for plan in plans.plans:
        assert plan.recipe.fused_lm_head and not plan.recipe.stage
        assert plan.to_dict()["fused_lm_head"]
        assert setting_of(plan.request, plan.recipe, 1, 1).padded
    assert {plan.recipe.method for plan in (*plans.plans, *plans.losers)} == {*METHODS}
    sft = plan_training("meta-llama/Llama-3.2-1B", "RTX 3090", length=512, batch=8, methods="lora")
    dpo = plan_training("meta-llama/Llama-3.2-1B", "RTX 3090", length=512, batch=8, methods="lora", objective="dpo")
    assert dpo.best.flops > 2.6 * sft.best.flops  # two sequences, and a reference's forward for each
    assert dpo.to_dict()["request"]["objective"] == "dpo"


def test_a_reference_leaves_the_card_only_where_it_has_to():
    large = plan_training("Qwen/Qwen3-0.6B", "A100-80GB", length=256, batch=4, methods="full", objective="dpo")
    assert {plan.recipe.reference for plan in large.plans} == {"same"}
    assert any("mixed_bf16" in what and "기준" in why for what, why in large.skipped)
    assert any("bf16" in what and "1e-6" in why for what, why in large.skipped)
    tight = plan_training(
        "meta-llama/Llama-3.2-1B", "RTX 3090", length=512, batch=4, methods="full", precision="mixed_bf16",
        optimizer="adamw_fused", objective="dpo",
    )  # fmt: skip
    assert {plan.recipe.reference for plan in tight.plans} == {"precomputed"}
    beside = measure(tight.request, replace(tight.best.recipe, reference="same"), 1, 4)
    first = measure(tight.request, tight.best.recipe, 1, 4)
    assert not beside.fits and beside.seconds > first.seconds  # whose forward was before the training
    assert abs(beside.extra_flops / first.extra_flops - 1) < 1e-3  # the fused head leaves the last token out


def test_what_is_not_tried_of_pairs_is_said():
    request = make_request(
        "Qwen/Qwen3-0.6B", "2 x RTX 3090", batch=4, selective=True, cpu_offload=True, objective="dpo"
    )
    assert not any(recipe.cpu_offload for recipe in recipes_of(request))
    plans = plan_training(
        "Qwen/Qwen3-0.6B", "2 x RTX 3090", length=128, batch=4, methods="lora", selective=True, cpu_offload=True,
        objective="dpo",
    )  # fmt: skip
    said = [what for what, _ in plans.skipped]
    for what in ("LoRA · ZeRO-1", "LoRA · ZeRO-2", "남는 메모리에 결과를 남기는 것", cpu_offload_label()):
        assert said.count(what) == 1
    assert plans.best.recipe.stage == 0
    files = plans.best.files()
    assert {*files} == {"train.py", "accelerate.yaml"} and "DPOTrainer" in files["train.py"]


def test_pairs_that_cannot_be_planned_get_a_reason(small, monkeypatch):
    with pytest.raises(WrongValue, match="kto"):
        make_request("Qwen/Qwen3-0.6B", objective="kto")
    with pytest.raises(NotSupported, match="t5"):
        make_request(t5(small.parent), objective="dpo")
    plan = planned(small, Recipe("lora", "mixed_bf16", "adamw_fused"), length=32, way=(2, 2))
    for kind in KINDS:
        if kind != "trl":
            with pytest.raises(NotSupported, match="trl"):
                plan.files(kind)
    monkeypatch.setattr("virtual_gpu.models.fused_head.has_fused_head", lambda: False)
    with pytest.raises(ImportError, match=r"pip install"):
        make_request(str(small), objective="dpo")


def t5(folder):
    """An encoder-decoder's configuration."""
    from transformers import T5Config

    sizes = {"vocab_size": 300, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    T5Config(**sizes).save_pretrained(folder / "t5")
    return str(folder / "t5")


def test_the_terminal_writes_a_dpo_script(small, tmp_path, capsys):
    given = ["--model", str(small), "--gpu", "L4", "--length", "32", "--batch", "4", "--methods", "lora"]
    assert main([*given, "--objective", "dpo", "--save", str(tmp_path / "plan"), "--language", "en"]) == 0
    assert "DPO" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "plan").iterdir()] == ["train.py"]
    script = (tmp_path / "plan" / "train.py").read_text(encoding="utf-8")
    assert "DPOConfig(" in script and "# tokens of a prompt with one answer" in script
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("12\n", encoding="utf-8")
    for more, said in ((["--files", "torch", "--save", "x"], "DPOTrainer"), (["--lengths", str(lengths)], "--lengths")):
        assert main([*given, "--objective", "dpo", "--language", "en", *more]) == 2
        captured = capsys.readouterr()
        assert said in captured.err and "Searching" not in captured.err
