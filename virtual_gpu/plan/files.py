"""A plan as files that train so: TrainingArguments, LoraConfig, an accelerate configuration, and a short script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from ..models.adapters import add_adapters
from ..models.build import build_model
from ..models.configs import is_given, load_config
from ..step.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from .plans import Plan, Recipe

NAMES = ("train.py", "training_arguments.json", "accelerate.yaml", "lora_config.json")  # all that a plan may write


def files_of(plan: Plan) -> dict[str, str]:
    """name → text: train.py, training_arguments.json, accelerate.yaml, and for adapters lora_config.json."""
    files = {"training_arguments.json": _json(training_arguments(plan)), "accelerate.yaml": _accelerate(plan)}
    if plan.recipe.method != "full":
        files["lora_config.json"] = _json(lora_config(plan))
    return {"train.py": _script(plan)} | files


def training_arguments(plan: Plan) -> dict[str, Any]:
    """The arguments of transformers' TrainingArguments that the plan sets."""
    recipe = plan.recipe
    mixed = recipe.precision.startswith("mixed")
    arguments = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_checkpointing": recipe.checkpointing and not recipe.stage,  # for shards accelerate.yaml says it
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": OPTIMIZERS[recipe.optimizer][0],
        "fp16": mixed and "fp16" in recipe.precision,
        "bf16": mixed and "bf16" in recipe.precision,
        "learning_rate": _learning_rate(recipe),
        "num_train_epochs": 1,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
    }
    if recipe.stage and plan.accumulation > 1:  # as it was counted: no whole gradients wait between micro-batches
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return arguments | ({"ddp_find_unused_parameters": False} if plan.request.gpus > 1 else {})


def _learning_rate(recipe: Recipe) -> float:
    """Where to begin. Weights in bf16 swallow most of a step of 1e-5, so there transformers' default, 5e-5."""
    if recipe.method != "full":
        return 2e-4
    return 5e-5 if recipe.caution else 1e-5


def lora_config(plan: Plan) -> dict[str, Any]:
    """The arguments of peft's LoraConfig, with the target layers by name."""
    model = build_model(load_config(plan.request.model), torch.float16)  # all layers: they may differ
    config = add_adapters(model, plan.request.lora_rank, plan.request.lora_targets).peft_config["default"]
    names = ("r", "lora_alpha", "lora_dropout", "bias", "task_type", "fan_in_fan_out")
    found = {name: getattr(config, name) for name in names} | {"target_modules": sorted(config.target_modules)}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _accelerate(plan: Plan) -> str:
    gpus, stage = plan.request.gpus, plan.recipe.stage
    mixed = plan.recipe.precision.removeprefix("mixed_") if plan.recipe.precision.startswith("mixed") else "no"
    kind = "FSDP" if stage else "MULTI_GPU" if gpus > 1 else "NO"
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: '{kind}'",
        f"mixed_precision: '{mixed}'",
        "num_machines: 1",
        f"num_processes: {gpus}",
    ]
    if stage:
        yes = {True: "true", False: "false"}
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {yes[stage == 3]}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {yes[plan.recipe.checkpointing]}",
            "  fsdp_cpu_ram_efficient_loading: true",
            "  fsdp_offload_params: false",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    return "\n".join(lines) + "\n"


def weights_dtype(recipe: Recipe) -> str:
    """torch's name of the type in which the weights are loaded."""
    if recipe.precision == "bf16" or (recipe.method != "full" and recipe.precision != "fp32"):
        return "bfloat16" if "bf16" in recipe.precision else "float16"
    return "float32"


