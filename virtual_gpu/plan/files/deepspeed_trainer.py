"""transformers' Trainer with DeepSpeed's ZeRO: the Trainer's script, and DeepSpeed's configuration beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...language import tr
from . import trainer
from .settings import json_text, literal, lora_config, torchrun

if TYPE_CHECKING:
    from ..plans import Plan

NAMES = ("train.py", "training_arguments.json", "ds_config.json", "lora_config.json")


def cannot(plan: Plan) -> str:
    """Why these files could not train as the plan says; empty where they can."""
    recipe = plan.recipe
    if not recipe.stage:
        return tr(ko="나누지 않는 계획에는 ZeRO가 필요 없다", en="a plan that is not split needs no ZeRO")
    if recipe.cpu_offload:
        # Of a small Llama, run on a virtual card (0.19.8): 1.35 times the plan on one GPU, 1.03 on each of four
        return tr(
            ko="DeepSpeed의 오프로드는 카드와 RAM을 계획보다 더 쓴다",
            en="DeepSpeed's own offload takes more of the card and of the RAM than the plan",
        )
    if recipe.method == "qlora":
        return tr(ko="4비트 가중치는 나누어 보지 않았다", en="4-bit weights were not split with it")
    if recipe.kept:
        return tr(
            ko="블록이 결과를 남기는 것은 함께 실행해 보지 않았다", en="blocks that keep results were not run with it"
        )
    if recipe.replicas > 1:
        return tr(
            ko="모델 여러 벌(HSDP)은 실행해 보지 않았다", en="several copies of the model (HSDP) were not run with it"
        )
    if "mixed" not in recipe.precision:
        return tr(ko="DeepSpeed는 가중치를 fp32로도 한 벌 둔다", en="DeepSpeed keeps the weights in fp32 besides")
    return ""


def files(plan: Plan) -> dict[str, str]:
    """name → text: train.py, training_arguments.json, ds_config.json, and for adapters lora_config.json."""
    arguments = trainer.training_arguments(plan) | {"gradient_checkpointing": plan.recipe.checkpointing}
    if plan.recipe.offload:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False, "offload": True}
    arguments.pop("accelerator_config", None)  # ZeRO splits the gradients of each micro-batch without being told
    command = f"{torchrun(plan.request.gpus)} train.py --text my_text.txt"
    asked = f"virtual-gpu run --gpu {literal(plan.request.gpu)} --gpus {plan.request.gpus} {command}"
    found = {
        "train.py": trainer.script(plan, usage=_USAGE.format(command=command, asked=asked), more=_MORE),
        "training_arguments.json": json_text(arguments),
        "ds_config.json": json_text(configuration(plan.recipe.stage)),
    }
    return found | ({"lora_config.json": json_text(lora_config(plan))} if plan.recipe.method != "full" else {})


def configuration(stage: int) -> dict[str, Any]:
    """DeepSpeed's: the stage; "auto" is what TrainingArguments or the model's width say.

    DeepSpeed's own buckets are 500 million elements, 1 GB each, and at stage 3 it lets a billion gathered parameters
    lie: what is let go at once stays below the plan, which is FSDP2's.
    """
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    else:
        zero |= {"allgather_bucket_size": 50_000_000}
    automatic = (
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
    )  # fmt: skip
    return {
        "zero_optimization": zero,
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
    } | dict.fromkeys(automatic, "auto")


_USAGE = """pip install deepspeed
{command}

DeepSpeed's buffers are not the plan's, which counts FSDP2. What it takes on the card:
{asked}
With --cpu it rehearses without DeepSpeed."""
_MORE = """else:
    settings["deepspeed"] = read("ds_config.json")
"""
