"""transformers' Trainer: a short script, its TrainingArguments, and an accelerate configuration for several GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...language import tr
from ...models.configs import is_given, load_config
from ...models.spread import device_map as places
from ...step.optimizers import name_for_trainer
from ...step.own_code import OURS
from .keeping import checkpointing, of_keeping
from .settings import (
    FOUR_BITS,
    LAUNCH,
    STORAGE,
    accelerate_yaml,
    device_map,
    docstring,
    fuse_head,
    imports,
    json_text,
    learning_rate,
    lora_config,
    of_launch,
    repeat_kv,
    upcasts,
    weights_dtype,
)

if TYPE_CHECKING:
    from ..plans import Plan

NAMES = ("train.py", "training_arguments.json", "accelerate.yaml", "lora_config.json", "device_map.json")


def cannot(plan: Plan) -> str:
    """Why these files could not train as the plan says; empty where they can."""
    config = load_config(plan.request.model)
    if plan.recipe.spread and config.model_type.endswith("_text"):  # counted is the text model of what the hub has
        return tr(
            ko="이미지도 보는 모델이라 부분의 이름이 device_map.json의 것과 다르다",
            en="the model sees images too, and its parts have other names than device_map.json",
        )
    return why_not_named(plan.recipe.optimizer)


def why_not_named(optimizer: str) -> str:
    """Why TrainingArguments cannot say the optimizer; empty where they can."""
    if optimizer not in OURS:
        return ""
    return tr(
        ko=f"TrainingArguments의 optim으로는 고를 수 없는 옵티마이저다({optimizer})",
        en=f"TrainingArguments have no name for {optimizer}",
    )


def files(plan: Plan) -> dict[str, str]:
    """name → text: train.py, training_arguments.json, accelerate.yaml, and for adapters lora_config.json.

    Of spread layers device_map.json in place of accelerate.yaml: there is one process.
    """
    found = {"training_arguments.json": json_text(training_arguments(plan))}
    if plan.recipe.spread:
        found["device_map.json"] = json_text(places(load_config(plan.request.model), plan.layers))
    else:
        found["accelerate.yaml"] = accelerate_yaml(plan)
    if plan.recipe.method != "full":
        found["lora_config.json"] = json_text(lora_config(plan))
    usage, launch = _SPLIT if plan.recipe.stage else _USAGE, of_launch(plan.recipe)
    if plan.recipe.stage and plan.accumulation > 1:
        launch = {"launched": launch["launched"] + _SINCE, "modules": launch["modules"] + _VERSION}
    usage = _SPREAD.format(gpu=plan.request.gpu, gpus=plan.request.gpus) if plan.recipe.spread else usage
    return {"train.py": script(plan, usage, launch["launched"], launch["modules"])} | found


def training_arguments(plan: Plan) -> dict[str, Any]:
    """The arguments of transformers' TrainingArguments that the plan sets."""
    recipe = plan.recipe
    mixed = recipe.precision.startswith("mixed")
    here = recipe.offload and not recipe.stage
    arguments = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        # For shards accelerate.yaml says it; where blocks keep results, the script.
        "gradient_checkpointing": recipe.checkpointing and not recipe.stage and not recipe.kept,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} | ({"offload": True} if here else {}),
        "optim": name_for_trainer(recipe.optimizer),
        **_of_optimizer(plan),
        "fp16": mixed and "fp16" in recipe.precision,
        "bf16": mixed and "bf16" in recipe.precision,
        "learning_rate": learning_rate(plan),
        "num_train_epochs": 1,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
    }
    if recipe.stage and plan.accumulation > 1:  # as it was counted: no whole gradients wait between micro-batches
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    ranks = plan.request.gpus > 1 and not recipe.spread
    return arguments | ({"ddp_find_unused_parameters": False} if ranks else {})


def _of_optimizer(plan: Plan) -> dict[str, Any]:
    """What TrainingArguments say of the optimizer beside its name, where there is something."""
    targets, given = plan.request.optim_target_modules, {"optim_args": plan.request.optim_args}
    given["optim_target_modules"] = list(targets) if isinstance(targets, tuple) else targets
    return {name: value for name, value in given.items() if value}


_VERSION = "from importlib.metadata import version\n"
_SINCE = """if tuple(map(int, version("transformers").split(".")[:2])) < (5, 2):
    raise SystemExit("transformers 5.2 or later: an older one leaves gradients whole between micro-batches.")
"""
_USAGE = f"""One GPU:  python train.py --text my_text.txt
Several:  {LAUNCH} train.py --text my_text.txt"""
_SPLIT = f"{LAUNCH} train.py --text my_text.txt"  # on one GPU too: what is split, and where it waits, is said there


_SPREAD = """python train.py --text my_text.txt

What it takes on the cards:
virtual-gpu run --gpu "{gpu}" --visible-gpus {gpus} train.py --text my_text.txt"""


