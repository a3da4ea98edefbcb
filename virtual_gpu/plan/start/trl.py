"""A configuration of TRL, as `trl sft --config FILE` reads it.

TRL 1.10 (f2cd577, 2026-07): trainer/sft_config.py and base_config.py (gradient checkpointing on, bf16 on without fp16,
length 1024), trainer/model_config.py (weights in fp32, LoRA r 16 and dropout 0.05, no double quantization),
trainer/utils.py. TRL 1.16: the loss from tiles of the logits (`models.fused_head`). SFTTrainer does not call
`prepare_model_for_kbit_training`: what is not 4-bit stays in `dtype`. Adapters on bf16 weights lie in bf16 there and in
fp32 here: at most 14 bytes a parameter of them too many.
"""

from __future__ import annotations

from typing import Any

from ...cards import GPUSpec
from ...language import tr
from ...models.configs import checkpoint_dtype, load_config
from ...models.fused_head import has_fused_head
from ...step.setting import Setting
from . import hugging_face
from .keys import EITHER, LESS, MORE, Keys, free, off

NAME = "TRL"
METHODS = ("full", "lora", "qlora")
_ONLY = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_text_field", "use_peft", "lora_r", "max_length",
    "lora_target_modules", "load_in_4bit", "max_seq_length", "dtype", "torch_dtype", "attn_implementation",
    "packing_strategy", "padding_free", "assistant_only_loss", "completion_only_loss", "lora_task_type",
)  # fmt: skip
_EFFECTS = {
    LESS: ("activation_offloading",),
    MORE: ("use_dora", "lora_modules_to_save", "lora_target_parameters"),
    EITHER: ("accelerate_config", "model_init_kwargs"),
}


def knows(values: dict[str, Any]) -> bool:
    """Whether a file with these keys is one."""
    return "model_name_or_path" in values or bool({*values} & {*_ONLY})


def read(keys: Keys, spec: GPUSpec, gpus: int, peft: str | None) -> tuple[dict[str, Any], int]:
    """(fields of a Setting, ZeRO's stage)."""
    keys.refuse("load_in_8bit")
    found = hugging_face.common(keys, checkpointing=True)
    found |= {
        "model_id": keys.word("model_name_or_path"),
        "sequence_length": keys.whole("max_length", keys.whole("max_seq_length", 1024)),
        "lora_rank": keys.whole("lora_r", 16),
        "lora_dropout": keys.share("lora_dropout", 0.05),
        "lora_targets": _targets(keys.words("lora_target_modules")),
        "double_quantization": keys.flag("use_bnb_nested_quant"),
        "rest_in_fp32": False,
    }
    quantized = keys.flag("load_in_4bit")
    found["peft"] = ("qlora" if quantized else "lora") if keys.flag("use_peft") else None
    found["precision"] = _precision(keys, found["model_id"], found["peft"])
    if "attn_implementation" in keys.document.values and keys.get("attn_implementation") == "eager":
        found["attention"] = "eager"
    stage = hugging_face.shards(keys, gpus)
    loss = keys.word("loss_type", "nll", among=("nll", "chunked_nll", "dft"))
    smooths = loss != "dft" and not off(keys.document.values.get("label_smoothing_factor"))  # from all logits at once
    found["fused_lm_head"] = fused = has_fused_head() and not stage and not smooths
    if not fused and not smooths:
        keys.note(
            "loss_type", LESS,
            tr(ko="로짓을 통째로 둔 것으로 셌다. 조각내는 TRL(1.16의 기본값)은 덜 든다",
               en="counted with all logits at once; TRL that makes them in tiles (the default of 1.16) takes less"),
        )  # fmt: skip
    effects = {effect: (*names, *hugging_face.EFFECTS[effect]) for effect, names in _EFFECTS.items()}
    keys.rest(effects, hugging_face.free_names() | free(NAME))
    return found, stage


def _targets(names: tuple[str, ...]) -> str | tuple[str, ...]:
    return names[0] if names == ("all-linear",) else names or "attention"


def _precision(keys: Keys, model: str | None, peft: str | None) -> str:
    computes = hugging_face.autocast(keys, bf16=True)
    name = "dtype" if "dtype" in keys.document.values else "torch_dtype"
    dtype = keys.word(name, "float32", among=("auto", "bfloat16", "float16", "float32"))
    if dtype == "auto" and model is not None:
        dtype = str(checkpoint_dtype(model, load_config(model))).removeprefix("torch.")
    stored = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": "bf16"}[dtype]
    if computes is None or stored == "fp32":
        return f"mixed_{computes}" if computes else stored
    if stored != computes or (stored == "fp16" and peft is None):
        raise keys.not_counted(name, f"{dtype}, {computes}")
    return f"autocast_{computes}"


def write(keys: Keys, old: Setting, new: Setting) -> dict[str, Any]:
    """key → value of each line that makes the one setting the other."""
    found = hugging_face.changed(keys, old, new, sequence_length="max_length")
    if new.peft != old.peft:
        found |= {"use_peft": True} if old.peft is None else {}
        found |= {"load_in_4bit": True} if new.peft == "qlora" else {}
    if new.precision != old.precision and new.precision.startswith("autocast"):
        found["dtype"] = "bfloat16" if "bf16" in new.precision else "float16"
    return found
