"""What transformers' Trainer takes of each GPU where DeepSpeed splits it: both run, unchanged, on a virtual rank.

`shards.rank_step` has FSDP2's groups and buffers. DeepSpeed gathers parameter by parameter, keeps what it has gathered
for a while, and reduces in buckets, and of its requests the caching allocator keeps more in pieces; nothing but its own
engine says how much.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cards import GPUSpec
from ..errors import NotSupported
from ..language import tr
from ..models.configs import cached_by_model, load_config
from ..optional import installed
from ..step.optimizers import name_for_trainer
from ..step.setting import Setting
from .deepspeed_rank import STEPS
from .files.deepspeed_trainer import configuration
from .measure import setting_of

if TYPE_CHECKING:
    from .plans import Plan


# What the setting says, whatever the section has.
_OF_THE_SETTING = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
# What the engine is given of a section, and what it is not: that writes files, reports, or says how often it prints.
_GIVEN = frozenset((
    *_OF_THE_SETTING, "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "bf16",
    "fp16", "optimizer", "scheduler", "gradient_clipping", "data_types", "communication_data_type",
    "activation_checkpointing", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
))  # fmt: skip
_FREE = frozenset((
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger",
    "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config", "checkpoint", "elasticity", "autotuning", "aio",
))  # fmt: skip


class DeepSpeedStep(NamedTuple):
    """Bytes of a GPU: in which the allocator gets through, what tensors hold at most, what it reserves with room."""

    card: int
    allocated: int
    reserved: int


def named() -> str:
    """DeepSpeed with its version."""
    return f"DeepSpeed {installed('deepspeed')['deepspeed']}"


def waiting() -> str:
    """What is told while it runs."""
    return tr(ko="DeepSpeed의 엔진을 실행한다. 30초는 걸린다.", en="DeepSpeed's engine runs: half a minute and more.")


def why_not(setting: Setting, section: Mapping[str, Any]) -> str:
    """Why the engine is not run for this setting and this section of a configuration; empty where it is."""
    if not installed("deepspeed"):
        return tr(ko="DeepSpeed가 설치되어 있지 않다", en="DeepSpeed is not installed")
    quantized = setting.peft == "qlora" or setting.load_in_8bit
    if setting.objective != "sft" or quantized or "bf16" not in setting.precision or setting.kept_results:
        return tr(
            ko="bf16인 전체 미세 조정과 LoRA의 SFT만 엔진으로 실행한다",
            en="full fine-tuning and LoRA by SFT in bf16 alone are run by it",
        )
    if others := [key for key in section if key not in _GIVEN | _FREE and section[key]]:
        return tr(ko=f"{others[0]}: 함께 실행해 보지 않았다", en=f"{others[0]} was not run with it")
    zero = section.get("zero_optimization", {})
    if any(_device(zero, part) != "none" for part in ("offload_optimizer", "offload_param")):
        return tr(ko="CPU로 내리는 것은 실행하지 않는다", en="what it sends to the CPU is not run")
    return ""


def as_fsdp(why: str) -> str:
    """What is said of a count as FSDP2 splits. The range is of seven settings, in benchmarks/README.md."""
    return tr(
        ko=f"FSDP2가 나누는 것으로 셌다({why}). 실행해 본 일곱 설정에서 DeepSpeed의 엔진은 그보다 10% 덜 들기도, "
        "22% 더 들기도 했다",
        en=f"counted as FSDP2 splits ({why}); in seven settings that were run, DeepSpeed's engine took from 10 % less "
        "to 22 % more",
    )


def deepspeed_step(setting: Setting, section: Mapping[str, Any], spec: GPUSpec, gpus: int) -> DeepSpeedStep:
    """Two optimizer steps of the setting on the first of `gpus` cards, by the engine with this section ("auto" too).

    NotSupported where `why_not` says so, or where the engine does not come through.
    """
    if why := why_not(setting, section):
        raise NotSupported(why)
    return _step(setting, json.dumps(section, sort_keys=True), spec.name, gpus)


def of_plan(plan: Plan) -> DeepSpeedStep:
    """What the engine takes of a plan by the configuration that its files give it; NotSupported as `deepspeed_step`."""
    setting = setting_of(plan.request, plan.recipe, plan.micro_batch, plan.accumulation)
    return deepspeed_step(setting, configuration(plan.recipe.stage), plan.request.spec, plan.request.gpus)


def _device(zero: Mapping[str, Any], part: str) -> str:
    said = zero.get(part)
    return str(said.get("device", "none")) if isinstance(said, Mapping) else "none"


@cached_by_model
def _step(setting: Setting, section: str, gpu: str, gpus: int) -> DeepSpeedStep:
    from ..program.again import run_again  # brings all of a program's card
    from ..program.report import FITS

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        load_config(setting.model_id).save_pretrained(folder)
        asked = Path(folder, "asked.json")
        asked.write_text(json.dumps(_asked(setting, json.loads(section), folder)), encoding="utf-8")
        # The card's size says nothing here: `enough` is what is asked.
        options = ["--gpu", gpu, "--gpus", str(gpus), "--steps", str(STEPS), "--unlimited"]
        program = str(Path(__file__).with_name("deepspeed_rank.py"))
        command = ["torchrun", "--nproc_per_node", str(gpus), program, str(asked)]
        report = run_again("DeepSpeed", options, command).report
    if report["status"] != FITS or report["steps"] < STEPS:
        raise NotSupported(
            tr(
                ko=f"DeepSpeed의 엔진이 끝까지 가지 못했다: {report['error']!s:.200}",
                en=f"DeepSpeed's engine did not get through: {report['error']!s:.200}",
            )
        )
    return DeepSpeedStep(report["enough"], report["allocated"], report["reserved"])


def _asked(setting: Setting, section: dict[str, Any], folder: str) -> dict[str, Any]:
    """What `deepspeed_rank` is told."""
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": setting.batch_size,
        # From the second micro-batch on each is like the one before.
        "gradient_accumulation_steps": min(setting.gradient_accumulation_steps, 2),
        "gradient_checkpointing": setting.gradient_checkpointing,
        "optim": name_for_trainer(setting.optimizer),
        "bf16": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "deepspeed": {key: section[key] for key in section if key in _GIVEN} | dict.fromkeys(_OF_THE_SETTING, "auto"),
    }
    if setting.gradient_checkpointing:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False} | (
            {"offload": True} if setting.offload_checkpoints else {}
        )
    lora = {
        "rank": setting.lora_rank, "targets": setting.lora_targets, "lora_dropout": setting.lora_dropout,
        "modules_to_save": setting.modules_to_save,
    }  # fmt: skip
    return {
        "model": folder,
        "arguments": arguments,
        "rows": setting.batch_size * arguments["gradient_accumulation_steps"],
        "length": setting.sequence_length,
        "padded": setting.padded,
        "attention": None if setting.attention == "sdpa" else setting.attention,  # which some models have not
        "fused": setting.fused_lm_head,
        "lora": lora if setting.peft else None,
    }
