"""DeepSpeed's own engine in plans and answers: what it takes is what its program takes; without it, that is said."""

import importlib.util
import json

import pytest
from forked import run_forked
from transformers import LlamaConfig

from helpers.models import byte_tokenizer
from virtual_gpu.cards import card
from virtual_gpu.errors import NotSupported
from virtual_gpu.plan import Recipe, by_deepspeed
from virtual_gpu.plan.by_deepspeed import deepspeed_step, of_plan, why_not
from virtual_gpu.plan.command import main
from virtual_gpu.plan.files.deepspeed_trainer import configuration
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.request import make_request
from virtual_gpu.plan.start.answer import start_from
from virtual_gpu.step.setting import Setting

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install deepspeed==0.19.8): its engine is not run",
)
LENGTH = 512
# As LLaMA-Factory's examples have it: a billion of gathered elements may lie there.
SECTION = {
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
    },
}
FILE = """model_name_or_path: {model}
stage: sft
finetuning_type: {method}
lora_target: all
deepspeed: ds.json
cutoff_len: {length}
per_device_train_batch_size: {rows}
gradient_accumulation_steps: 2
bf16: true
"""


@pytest.fixture
def model(tmp_path):
    """A folder with a Llama's configuration, large enough for its blocks to be segments of their own."""
    folder = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def asked(model, rows=2, method="full", section=SECTION):
    """A file of LLaMA-Factory, and DeepSpeed's beside it."""
    path = model.with_name("sft.yaml")
    path.write_text(FILE.format(model=model, method=method, length=LENGTH, rows=rows), encoding="utf-8")
    path.with_name("ds.json").write_text(json.dumps(section), encoding="utf-8")
    return path


def with_zero(**more):
    return SECTION | {"zero_optimization": SECTION["zero_optimization"] | more}


def test_what_was_not_run_by_the_engine_is_said_to_be_more(model, monkeypatch):
    monkeypatch.setattr(by_deepspeed, "installed", lambda *names: {})
    answer = start_from(asked(model), "L4", 4)
    note = next(note for note in answer.notes if note.key == "deepspeed")
    assert note.effect == "either" and "FSDP2" in note.why and "설치" in note.why and "22%" in note.why
    assert not answer.by and answer.to_dict()["counted_by"] is None
    assert not [note for note in start_from(asked(model), "L4", 1).notes if "FSDP2" in note.why]  # nothing is split
    with pytest.raises(NotSupported, match="설치"):
        deepspeed_step(answer.start.setting, SECTION, card("L4"), 4)


@pytest.mark.parametrize(
    "setting, section, words",
    [
        (Setting(1, precision="mixed_fp16"), SECTION, "bf16"),
        (Setting(1, precision="autocast_bf16", peft="qlora"), SECTION, "LoRA"),
        (Setting(1, precision="mixed_bf16", objective="dpo"), SECTION, "SFT"),
        (Setting(1, precision="mixed_bf16"), with_zero(offload_optimizer={"device": "cpu"}), "CPU"),
        (Setting(1, precision="mixed_bf16"), with_zero(offload_param={"device": "nvme"}), "CPU"),
        (Setting(1, precision="mixed_bf16"), with_zero(offload_optimizer={"device": "none"}), ""),
        (Setting(1, precision="mixed_bf16"), SECTION | {"compression_training": {"weight_quantization": {}}}, "compr"),
        (Setting(1, precision="mixed_bf16"), SECTION | {"tensorboard": {"enabled": True}}, ""),
        (Setting(1, precision="mixed_bf16"), SECTION, ""),
    ],
)
def test_what_the_engine_is_run_for(setting, section, words, monkeypatch):
    monkeypatch.setattr(by_deepspeed, "installed", lambda *names: dict.fromkeys(names, "0.19.8"))
    why = why_not(setting, section)
    assert words in why and bool(why) == bool(words)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("method, stage", [("full", 3), ("full", 2), ("lora", 3)])
