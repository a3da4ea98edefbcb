"""What every kind of file is told: the plan as arguments of the libraries, and the words about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from ...models.adapters import add_adapters
from ...models.build import build_model
from ...models.configs import load_config

if TYPE_CHECKING:
    from ..plans import Plan, Recipe


def learning_rate(recipe: Recipe) -> float:
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


def weights_dtype(recipe: Recipe) -> str:
    """torch's name of the type in which the weights are loaded."""
    if recipe.precision == "bf16" or (recipe.method != "full" and recipe.precision != "fp32"):
        return "bfloat16" if "bf16" in recipe.precision else "float16"
    return "float32"


def json_text(values: dict[str, Any]) -> str:
    """A file of JSON."""
    return json.dumps(values, indent=2) + "\n"


def accelerate_yaml(plan: Plan) -> str:
    """What `accelerate launch --config_file` reads."""
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


def docstring(plan: Plan) -> str:
    """What a script says of itself first: the plan, and what to know before training so."""
    return "\n".join(filter(None, [_english(plan), _caution(plan.recipe)]))


def _english(plan: Plan) -> str:
    recipe = plan.recipe
    parts = [recipe.method, recipe.precision, recipe.optimizer, f"{plan.micro_batch} x {plan.accumulation}"]
    parts += [f"ZeRO-{recipe.stage}"] if recipe.stage else []
    parts += ["checkpointing"] if recipe.checkpointing else []
    return ", ".join([*parts, f"{plan.request.gpus} x {plan.request.gpu}"])


def _caution(recipe: Recipe) -> str:
    return "\nWeights in bf16 round small updates away: see that the loss falls." if recipe.caution else ""
