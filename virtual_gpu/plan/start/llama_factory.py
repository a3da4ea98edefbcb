"""A configuration of LLaMA-Factory, as `llamafactory-cli train FILE` reads it.

LLaMA-Factory 0.9.6.dev0 (ff6d4d1, 2026-08): hparams/{finetuning,model,data}_args.py (LoRA by default, rank 8 on every
linear layer without dropout, cutoff 2048, checkpointing unless disabled), model/adapter.py (what is trained is cast to
fp32 unless pure_bf16), model/model_utils/quantization.py (double quantization) and checkpointing.py
(`prepare_model_for_kbit_training` is not called: what is not 4-bit stays in the compute type). `stage: dpo`:
train/dpo/trainer.py (whole logits, see `step.pairs`), train/trainer_utils.py (of all weights a second model as the
reference, which model/loader.py leaves in the type that is computed in).
"""

from __future__ import annotations

from typing import Any

from ...cards import GPUSpec
from ...language import tr
from ...step.setting import Setting
from . import hugging_face
from .keys import EITHER, LESS, MORE, Keys, free, off

NAME = "LLaMA-Factory"
METHODS = ("full", "lora", "qlora")
# "auto" is FlashAttention for Gemma 2 where it is installed (model/model_utils/attention.py).
FLASH = {"flash_attn": "sdpa"}
PADS_ONE = True  # to a multiple of 8 tokens (train/sft/workflow.py)
_ONLY = (
    "finetuning_type", "cutoff_len", "stage", "template", "lora_target", "lora_rank", "quantization_bit", "pure_bf16",
    "dataset_dir", "disable_gradient_checkpointing", "quantization_method", "flash_attn", "additional_target",
)  # fmt: skip
_EFFECTS = {
    LESS: ("use_unsloth", "use_unsloth_gc"),
    MORE: (
        "upcast_layernorm", "upcast_lmhead_output", "resize_vocab", "use_dora", "add_tokens",
        "add_special_tokens", "new_special_tokens_config", "use_asft_loss", "use_eaft_loss",
        "neat_packing",  # but for flash_attn: fa2 the collator makes a mask of length × length
    ),
    EITHER: ("shift_attn", "mixture_of_depths", "fp8", "use_kt", "use_v1_kernels", "use_dft_loss",
             "use_mca", "use_megatron_bridge", "use_hyper_parallel", "hyper_parallel_cp_size"),
}  # fmt: skip


_OF_OTHERS = ("train_type", "tuner_type")  # ms-swift's files share names
_NO_TRAINING = ("export_dir", "infer_backend", "do_predict")


def knows(values: dict[str, Any]) -> bool:
    """Whether a file with these keys is one."""
    return bool({*values} & {*_ONLY}) and not {*values} & {*_OF_OTHERS}


def read(
    keys: Keys, spec: GPUSpec, gpus: int, peft: str | None, objective: str | None = None
) -> tuple[dict[str, Any], int]:
    """(fields of a Setting, ZeRO's stage)."""
    untrained = [name for name in _NO_TRAINING if not off(keys.document.values.get(name))]
    if untrained and not keys.flag("do_train"):
        raise keys.not_counted(untrained[0], tr(ko="학습하는 파일이 아니다", en="this file trains nothing"))
    trained = keys.word("stage", "sft", among=("sft", "pt", "dpo"))
    pairs = trained == "dpo"
    packs = keys.flag("packing", trained == "pt") or not off(keys.document.values.get("neat_packing"))
    if pairs:
        keys.word("pref_loss", "sigmoid", among=("sigmoid", "hinge", "ipo", "kto_pair"))  # others have no reference
        keys.refuse("ref_model", "ref_model_adapters")
    kind = keys.word("finetuning_type", "lora", among=("full", "lora"))
    keys.refuse("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro")
    keys.word("quantization_method", "bnb", among=("bnb", "bitsandbytes"))
    bits = keys.get("quantization_bit")
    if bits not in (None, 4, 8):
        raise keys.not_counted("quantization_bit", f"{bits!r:.60}; 4, 8")
    if bits and kind == "full":
        raise keys.wrong("quantization_bit", "finetuning_type: lora")
    targets = keys.words("lora_target")
    found = hugging_face.common(keys, not keys.flag("disable_gradient_checkpointing"), own=True)
    found["gradient_checkpointing"] |= not keys.flag("disable_gradient_checkpointing")
    found["use_reentrant"] = keys.flag("use_reentrant_gc", True)
    found |= {
        "model_id": keys.word("model_name_or_path"),
        "sequence_length": keys.whole("cutoff_len", 2048),
        "lora_rank": keys.whole("lora_rank", 8),
        "lora_dropout": keys.share("lora_dropout", 0.0),
        "lora_targets": "all-linear" if targets in ((), ("all",)) else targets,
        "double_quantization": keys.flag("double_quantization", True),
        "rest_in_fp32": False,
        "padded": pairs or not packs,
        "peft": None if kind == "full" else "qlora" if bits == 4 else "lora",
        "load_in_8bit": bits == 8,
        "modules_to_save": keys.words("additional_target"),
        "trained_dtype": "" if keys.flag("pure_bf16") else "fp32",
        "precision": _precision(keys, kind == "full", spec),
    }
    if keys.word("flash_attn", "auto") == "disabled":
        found["attention"] = "eager"
    # Its kernels make the loss of pairs from whole logits (model/model_utils/liger_kernel.py, require_logits).
    liger = keys.flag("enable_liger_kernel") or keys.flag("use_liger_kernel")
    if liger and pairs:
        keys.note("enable_liger_kernel", LESS)
    found["fused_lm_head"] = liger and not pairs and hugging_face.by_tiles(keys, "enable_liger_kernel")
    found["gradient_checkpointing"] |= hugging_face.checkpoints_by_fsdp(keys)
    stage = hugging_face.shards(keys, gpus)
    if bits == 8 and stage > 1:
        raise keys.not_counted("quantization_bit", f"8, ZeRO-{stage}")
    if pairs and stage:
        raise keys.not_counted("deepspeed" if "deepspeed" in keys.document.values else "fsdp", "DPO")
    found |= {"objective": "dpo", "reference": "half"} if pairs else {}
    effects = {effect: (*names, *hugging_face.EFFECTS[effect]) for effect, names in _EFFECTS.items()}
    keys.rest(effects, hugging_face.free_names() | free(NAME))
    return found, stage


def _precision(keys: Keys, full: bool, spec: GPUSpec) -> str:
    computes, pure = hugging_face.autocast(keys), keys.flag("pure_bf16")
    if pure:
        return "autocast_bf16" if computes else "bf16"
    if computes:
        return f"{'mixed' if full else 'autocast'}_{computes}"
    return "fp32" if full else "bf16" if spec.has_bf16 else "fp16"


def write(keys: Keys, old: Setting, new: Setting) -> dict[str, Any]:
    """key → value of each line that makes the one setting the other."""
    found = hugging_face.changed(keys, old, new, sequence_length="cutoff_len")
    if new.gradient_checkpointing and not old.gradient_checkpointing:
        found = {key: value for key, value in found.items() if key not in hugging_face.CHECKPOINTING}
        found["disable_gradient_checkpointing"] = False
    if new.peft != old.peft:
        found |= {"finetuning_type": "lora"} if old.peft is None else {}
        found |= {"quantization_bit": 4} if new.peft == "qlora" else {}
        found |= {"pure_bf16": False} if keys.flag("pure_bf16") else {}
    if new.precision == "bf16" and old.precision == "mixed_bf16":
        found |= {"bf16": False, "pure_bf16": True}
    return found
