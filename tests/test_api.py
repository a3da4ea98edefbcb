"""`import virtual_gpu`: a library and a command for others."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, TrainingArguments

import virtual_gpu
from helpers import predict_memory
from virtual_gpu import NotSupported, Setting, UnknownName, VirtualGPUError, WrongValue, predict
from virtual_gpu.command import main
from virtual_gpu.language import language, set_language
from virtual_gpu.step.flops import training_flops

ROOT = Path(__file__).resolve().parent.parent
QLORA = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def small(**more):
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(**sizes | {"intermediate_size": 128, "max_position_embeddings": 128} | more)


def arguments(tmp_path, **more):
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **more)


@pytest.fixture
def keep_language():
    before = language()
    yield
    set_language(before)


def test_importing_it_is_light_and_silent():
    code = "import sys, virtual_gpu; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_every_name_is_there():
    assert {name for name in virtual_gpu.__all__ if getattr(virtual_gpu, name) is None} == set()
    assert set(virtual_gpu._HOME) == set(virtual_gpu.__all__)
    with pytest.raises(AttributeError):
        virtual_gpu.nothing  # noqa: B018


# -- arguments of transformers and peft say what our settings say ---------------------------------------------------


@pytest.mark.parametrize(
    ("given", "peft", "bits", "ours"),
    [
        ({"bf16": True}, None, None, {"precision": "mixed_bf16", "optimizer": "adamw_fused"}),
        ({"optim": "adafactor", "gradient_accumulation_steps": 2}, None, None,
         {"optimizer": "adafactor", "gradient_accumulation_steps": 2}),
        ({"optim": "adamw_torch", "gradient_checkpointing": True}, None, None, {"gradient_checkpointing": True}),
        ({"bf16": True, "optim": "adamw_bnb_8bit"}, LoraConfig(r=4, target_modules=["q_proj", "o_proj"]), None,
         {"precision": "autocast_bf16", "optimizer": "adamw_8bit", "peft": "lora", "lora_rank": 4,
          "lora_targets": ("o_proj", "q_proj"), "lora_dropout": 0.0}),
        ({"bf16": True, "optim": "sgd"}, LoraConfig(target_modules="all-linear", lora_dropout=0.1), QLORA,
         {"precision": "autocast_bf16", "optimizer": "sgd", "peft": "qlora", "lora_targets": "all-linear",
          "lora_dropout": 0.1}),
        ({"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
         LoraConfig(modules_to_save=["lm_head", "embed_tokens"], lora_dropout=0.1),
         BitsAndBytesConfig(load_in_8bit=True),
         {"precision": "autocast_bf16", "optimizer": "adamw_fused", "peft": "lora", "lora_dropout": 0.1,
          "load_in_8bit": True, "modules_to_save": ("embed_tokens", "lm_head"), "gradient_checkpointing": True,
          "use_reentrant": True}),
    ],
)  # fmt: skip
def test_training_arguments_are_a_setting(given, peft, bits, ours, tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=3, **given)
    setting = Setting.from_training_arguments(args, peft, small(), quantization_config=bits, sequence_length=32)
    assert setting == Setting(3, model_id=small(), sequence_length=32, **ours)
    report = predict(small(), args, peft, quantization_config=bits, gpu="T4" if not args.bf16 else "L4",
                     sequence_length=32)  # fmt: skip
    assert report.peak_bytes == predict_memory(setting, gpu=report.gpu_name).peak_bytes > 0


@pytest.mark.parametrize(
    ("given", "peft", "named"),
    [
        ({"torch_compile": True}, None, "torch_compile"),
        ({"use_liger_kernel": True}, None, "use_liger_kernel"),
        ({"optim": "rmsprop"}, None, "rmsprop.*virtual-gpu fit"),
        ({"optim": "adamw_torch_xla"}, None, "adamw_torch_xla"),
        ({}, LoraConfig(use_dora=True), "use_dora"),
        ({}, LoraConfig(bias="all"), "bias"),
        ({}, LoraConfig(target_modules=".*q_proj"), "target_modules"),
        ({}, LoraConfig(rank_pattern={"q_proj": 4}), "rank_pattern"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(given, peft, named, tmp_path):
    args = arguments(tmp_path)
    for name, value in given.items():  # some want a library, or a GPU, when they are made
        setattr(args, name, value)
    with pytest.raises(NotSupported, match=named):
        predict(small(), args, peft, gpu="L4", sequence_length=32)


def test_only_int8_and_qlora_s_four_bits(tmp_path):
    with pytest.raises(NotSupported, match="nf4"):
        predict(small(), arguments(tmp_path), LoraConfig(), quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    other = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    with pytest.raises(NotSupported, match="llm_int8_threshold=6"):
        predict(small(), arguments(tmp_path), LoraConfig(), quantization_config=other)
    with pytest.raises(NotSupported, match="peft_config"):
        predict(small(), arguments(tmp_path), quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(WrongValue, match="training_args"):
        predict(small(), None, LoraConfig())
    with pytest.raises(WrongValue, match="training_args='x'"):
        predict(small(), "x")


def test_a_model_by_any_name(tmp_path):
    config = small()
    config.save_pretrained(tmp_path)
    reports = [predict(model, sequence_length=32) for model in (config, tmp_path, str(tmp_path))]
    assert len({report.peak_bytes for report in reports}) == 1
    for wrong in ([], 7, object()):
        with pytest.raises(WrongValue, match="model="):
            predict(wrong)


def test_a_folder_is_read_anew(tmp_path):
    small().save_pretrained(tmp_path)
    first, flops = predict(tmp_path, sequence_length=32), training_flops(batch_size=1, model_id=tmp_path)
    small(intermediate_size=256).save_pretrained(tmp_path)
    second = predict(tmp_path, sequence_length=32)
    assert second.parameters_bytes - first.parameters_bytes == 2 * 3 * 64 * 128 * 4
    assert training_flops(batch_size=1, model_id=tmp_path).total > flops.total


def test_one_setting_or_settings():
    with pytest.raises(WrongValue, match="batch_size"):
        predict_memory(Setting(4, model_id=small()), batch_size=64)
    with pytest.raises(WrongValue, match="batch_size"):
        training_flops(Setting(4, model_id=small()), batch_size=64)


@pytest.mark.parametrize("value", ["False", 1, object(), None])
def test_switches_are_true_or_false(value):
    with pytest.raises(WrongValue, match="gradient_checkpointing="):
        Setting(1, gradient_checkpointing=value)


@pytest.mark.parametrize("gpu", [3, object(), ["T4"]])
def test_what_is_no_gpu(gpu):
    with pytest.raises(WrongValue, match="gpu="):
        predict(small(), gpu=gpu)
    assert issubclass(UnknownName, VirtualGPUError) and issubclass(UnknownName, ValueError)


def test_a_report_says_the_range():
    report = predict(small(), gpu="T4", sequence_length=32)
    assert report.judgement == "fits" and "T4의 14.56~14.76 GiB 가운데" in report.verdict
    said = report.to_dict()
    assert said["room"]["outside"][0]["what"] == "context" and json.dumps(said)
    sure = report.room.sure_bytes
    assert dataclasses.replace(report, reserved_bytes=sure + 1).judgement == "tight"
    assert dataclasses.replace(report, fits=False).judgement == "does not fit"


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_speaks_the_language_that_is_asked_for(capsys, keep_language):
    set_language("en")
    assert main(["fit", "--model", "en", "--language", "ko"]) == 2
    assert capsys.readouterr().err.startswith("오류: 'en'")
    assert main(["fit", "--language=en", "--model", "ko"]) == 2
    assert capsys.readouterr().err.startswith("error: 'ko'")


@pytest.mark.parametrize("odd", ["--batch=--", "--batch=1e99", "--gpus=x", "--margin=nan", "--lora-rank=--"])
def test_odd_values_are_one_line(odd, capsys):
    assert main(["fit", "--model", "gpt2", odd]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


def test_largest_and_shards(capsys):
    words = ["largest", "--model", "gpt2", "--gpu", "4GiB", "--length", "128", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["batch_size"] >= 1 and not found["caution"]
    assert main([*words, "--precision", "fp16"]) == 0
    assert "--precision mixed_fp16" in json.loads(capsys.readouterr().out)["caution"]
    assert main([*words, "--argum", "batch"]) == 2
    capsys.readouterr()
    assert main(["shards", "--model", "gpt2", "--gpus", "4", "--length", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 4 and found["tensors_bytes"] == sum(found["at_peak"].values())
    assert main(["shards", "--model", "gpt2", "--gpus", "1000000000"]) == 2
    assert main(["largest", "--model", "gpt2", "--of", "depth"]) == 2


def test_version_and_help(capsys, keep_language):
    set_language("en")
    for words in (["--version"], ["--help"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
    text = capsys.readouterr().out
    assert virtual_gpu.__version__ in text and "torch" in text and text.count("  virtual-gpu ") == 3


def test_the_module_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "virtual_gpu", "fit", "--model", "gpt2", "--gpu", "none"],
        capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 2 and result.stdout == "" and result.stderr.startswith("error: 'none'")
