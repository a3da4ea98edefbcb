"""A recipe's configuration of torchtune, as `tune run RECIPE --config FILE` reads it.

torchtune 0.7.0 (bd2a0fc, 2026-04): recipes/{full,lora}_finetune_{single_device,distributed}.py (all in `dtype`, without
autocast; distributed is FSDP2 that reshards), models/*/_model_builders.py. Its layers are its own: counted are those of
transformers with the same shapes.
"""

from __future__ import annotations

import re
from typing import Any

from ...cards import GPUSpec
from ...errors import NotSupported
from ...language import tr
from ...models.attention import REPEATED
from ...step.own_code import IN_BACKWARD
from ...step.setting import Setting
from . import hugging_face
from .keys import EITHER, LESS, MORE, Keys, free, off

NAME = "torchtune"
METHODS = ("lora", "qlora")  # full fine-tuning is another recipe, not another line
# builder → the model with these shapes on the hub
_MODELS = (
    (r"llama2_(\d+)b", r"meta-llama/Llama-2-\1b-hf"),
    (r"llama3(?:_1|_3)?_(8|70|405)b", r"meta-llama/Llama-3.1-\1B"),
    (r"llama3_2_(1|3)b", r"meta-llama/Llama-3.2-\1B"),
    (r"qwen2_5_(\d+)(?:_(5))?b(?:_base|_instruct)?", r"Qwen/Qwen2.5-\1.\2B"),
    (r"qwen3_(\d+)(?:_(\d))?b(?:_base|_instruct)?", r"Qwen/Qwen3-\1.\2B"),
    (r"mistral_7b", "mistralai/Mistral-7B-v0.1"),
    (r"gemma2_(\d+)b", r"google/gemma-2-\1b"),
    (r"phi3_mini", "microsoft/Phi-3-mini-4k-instruct"),
    (r"phi4_14b", "microsoft/phi-4"),
)
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw",
}
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_FUSED_IN_PHI = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
_MLP = ("gate_proj", "up_proj", "down_proj")
_LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")
_OF_OTHER_RECIPES = (
    "teacher_model", "reward_and_value_model", "policy_model", "ref_policy_model", "ref_policy_checkpointer",
    "quantizer", "tasks",
)  # fmt: skip
_EFFECTS = {
    LESS: ("enable_activation_offloading", "fsdp_cpu_offload"),
    EITHER: ("compile", "tensor_parallel_dim", "data_parallel_replicate_dim", "context_parallel_dim",
             "enable_fp8_training", "ac_mode", "ac_option"),
}  # fmt: skip


def knows(values: dict[str, Any]) -> bool:
    """Whether a file with these keys is one."""
    return any(isinstance(value, dict) and "_component_" in value for value in values.values())


def read(
    keys: Keys, spec: GPUSpec, gpus: int, peft: str | None, objective: str | None = None
) -> tuple[dict[str, Any], int]:
    """(fields of a Setting, ZeRO's stage)."""
    if (other := _not_fine_tuning(keys)) is not None:
        raise keys.not_counted(other, tr(ko="레시피 full_finetune과 lora_finetune만 센다",
                                         en="the recipes full_finetune and lora_finetune are counted"))  # fmt: skip
    builder = str(keys.word("model._component_", "")).split(".")[-1]
    found_builder = re.fullmatch(r"(lora_|qlora_)?(.+)", builder)
    kind, base = found_builder.groups() if found_builder else ("", "")
    quantized = kind == "qlora_" or keys.flag("model.quantize_base")
    found = {
        "model_id": _model(keys, base),
        "sequence_length": keys.whole("tokenizer.max_seq_len", None),
        "batch_size": keys.whole("batch_size", None),
        "gradient_accumulation_steps": keys.whole("gradient_accumulation_steps", 1),
        "gradient_checkpointing": keys.flag("enable_activation_checkpointing"),
        "optimizer": _optimizer(keys),
        "precision": keys.word("dtype", "bf16", among=("bf16", "fp32")),
        "peft": ("qlora" if quantized else "lora") if kind else None,
        "rest_in_fp32": False,
        "attention": REPEATED,  # on every card (torchtune/modules/attention.py: expanded, then copied by reshape)
    }
    if keys.flag("optimizer_in_bwd"):
        alone = gpus == 1 and found["gradient_accumulation_steps"] == 1
        if alone and found["optimizer"] == "adamw_fused" and not kind:
            found["optimizer"] = IN_BACKWARD
        else:
            keys.note("optimizer_in_bwd", LESS)
    if found["batch_size"] is None:
        raise keys.wrong("batch_size", tr(ko="있어야 한다", en="must be there"))
    if kind:
        found |= _lora(keys, quantized)
    loss = str(keys.get("loss._component_", "")).split(".")[-1]
    if loss == "LinearCrossEntropyLoss":
        found["fused_lm_head"] = hugging_face.by_tiles(keys, "loss")
    elif loss == "CEWithChunkedOutputLoss":
        keys.note("loss", LESS, tr(ko="로짓을 통째로 둔 것으로 셌다", en="counted with all logits at once"))
    if kind and gpus > 1:
        keys.note("dtype", LESS, tr(ko="나눈 어댑터는 fp32로 셌다", en="adapters that are split are counted in fp32"))
    reshards = keys.flag("fsdp_reshard_after_forward", True)
    keys.rest(_EFFECTS, free(NAME) - {"fsdp_reshard_after_forward"})
    return found, (3 if reshards else 2) if gpus > 1 else 0