def test_a_plan_takes_by_the_engine_what_its_files_take(model, method, stage, tmp_path):
    recipe = Recipe(method, "mixed_bf16", "adamw_fused", stage=stage, checkpointing=True)
    plan = measure(make_request(str(model), "L4", 4, length=LENGTH, batch=16), recipe, 2, 2)
    step = of_plan(plan)
    plan.save(tmp_path / "plan", kind="deepspeed")
    (tmp_path / "text.txt").write_text("대한민국의 수도는 서울이다.\n" * 4000, encoding="utf-8")
    words = ["--gpu", "L4", "--gpus", "4", "--no-advise", "--report", str(tmp_path / "report.json"), "torchrun"]
    words += ["--nproc_per_node", "4", "train.py", "--text", str(tmp_path / "text.txt")]
    status, _, err = run_forked(["-m", "virtual_gpu", "run", *words], folder=tmp_path / "plan")
    assert status == 0, err[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    # The script loads in fp32, which is more than training only here, where the model is small.
    allocated, reserved = (max(of[n] for phase, of in report["phases"].items() if phase != "loading") for n in (0, 1))
    assert abs(step.allocated / allocated - 1) < 0.01 and abs(step.reserved / reserved - 1) < 0.05
    assert step.allocated <= step.card <= step.reserved


@needs_deepspeed
@pytest.mark.slow
def test_an_answer_is_by_the_engine_and_so_are_its_lines(model, tmp_path):
    answer = start_from(asked(model, rows=16), "L4", 4)
    step = deepspeed_step(answer.start.setting, SECTION, card("L4"), 4)
    assert answer.by.startswith("DeepSpeed 0.") and answer.start.reserved == step.card
    assert not [note for note in answer.notes if note.key == "deepspeed"]
    smaller = f"{step.card / 2**30 + 0.35:.2f}GiB, 8.9"  # what lies outside of the allocator takes more
    changed = start_from(asked(model, rows=16), smaller, 4)
    assert not changed.fits and changed.lines["per_device_train_batch_size"] < 16
    assert changed.proposal.reserved == deepspeed_step(changed.proposal.setting, SECTION, card(smaller), 4).card
    again = start_from(changed.save(tmp_path / "changed.yaml"), smaller, 4)
    assert again.fits and again.start.reserved == changed.proposal.reserved


def test_the_engine_is_given_what_a_step_hangs_on_and_no_files_to_write():
    section = SECTION | {"csv_monitor": {"enabled": True, "output_path": "/nowhere"}, "train_batch_size": 64}
    asked = by_deepspeed._asked(Setting(2, 8, precision="mixed_bf16"), section, "folder")
    given = asked["arguments"]["deepspeed"]
    assert given == SECTION and asked["rows"] == 4 and asked["attention"] is None  # of gpt-oss there is no "sdpa"


@needs_deepspeed
def test_an_engine_that_stops_says_why(model):
    setting = start_from(asked(model), "L4", 4).start.setting
    with pytest.raises(NotSupported, match=r"ValueError|Exception|Error"):
        deepspeed_step(setting, with_zero(stage3_max_live_parameters="much"), card("L4"), 4)


@pytest.mark.slow
def test_files_for_deepspeed_say_what_it_takes(model, tmp_path, capsys):
    words = ["--model", str(model), "--gpu", "L4", "--gpus", "2", "--batch", "8", "--length", str(LENGTH)]
    assert main([*words, "--methods", "full", "--save", str(tmp_path / "plan"), "--files", "deepspeed"]) == 0
    said = capsys.readouterr().out
    last = said.strip().splitlines()[-1]
    assert "FSDP2" in last and ("L4" in last if importlib.util.find_spec("deepspeed") else "설치" in last)
    assert json.loads((tmp_path / "plan" / "ds_config.json").read_text()) in (configuration(2), configuration(3))
