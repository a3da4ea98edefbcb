"""Optimizers by their libraries' own code: named, predicted as they run, planned, written, and read from files."""

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import run_forked
from safetensors.torch import load_file
from test_plan_files import TEXT, llama, on_the_virtual_card, small  # noqa: F401  a fixture
from transformers import LlamaConfig, Trainer
from transformers.training_args import OptimizerNames

from helpers.experiment import predict_memory
from virtual_gpu.cards import card
from virtual_gpu.errors import NotSupported, WrongValue
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.plan import Recipe, plan_training
from virtual_gpu.plan.alternatives import CHANGED
from virtual_gpu.plan.candidates import left_out, recipes_of
from virtual_gpu.plan.measure import held, measure
from virtual_gpu.plan.on_a_card import predict_need, run_on_a_card, states_of
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.start import start_from
from virtual_gpu.program.context import cuda
from virtual_gpu.step import own_code
from virtual_gpu.step.optimizers import OPTIMIZERS, in_8_bits_of_bitsandbytes, needs_cuda, optimizer_named
from virtual_gpu.step.predict import predicted_run
from virtual_gpu.step.setting import Setting

DEEP = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
    max_position_embeddings=128,
)  # fmt: skip
HERE = ["muon", "adamw_in_backward", "rmsprop", "paged_ademamix_8bit"]
LIBRARIES = {
    "galore_torch": ["galore_adamw", "galore_adafactor"],  # its layer-wise one the Trainer cannot make
    "apollo_torch": ["apollo_adamw", "apollo_adamw_layerwise"],
    "lomo_optim": ["lomo", "adalomo"],
    "schedulefree": ["schedule_free_adamw", "schedule_free_sgd"],
    "optimi": ["stable_adamw"],
    "grokadamw": ["grokadamw"],
    "torchao": ["adamw_torch_8bit"],
}


def setting_of(name, model=DEEP, **more):
    given = {"precision": "bf16", "sequence_length": 32, "gradient_checkpointing": True, "fp32_embedding_state": True}
    return Setting(2, model_id=model, optimizer=name, **given | more)


# -- their names -----------------------------------------------------------------------------------------------------


def test_every_name_of_training_arguments_is_known_or_says_why_not():
    """Of a library that is missing the package is named; of the others it is an optimizer that can be counted."""
    kinds = Counter()
    for name in (one.value for one in OptimizerNames):
        try:
            ours = optimizer_named(name)
        except ImportError as error:
            packages = {package for part, (_, package) in own_code._LIBRARIES.items() if part in name}
            assert any(f"pip install {package}" in str(error) for package in packages)
            kinds["missing"] += 1
        except NotSupported as error:
            assert name.startswith("adamw_torch_") and name in str(error)
            kinds["elsewhere"] += 1
        else:
            assert ours in OPTIMIZERS or needs_cuda(ours)
            kinds["counted"] += 1
    assert kinds["elsewhere"] == 2 and kinds["counted"] >= 19


def test_only_what_the_trainer_reads_counts():
    assert setting_of("rmsprop", optim_args="centered=true") != setting_of("rmsprop")
    assert setting_of("adamw_fused", optim_args="centered=true") == setting_of("adamw_fused")
    for wrong in ({"optim_args": "rank"}, *({"optim_target_modules": value} for value in ([3], 3, True, 0))):
        with pytest.raises(WrongValue, match=next(iter(wrong))):
            setting_of("rmsprop", **wrong)
    for given, words in (({"gradient_accumulation_steps": 2}, "누적"), ({"precision": "mixed_fp16"}, "GradScaler")):
        with pytest.raises(WrongValue, match=words):
            setting_of("adamw_in_backward", **given)
    with pytest.raises(NotSupported, match="lora"):
        setting_of("muon", peft="lora", precision="autocast_bf16")
    with pytest.raises(NotSupported, match="virtual-gpu fit --optimizer muon"):
        predict_memory(setting_of("muon"), gpu="L4")


# -- what they take --------------------------------------------------------------------------------------------------


def agrees(name, **more):
    setting = setting_of(name, **more)
    config = load_config(setting.model_id)
    found, ran = predicted_run(setting, config, card("L4"), run_on_a_card), run_on_a_card(setting, config, card("L4"))
    assert found.method == "depth" and ran.method == "run"
    assert found[1:6] == ran[1:6]
    assert found.trace.timeline().at_peak() == ran.trace.timeline().at_peak()
    assert states_of(setting) == {kind: getattr(ran, kind) for kind in ("parameters", "gradients", "optimizer")}