def _script(plan: Plan) -> str:
    recipe, model = plan.recipe, plan.request.model
    default = "required=True" if is_given(model) else f"default={model!a}"
    loading, adapters, imports = "", "", ""
    if recipe.method == "qlora":
        loading = _LOADING_4BIT.format(storage=_STORAGE if recipe.stage else "")
    if recipe.method != "full":
        if not recipe.stage:
            imports, loading = _IMPORT_PLACE, loading + _PLACE
        elif recipe.method == "qlora":  # whole on a card it might not fit: FSDP2 takes it there piece by piece
            loading += _PLACE_CPU
        names = "LoraConfig, get_peft_model"
        prepare = ""
        if recipe.method == "qlora" and not recipe.stage:  # what FSDP2 gathers is 16 bits: nothing to upcast
            names += ", prepare_model_for_kbit_training"
            prepare = "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n"
        imports += f"from peft import {names}\n"
        adapters = f'{prepare}model = get_peft_model(model, LoraConfig(**read("lora_config.json")))\n'
    return _SCRIPT.format(
        title="\n".join(filter(None, [_english(plan), _caution(recipe)])),
        imports=imports,
        bits=", BitsAndBytesConfig" if recipe.method == "qlora" else "",
        model=default,
        length=plan.request.length,
        dtype=weights_dtype(recipe),
        loading=loading,
        adapters=adapters,
    )


def _english(plan: Plan) -> str:
    recipe = plan.recipe
    parts = [recipe.method, recipe.precision, recipe.optimizer, f"{plan.micro_batch} x {plan.accumulation}"]
    parts += [f"ZeRO-{recipe.stage}"] if recipe.stage else []
    parts += ["checkpointing"] if recipe.checkpointing else []
    return ", ".join([*parts, f"{plan.request.gpus} x {plan.request.gpu}"])


def _caution(recipe: Recipe) -> str:
    return "\nWeights in bf16 round small updates away: see that the loss falls." if recipe.caution else ""


# Straight to the GPU: a base of 12 GB does not pass through Colab's 12.7 GB of RAM.
_IMPORT_PLACE = "from accelerate import PartialState\n"
_PLACE = """    device_map={"": "cpu" if args.cpu else PartialState().local_process_index},
"""
_LOADING_4BIT = """    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
{storage}    ),
"""
# Bytes (the default) FSDP2 cannot split: accelerate would leave them whole on every GPU.
_STORAGE = "        bnb_4bit_quant_storage=dtype,\n"
_PLACE_CPU = '    device_map={"": "cpu"},\n'
_SCRIPT = '''"""{title}

One GPU:  python train.py --text my_text.txt
Several:  accelerate launch --config_file accelerate.yaml train.py --text my_text.txt
"""

import argparse
import json
from pathlib import Path

import torch
{imports}from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer{bits}, Trainer, TrainingArguments

LENGTH = {length}
parser = argparse.ArgumentParser()
parser.add_argument("--text", required=True, help="a text file to learn")
parser.add_argument("--model", {model})
parser.add_argument("--output", default="out")
parser.add_argument("--max-steps", type=int, default=-1)
parser.add_argument("--cpu", action="store_true", help="rehearse in fp32 without a GPU")
args = parser.parse_args()


def read(name):
    return json.loads((Path(__file__).resolve().parent / name).read_text(encoding="utf-8"))


settings = read("training_arguments.json")
if "activation_checkpointing" in TrainingArguments.__dataclass_fields__:  # its name since transformers 5.23
    settings = {{key.replace("gradient_checkpoint", "activation_checkpoint"): v for key, v in settings.items()}}
if args.cpu:
    settings |= {{"use_cpu": True, "fp16": False, "bf16": False, "dataloader_pin_memory": False}}
dtype = torch.float32 if args.cpu else torch.{dtype}
# Before the model: it sets up the process that this rank is.
arguments = TrainingArguments(args.output, max_steps=args.max_steps, **settings)

tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
ids = tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"]
blocks = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
if not blocks:
    raise SystemExit(f"{{args.text}}: {{len(ids)}} tokens are fewer than one block of {{LENGTH}}.")
dataset = Dataset.from_list([{{"input_ids": block, "labels": block}} for block in blocks])

model = AutoModelForCausalLM.from_pretrained(
    args.model,
    dtype=dtype,
    trust_remote_code=False,
{loading})
model.config.use_cache = False
{adapters}trainer = Trainer(model, arguments, train_dataset=dataset)
trainer.train()
trainer.save_model(args.output)
'''