def script(plan: Plan, usage: str, more: str, modules: str = "") -> str:
    """train.py. usage: how it is started; more: what is done to its `settings` before TrainingArguments take them.

    modules: lines that import what `more` needs.
    """
    recipe, model = plan.recipe, plan.request.model
    default = "required=True" if is_given(model) else f"default={model!a}"
    loading, adapters, of_peft = "", "", ""
    repeated, fused = imports(plan)
    if recipe.method == "qlora":
        loading = FOUR_BITS.format(storage=STORAGE if recipe.stage else "")
    if recipe.method != "full":
        of_peft = "" if recipe.stage or recipe.spread else _IMPORT_PLACE
        loading += "" if recipe.spread else device_map(recipe, _PLACE)
        names = "LoraConfig, get_peft_model"
        prepare = ""
        if upcasts(recipe):  # of what FSDP2 gathers, which is 16 bits, there is nothing to upcast
            names += ", prepare_model_for_kbit_training"
            prepare = "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n"
        of_peft += f"from peft import {names}\n"
        adapters = f'{prepare}model = get_peft_model(model, LoraConfig(**read("lora_config.json")))\n'
    loading += _SPREAD_PLACES if recipe.spread else ""
    return _SCRIPT.format(
        title=docstring(plan),
        imports=of_peft,
        more_imports=repeated + fused,
        classes=_FUSED_TRAINER if fused else "",
        repeat_kv=repeat_kv(plan),
        fuse=fuse_head(recipe),
        keeping=checkpointing(plan) if recipe.kept else "",
        **of_keeping(plan),
        one_gpu=_ONE_GPU if (fused or recipe.kept) and not recipe.stage else "",
        trainer="FusedTrainer" if fused else "Trainer",
        bits=", BitsAndBytesConfig" if recipe.method == "qlora" else "",
        model=default,
        length=plan.request.length,
        dtype=weights_dtype(recipe),
        loading=loading,
        adapters=adapters,
        usage=usage,
        here=_CHECKPOINTS_STAY if recipe.offload else "",
        more=more,
        modules=modules,
    )


# Straight to the GPU: a base of 12 GB does not pass through Colab's 12.7 GB of RAM.
_IMPORT_PLACE = "from accelerate import PartialState\n"
_PLACE = '"cpu" if args.cpu else PartialState().local_process_index'
_SPREAD_PLACES = """    device_map={"": "cpu"} if args.cpu else read("device_map.json"),
"""
_CHECKPOINTS_STAY = """    # Pinned memory is a GPU's.
    settings |= {name: {"use_reentrant": False} for name in settings if name.endswith("checkpointing_kwargs")}
"""
_ONE_GPU = """if arguments.n_gpu > 1:  # torch.nn.DataParallel's copies have neither such a head nor turns of their own
    raise SystemExit("Several GPUs in one process: CUDA_VISIBLE_DEVICES=0 python train.py, or accelerate launch.")
"""
_FUSED_TRAINER = '''class FusedTrainer(Trainer):
    """The loss from TRL's head; an evaluation gets its logits as ever."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        inputs = inputs if return_outputs else {**inputs, "fused_lm_head": True}
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


'''
_SCRIPT = '''"""{title}

{usage}
"""

import argparse
{of_keeping}import json
{modules}from pathlib import Path

import torch
{imports}from datasets import Dataset
{of_checkpoint}from transformers import AutoModelForCausalLM, AutoTokenizer{bits}, Trainer, TrainingArguments
{more_imports}
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


{classes}settings = read("training_arguments.json")
if "activation_checkpointing" in TrainingArguments.__dataclass_fields__:  # its name since transformers 5.23
    settings = {{key.replace("gradient_checkpoint", "activation_checkpoint"): v for key, v in settings.items()}}
if args.cpu:
    settings |= {{"use_cpu": True, "fp16": False, "bf16": False, "dataloader_pin_memory": False}}
{here}{more}dtype = torch.float32 if args.cpu else torch.{dtype}
# Before the model: it sets up the process that this rank is.
arguments = TrainingArguments(args.output, max_steps=args.max_steps, **settings)
{one_gpu}
tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
ids = tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"]
blocks = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
if not blocks:
    raise SystemExit(f"{{args.text}}: {{len(ids)}} tokens are fewer than one block of {{LENGTH}}.")
dataset = Dataset.from_list([{{"input_ids": block, "labels": block}} for block in blocks])

{repeat_kv}model = AutoModelForCausalLM.from_pretrained(
    args.model,
    dtype=dtype,
    trust_remote_code=False,
{loading})
model.config.use_cache = False
{fuse}{keeping}{adapters}trainer = {trainer}(model, arguments, train_dataset=dataset)
trainer.train()
trainer.save_model(args.output)
'''