@pytest.mark.parametrize("name", HERE)
def test_a_prediction_is_the_run(name):
    agrees(name)


@pytest.mark.parametrize("name", [name for names in LIBRARIES.values() for name in names])
def test_a_prediction_with_another_s_library_is_the_run(name):
    library = next(library for library, names in LIBRARIES.items() if name in names)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"without {library}")
    agrees(name, optim_args="rank=16" if own_code.takes_targets(name) else "")


def test_many_micro_batches_follow_from_a_few():
    agrees("rmsprop", gradient_accumulation_steps=6)


def test_states_are_those_of_the_algorithm():
    """Muon: a momentum of the blocks' matrices, AdamW's two of all else. In the backward no gradient stays."""
    parameters = dict(build_model(DEEP, torch.bfloat16).named_parameters())
    every = sum(p.nbytes for p in parameters.values())
    matrices = sum(p.nbytes for name, p in parameters.items() if p.dim() == 2 and ".layers." in name)
    whole = {name: states_of(setting_of(name)) for name in ("muon", "adamw_in_backward", "rmsprop", "sgd")}
    assert whole["muon"] == {"parameters": every, "gradients": every, "optimizer": 2 * every - matrices}
    assert whole["adamw_in_backward"] == {"parameters": every, "gradients": 0, "optimizer": 2 * every}
    assert whole["rmsprop"]["optimizer"] == every and whole["sgd"]["optimizer"] == 0
    centered, momentum = setting_of("rmsprop", optim_args="centered=true"), setting_of("sgd", optim_args="momentum=0.9")
    assert states_of(centered)["optimizer"] == 2 * every and states_of(momentum)["optimizer"] == every


@pytest.mark.slow
@pytest.mark.parametrize("name, lever", [("muon", "muon"), ("adamw_in_backward", "in_backward")])
def test_a_plan_is_the_lever_s_program(name, lever):
    """docs/levers.md: a loop of its own on the same card. The loop has its batch there, and its loss at the end."""
    rows = json.loads((Path(__file__).parent.parent / "benchmarks" / "levers.json").read_text(encoding="utf-8"))["rows"]
    setting = Setting(
        1, model_id="meta-llama/Llama-3.1-8B", precision="bf16", sequence_length=2048, gradient_checkpointing=True,
        optimizer=name,
    )  # fmt: skip
    assert abs(predict_need(setting, (8, 9)).tensors - rows["8b"][lever]["peak"]) < 2**17


