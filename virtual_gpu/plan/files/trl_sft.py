"""TRL's SFTTrainer: a short script with an SFTConfig, and an accelerate configuration for several GPUs.

TRL 1.16 makes the logits in tiles whatever the plan says, and leaves what is not 4-bit in 16 bits: of a plan without
a fused head mostly far less. With few words or tokens its tile and the head's fp32 gradient are more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...language import tr
from .keeping import checkpointing, of_keeping
from .settings import (
    BLOCKS,
    LAUNCH,
    accelerate_yaml,
    docstring,
    head,
    imports,
    literal,
    loading,
    lora,
    weights_dtype,
)
from .trainer import training_arguments, why_not_named

if TYPE_CHECKING:
    from ..plans import Plan
    from ..recipes import Recipe

NAMES = ("train.py", "accelerate.yaml")


def cannot(plan: Plan) -> str:
    """Why these files could not train as the plan says; empty where they can."""
    if not plan.recipe.stage:
        return why_not_named(plan.recipe.optimizer)
    stage = plan.recipe.stage
    return tr(ko=f"SFTTrainer로는 ZeRO-{stage}를 실행해 보지 않았다", en=f"SFTTrainer was not run with ZeRO-{stage}")


def files(plan: Plan) -> dict[str, str]:
    """name → text: train.py, and for several GPUs accelerate.yaml."""
    script = _SCRIPT.format(
        tiles="" if plan.recipe.fused_lm_head else _TILES,
        head=head(plan),
        arguments="".join(f"    {name}={value},\n" for name, value in arguments_of(plan).items()),
        blocks=BLOCKS,
        keeping=checkpointing(plan) if plan.recipe.kept else "",
        **of_keeping(plan),
        **of_trainer(plan),
    )
    return with_launch(plan, script)


def of_trainer(plan: Plan) -> dict[str, str]:
    """What the scripts of TRL's trainers have in common: field of the template → text."""
    recipe, gpus = plan.recipe, plan.request.gpus
    adapters, qlora = recipe.method != "full", recipe.method == "qlora"
    gpus_of_run = f" --gpus {gpus} {LAUNCH}" if gpus > 1 else ""
    return {
        "title": docstring(plan),
        "of_transformers": imports(plan)[0],
        "command": LAUNCH if gpus > 1 else "python",
        "asked": f"virtual-gpu run --gpu {literal(plan.request.gpu)}{gpus_of_run}",
        "peft": "from peft import LoraConfig\n" if adapters else "",
        "bits": ", BitsAndBytesConfig" if qlora else "",
        "dtype": weights_dtype(recipe),
        "place": "" if recipe.stage else _PLACE,
        "of_place": "" if recipe.stage else "from accelerate import PartialState\n",
        "model": loading(plan, "device"),
        "adapters": lora(plan) if adapters else "",
        "peft_config": "    peft_config=adapters,\n" if adapters else "",
        "upcast": _upcast(recipe) if qlora else "",
    }


def beside_a_reference(plan: Plan) -> dict[str, str]:
    """What a script adds whose trainer switches checkpointing off and on again: field of the template → text."""
    again = plan.recipe.offload and not plan.recipe.stage  # of shards accelerate wraps the layers, whatever is switched
    return {"functools": "import functools\n", "again": _AGAIN} if again else {"functools": "", "again": ""}


# TRL 1.16, models/utils.py, `disable_gradient_checkpointing`; transformers' Trainer alone reads "offload".
_AGAIN = """# After each pass of the reference TRL switches checkpointing on again, without the offload.
model.gradient_checkpointing_enable = functools.partial(
    model.gradient_checkpointing_enable, offload=not args.cpu
)
"""


def with_launch(plan: Plan, script: str) -> dict[str, str]:
    """The script, and for several GPUs accelerate's configuration beside it."""
    return {"train.py": script} | ({"accelerate.yaml": accelerate_yaml(plan)} if plan.request.gpus > 1 else {})


def arguments_of(plan: Plan) -> dict[str, str]:
    """SFTConfig's arguments, and DPOConfig's, as the script writes them. The defaults are other than the Trainer's."""
    given = {name: literal(value) for name, value in training_arguments(plan).items()}
    if plan.recipe.offload and not plan.recipe.stage:
        given["gradient_checkpointing_kwargs"] = '{"use_reentrant": False, "offload": not args.cpu}'
    else:
        del given["gradient_checkpointing_kwargs"]  # TRL's own are the same, and of shards accelerate.yaml says them
    given |= {name: "not args.cpu" for name in ("fp16", "bf16") if given[name] == "True"}
    named = {
        "per_device_train_batch_size": "MICRO_BATCH",
        "gradient_accumulation_steps": "ACCUMULATION",
        "learning_rate": "LEARNING_RATE",
    }
    return {"max_length": "LENGTH"} | given | named | {"max_steps": "args.max_steps", "use_cpu": "args.cpu"}


def _upcast(recipe: Recipe) -> str:
    """The lines that make 4-bit layers' adapters fp32 again; empty where they may stay as TRL makes them."""
    if recipe.precision == "mixed_fp16":
        return _UPCAST.format(why="TRL makes them bf16, whose gradients the scaler of fp16 does not take")
    return _UPCAST.format(why="TRL makes them bf16; the plan counts them in fp32") if recipe.stage else ""


_UPCAST = """for parameter in trainer.model.parameters():
    if parameter.requires_grad:  # {why}
        parameter.data = parameter.data.float()
del parameter  # the last one, whole: FSDP2 would take it to the card as it is
"""
_PLACE = 'device = "cpu" if args.cpu else PartialState().local_process_index\n'
_TILES = "SFTTrainer makes its logits in tiles; the plan counts whole ones. "
_SCRIPT = '''"""{title}

{command} train.py --text my_text.txt

{tiles}What it takes on the card:
{asked} train.py --text my_text.txt
"""

import argparse
{of_keeping}from pathlib import Path

import torch
{of_place}from datasets import Dataset
{peft}{of_checkpoint}from transformers import AutoModelForCausalLM, AutoTokenizer{bits}
{of_transformers}from trl import SFTConfig, SFTTrainer

{head}
# Before the model: it sets up the process that this rank is.
arguments = SFTConfig(
    args.output,
{arguments})
{place}dtype = torch.float32 if args.cpu else torch.{dtype}  # of the weights

{blocks}if not blocks:
    raise SystemExit(f"{{args.text}}: {{len(ids)}} tokens are fewer than one block of {{LENGTH}}.")
dataset = Dataset.from_list([{{"input_ids": block}} for block in blocks])

{model}{keeping}{adapters}trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=dataset,
    processing_class=tokenizer,
{peft_config})
{upcast}trainer.train()
trainer.save_model(args.output)
'''