def _not_fine_tuning(keys: Keys) -> str | None:
    """A key by which the file is another recipe's: preferences, distillation, rewards, QAT, evaluation."""
    values = keys.document.values
    loss = str(keys.get("loss._component_", "")).split(".")[-1]
    if loss not in ("", *_LOSSES):
        return "loss._component_"
    return next((name for name in _OF_OTHER_RECIPES if not off(values.get(name))), None)


def _model(keys: Keys, base: str) -> str | None:
    for pattern, name in _MODELS:
        if found := re.fullmatch(pattern, base):
            return found.expand(name).replace(".B", "B")
    return None  # what --model says


def _optimizer(keys: Keys) -> str:
    name = keys.word("optimizer._component_", "torch.optim.AdamW", among=_OPTIMIZERS)
    return "adamw_fused" if name == "torch.optim.AdamW" and keys.flag("optimizer.fused") else _OPTIMIZERS[name]


def may_step_in_backward(keys: Keys, start: Setting) -> bool:
    """Whether `optimizer_in_bwd` alone makes another step of it: its recipes refuse it with accumulation and clipping.

    Counted of fused AdamW, of which it steps one parameter as all of them.
    """
    alone = start.gradient_accumulation_steps == 1 and keys.get("clip_grad_norm") is None
    return alone and start.optimizer == "adamw_fused" and not start.peft


def _lora(keys: Keys, quantized: bool) -> dict[str, Any]:
    names = keys.words("model.lora_attn_modules")
    unknown = [name for name in names if name not in _ATTENTION]
    if unknown or not names:
        raise keys.wrong("model.lora_attn_modules", ", ".join(_ATTENTION))
    targets = [_ATTENTION[name] for name in names]
    targets += _MLP if keys.flag("model.apply_lora_to_mlp") else ()
    if "phi" in str(keys.get("model._component_")):  # whose layers are one in transformers' model
        targets = [*dict.fromkeys(_FUSED_IN_PHI.get(name, name) for name in targets)]
    if keys.flag("model.apply_lora_to_output"):
        keys.note("model.apply_lora_to_output", MORE)
    if keys.flag("model.use_dora"):
        keys.note("model.use_dora", MORE)
    if quantized and len(targets) < len(_ATTENTION) + len(_MLP):
        keys.note("model.lora_attn_modules", MORE, tr(ko="torchtune은 LoRA를 붙인 층만 4비트로 둔다",
                                                      en="torchtune quantizes only layers with LoRA"))  # fmt: skip
    return {
        "lora_rank": keys.whole("model.lora_rank", 8),
        "lora_dropout": keys.share("model.lora_dropout", 0.0),
        "lora_targets": tuple(targets),
    }


def write(keys: Keys, old: Setting, new: Setting) -> dict[str, Any]:
    """key → value of each line that makes the one setting the other; NotSupported where more than a line changes."""
    names = {
        "batch_size": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_checkpointing": "enable_activation_checkpointing",
        "sequence_length": "tokenizer.max_seq_len",
    }
    found = {key: getattr(new, name) for name, key in names.items() if getattr(new, name) != getattr(old, name)}
    if new.precision != old.precision or (new.peft != old.peft and old.peft is None):
        raise NotSupported("torchtune")
    if new.optimizer == IN_BACKWARD != old.optimizer:
        found["optimizer_in_bwd"] = True
    elif new.optimizer != old.optimizer:
        if keys.get("optimizer.fused") is not None:
            raise NotSupported("torchtune")  # bitsandbytes' take no `fused`: the line would have to go
        found["optimizer._component_"] = {ours: theirs for theirs, ours in _OPTIMIZERS.items()}[new.optimizer]
    if new.peft != old.peft:
        found["model._component_"] = re.sub(r"\.lora_(?=[^.]+$)", ".qlora_", keys.get("model._component_"))
    return found