def test_a_module_that_moves_to_the_card_keeps_its_hooks():
    """The Trainer makes layer-wise optimizers before the model is there."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        fired = []
        with cuda("T4"):
            layer = torch.nn.Linear(8, 8)
            for parameter in layer.parameters():
                getattr(parameter, register)(lambda tensor, fired=fired: fired.append(tensor.device.type))
            layer.cuda()(torch.ones(2, 8).cuda()).sum().backward()
        assert fired == ["cuda", "cuda"], register


# -- in the planner --------------------------------------------------------------------------------------------------


def test_what_steps_in_the_backward_accumulates_nothing():
    asked = {"length": 32, "batch": 4, "optimizer": "adamw_in_backward"}
    plans = plan_training(DEEP, "L4", **asked)
    assert plans.plans and all(
        plan.accumulation == 1 and plan.micro_batch == 4 for plan in (*plans.plans, *plans.losers)
    )
    assert {plan.recipe.method for plan in plans.plans} == {"full"}
    assert any("LoRA" in what and "가중치를" in why for what, why in plans.skipped)
    assert {recipe.precision for recipe in recipes_of(make_request(DEEP, "T4", **asked))} == {"fp32"}
    for wrong in ({"methods": ("lora",)}, {"gpus": 2}, {"gpu": "T4", "precision": "mixed_fp16"}):
        with pytest.raises(NotSupported, match="adamw_in_backward"):
            make_request(**{"model": DEEP, "gpu": "L4", **asked, **wrong})
    with pytest.raises(NotSupported, match=r"전체 미세 조정: GPU끼리.*; LoRA, QLoRA: 어댑터가"):  # each with its reason
        make_request(DEEP, "L4", 2, **asked)


def test_arguments_of_the_optimizer_are_for_it():
    request = make_request(DEEP, "L4", length=32, batch=4, optimizer="sgd", optim_args="momentum=0.9")
    states = [held(one, Recipe("full", "bf16", "sgd")) for one in (request, replace(request, optim_args=""))]
    assert states[0]["optimizer"] == states[0]["parameters"] and states[1]["optimizer"] == 0
    assert any("QLoRA" in what and "4비트" in why for what, why in left_out(request))
    with pytest.raises(WrongValue, match="adamw_fused"):
        make_request(DEEP, "L4", length=32, batch=4, optimizer="adamw_fused", optim_args="momentum=0.9")
    with pytest.raises(WrongValue, match="optim_args"):
        make_request(DEEP, "L4", length=32, batch=4, optim_args="momentum=0.9")
    for optimizer in (None, "adamw_fused", "sgd"):
        with pytest.raises(WrongValue, match=r"optim_target_modules=\['q_proj'\]: "):
            make_request(DEEP, "L4", length=32, batch=4, optimizer=optimizer, optim_target_modules=["q_proj"])


def test_another_optimizer_comes_without_the_arguments_of_the_first(monkeypatch):
    monkeypatch.setattr("virtual_gpu.plan.alternatives.anything_that_fits", lambda request: request)
    request = make_request(DEEP, "L4", length=32, batch=4, optimizer="sgd", optim_args="momentum=0.9")
    changed, *_ = CHANGED["optimizer"](request)
    assert changed.optim_args == ""
    names = ("length", "batch", "optimizer", "optim_args", "optim_target_modules")
    assert make_request(DEEP, "L4", **{name: getattr(changed, name) for name in names}) == changed  # which may be asked


def test_whose_embeddings_the_trainer_has_in_32_bits():
    """By its own rule, of the optimizers that are there; of the others it is not bitsandbytes' code."""
    there = [*(alias for aliases in OPTIMIZERS.values() for alias in aliases), "rmsprop", "rmsprop_bnb", "ademamix"]
    there += ["rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "ademamix_8bit", "paged_ademamix_8bit"]
    said = {}
    for name in [name for name in there if name in own_code.of_the_trainer()]:
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(own_code._arguments(name, 5e-5, "", ""))
        said[name] = "bitsandbytes" in str(kind) and arguments.get("optim_bits") == 8
    assert (
        said == {name: in_8_bits_of_bitsandbytes(optimizer_named(name)) for name in said} and len({*said.values()}) == 2
    )
    assert not any(map(in_8_bits_of_bitsandbytes, ("adamw_torch_8bit", "galore_adamw_8bit")))


# -- in files --------------------------------------------------------------------------------------------------------


def plan_with(folder, name, precision="bf16", way=(4, 2), **more):
    request = make_request(str(folder), "L4", length=128, batch=way[0] * way[1], optimizer=name, **more)
    return measure(request, Recipe("full", precision, name, checkpointing=True), *way)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, name, way",
    [
        ("torch", "muon", (4, 2)),
        ("torch", "adamw_in_backward", (4, 1)),
        ("torch", "paged_ademamix_8bit", (4, 2)),
        ("trainer", "rmsprop", (4, 2)),
        ("trainer", "ademamix_8bit", (4, 2)),
        ("accelerate", "adagrad", (4, 2)),
    ],
)
def test_the_files_hold_what_the_plan_counted(kind, name, way, tmp_path):
    llama(tmp_path / "model")
    plan = plan_with(tmp_path / "model", name, way=way)
    # A loop has all parameters in one group, the Trainer in two: foreach's temporaries are of the norms' weights too.
    assert abs(on_the_virtual_card(plan, kind, tmp_path) - plan.tensors_bytes) < 2**16


def test_what_files_cannot_say_is_named(tmp_path):
    llama(tmp_path / "model")
    muon = plan_with(tmp_path / "model", "muon")
    assert "torch.optim.Muon(" in muon.files()["train.py"]  # the first kind that can
    for kind, words in (("trainer", "고를 수 없는"), ("trl", "고를 수 없는"), ("accelerate", "여러 개")):
        with pytest.raises(NotSupported, match=f"{words}.*: torch"):
            muon.files(kind)
    momentum = plan_with(tmp_path / "model", "sgd", optim_args="momentum=0.9")
    assert json.loads(momentum.files()["training_arguments.json"])["optim_args"] == "momentum=0.9"
    with pytest.raises(NotSupported, match="optim_args"):
        momentum.files("torch")


def weights_after(folder, script, text):
    (folder / "train.py").write_text(script, encoding="utf-8")
    words = ["--text", folder / "text.txt", "--output", folder / "out", "--cpu", "--max-steps", "3"]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    status, _, err = run_forked([str(folder / "train.py"), *map(str, words)], folder=folder)
    assert status == 0, err[-2000:]
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.slow
def test_a_step_in_the_backward_is_the_step(small, tmp_path):  # noqa: F811
    """As AdamW without clipping: to the bit. Muon trains too, and the matrices otherwise."""
    found = {}
    for name in ("adamw_fused", "adamw_in_backward", "muon"):
        folder = tmp_path / name
        folder.mkdir()
        request = make_request(str(small), "L4", length=32, batch=2, optimizer=name)
        script = measure(request, Recipe("full", "bf16", name), 2, 1).files("torch")["train.py"]
        script = script.replace("    torch.nn.utils.clip_grad_norm_(trained, 1.0)\n", "")
        torch.manual_seed(0)
        found[name] = weights_after(folder, script.replace("shuffle=True", "shuffle=False"), TEXT * 40)
    fused, own, muon = found.values()
    assert all(torch.equal(fused[name], own[name]) for name in fused)
    assert any(not torch.equal(fused[name], muon[name]) for name in fused)


# -- from files ------------------------------------------------------------------------------------------------------


def read(tmp_path, text, name="args.json", **more):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return start_from(tmp_path / name, **{"model": DEEP, "length": 64, "gpu": "L4"} | more)


def test_training_arguments_name_it_with_its_arguments(tmp_path):
    args = {"per_device_train_batch_size": 1, "bf16": True, "optim": "sgd", "optim_args": "momentum=0.9"}
    found = read(tmp_path, json.dumps(args))
    assert found.start.setting.optim_args == "momentum=0.9" and not found.notes
    plain = read(tmp_path, json.dumps(args | {"optim_args": ""}))
    states = [states_of(one.start.setting)["optimizer"] for one in (found, plain)]
    assert states[0] > 0 == states[1] and found.start.reserved > plain.start.reserved
    for name in ("rmsprop", "ademamix_8bit"):
        assert read(tmp_path, json.dumps(args | {"optim": name, "optim_args": ""})).start.setting.optimizer == name
    axolotl = "base_model: gpt2\nbf16: true\noptimizer: rmsprop\noptim_args:\n  momentum: 0.9\n  centered: true\n"
    assert read(tmp_path, axolotl, "axolotl.yaml").start.setting.optim_args == "momentum=0.9,centered=True"
    with pytest.raises(WrongValue, match="optim: 'muon'"):  # ours alone
        read(tmp_path, json.dumps(args | {"optim": "muon", "optim_args": ""}))
    with pytest.raises(WrongValue, match="optim_args"):
        read(tmp_path, json.dumps(args | {"optim_args": "momentum"}))


@pytest.mark.skipif(importlib.util.find_spec("galore_torch") is not None, reason="with it it is counted")
def test_a_library_that_is_missing_is_named_with_the_key(tmp_path):
    args = {"per_device_train_batch_size": 1, "optim": "galore_adamw", "optim_target_modules": ["q_proj"]}
    with pytest.raises(NotSupported, match=r"args.json: optim: .*pip install galore-torch"):
        read(tmp_path, json.dumps(args))
    with pytest.raises(ImportError, match="pip install galore-torch"):
        make_request(DEEP, "L4", length=32, batch=4, optimizer="galore_adamw")


RECIPE = """model:
  _component_: torchtune.models.llama3_2.llama3_2_1b
tokenizer:
  max_seq_len: 64
batch_size: 2
gradient_accumulation_steps: 1
enable_activation_checkpointing: true
optimizer:
  _component_: torch.optim.AdamW
  fused: true
optimizer_in_bwd: IN_BWD
dtype: bf16
"""


def test_torchtune_s_key_is_read_and_proposed(tmp_path):
    inside = read(tmp_path, RECIPE.replace("IN_BWD", "true"), "recipe.yaml")
    assert inside.start.setting.optimizer == "adamw_in_backward" and not inside.notes
    outside = read(tmp_path, RECIPE.replace("IN_BWD", "false"), "recipe.yaml")
    assert outside.start.setting.optimizer == "adamw_fused" and outside.start.reserved > inside.start.reserved
    medium = read(tmp_path, RECIPE.replace("IN_BWD", "false").replace("batch_size: 2", "batch_size: 1"), "recipe.yaml",
                  model="openai-community/gpt2-medium", gpu="3.4 GiB, 8.0")  # fmt: skip
    assert not medium.fits and medium.lines == {"optimizer_in_bwd": True}
    several = RECIPE.replace("IN_BWD", "true").replace("steps: 1", "steps: 2")
    assert [note.key for note in read(tmp_path, several, "recipe.yaml").notes] == ["optimizer_in_bwd"]
