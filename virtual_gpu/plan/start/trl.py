"""A configuration of TRL, as `trl sft --config FILE` or `trl dpo --config FILE` reads it.

TRL 1.10 (f2cd577, 2026-07): trainer/sft_config.py and base_config.py (gradient checkpointing on, bf16 on without fp16,
length 1024), trainer/model_config.py (weights in fp32, LoRA r 16 and dropout 0.05, no double quantization),
trainer/utils.py. TRL 1.16: the loss from tiles of the logits (`models.fused_head`). Its trainers do not call
`prepare_model_for_kbit_training`: what is not 4-bit stays in `dtype`. Adapters on bf16 weights lie in bf16 there and in
fp32 here: at most 14 bytes a parameter of them too many.

DPO: TRL 1.16, trainer/dpo_config.py, scripts/dpo.py: the defaults are the same. A file that says nothing that only one
of the two has is of SFT, unless the caller says otherwise; one whose keys GRPO's or KTO's file has too is asked about.
"""

from __future__ import annotations

from typing import Any

from ...cards import GPUSpec
from ...language import tr
from ...models.configs import checkpoint_dtype, load_config
from ...models.fused_head import has_fused_head
from ...step.setting import Setting
from . import hugging_face
from .keys import EITHER, LESS, MORE, Keys, end_to_end, free, off

NAME = "TRL"
METHODS = ("full", "lora", "qlora")
_ONLY = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_text_field", "use_peft", "lora_r", "max_length",
    "lora_target_modules", "load_in_4bit", "max_seq_length", "dtype", "torch_dtype", "attn_implementation",
    "packing_strategy", "padding_free", "assistant_only_loss", "completion_only_loss", "lora_task_type",
    "precompute_ref_log_probs",
)  # fmt: skip
_LOSSES = {
    "sft": ("nll", "chunked_nll", "dft"),
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
    ),
}  # fmt: skip
# What DPOConfig has and SFTConfig has not, now or in older versions: what no other trainer has, and what GRPO's, KTO's
# and others have too. Of these nothing changes but numbers, one a token at most.
_OF_DPO_ALONE = (
    "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "loss_weights", "use_weighting", "discopop_tau",
    "rpo_alpha", "reference_free", "force_use_ref_model",
)  # fmt: skip
_OF_DPO = (
    "beta", "label_smoothing", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "disable_dropout",
    "precompute_ref_log_probs", "precompute_ref_batch_size", "max_prompt_length", "max_completion_length",
    "label_pad_token_id", "generate_during_eval", "model_adapter_name", "ref_adapter_name",
)  # fmt: skip
_OF_OTHERS = (  # of GRPO, RLOO, KTO, CPO, rewards and distillation
    "num_generations", "num_iterations", "steps_per_generation", "epsilon", "reward_funcs", "reward_weights",
    "reward_model_name_or_path", "reward_model_path", "use_vllm", "judge", "desirable_weight", "undesirable_weight",
    "cpo_alpha", "simpo_gamma", "center_rewards_coefficient", "teacher_model_name_or_path",
)  # fmt: skip
_EFFECTS_OF_DPO = {LESS: ("reference_free", "use_logits_to_keep"), MORE: ("force_use_ref_model",)}
_EFFECTS = {
    LESS: ("activation_offloading",),
    MORE: ("use_dora", "lora_modules_to_save", "lora_target_parameters"),
    EITHER: ("accelerate_config", "model_init_kwargs"),
}


def knows(values: dict[str, Any]) -> bool:
    """Whether a file with these keys is one."""
    return "model_name_or_path" in values or bool({*values} & {*_ONLY})


def read(
    keys: Keys, spec: GPUSpec, gpus: int, peft: str | None, objective: str | None = None
) -> tuple[dict[str, Any], int]:
    """(fields of a Setting, ZeRO's stage). objective: what the caller says is trained for."""
    keys.refuse("load_in_8bit", *_OF_OTHERS)
    found = hugging_face.common(keys, checkpointing=True)
    whole = "max_length" in keys.document.values and keys.get("max_length") is None  # nothing is cut off
    found |= {
        "model_id": keys.word("model_name_or_path"),
        "sequence_length": None if whole else keys.whole("max_length", keys.whole("max_seq_length", 1024)),
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
    pairs = (objective or _objective(keys)) == "dpo"
    found["padded"] = _pads(keys, pairs)
    if pairs:
        found |= _of_pairs(keys, found, stage)
    loss = _loss(keys, "dpo" if pairs else "sft")
    # From all logits at once.
    smooths = not pairs and "dft" not in loss and not off(keys.document.values.get("label_smoothing_factor"))
    found["fused_lm_head"] = fused = has_fused_head() and (pairs or not stage) and not smooths
    if not fused and not smooths:
        keys.note(
            "loss_type", LESS,
            tr(ko="로짓을 통째로 둔 것으로 셌다. 조각내는 TRL(1.16의 기본값)은 덜 든다",
               en="counted with all logits at once; TRL that makes them in tiles (the default of 1.16) takes less"),
        )  # fmt: skip
    effects = {effect: (*names, *hugging_face.EFFECTS[effect]) for effect, names in _EFFECTS.items()}
    known = free(NAME)
    if pairs:
        effects = {effect: (*names, *_EFFECTS_OF_DPO.get(effect, ())) for effect, names in effects.items()}
        known = known | {*_OF_DPO, *_OF_DPO_ALONE} - {name for names in _EFFECTS_OF_DPO.values() for name in names}
    keys.rest(effects, hugging_face.free_names() | known)
    return found, stage


def _objective(keys: Keys) -> str:
    """What the file is for, by what only one of the two trainers has."""
    losses, said = {*keys.words("loss_type")}, {*keys.document.values}
    if losses & {*_LOSSES["dpo"]} or said & {*_OF_DPO_ALONE}:
        return "dpo"
    if not losses & {*_LOSSES["sft"]} and (shared := [name for name in keys.document.values if name in _OF_DPO]):
        raise keys.wrong(
            shared[0],
            tr(
                ko="DPO만 쓰는 키가 아니다(GRPO, KTO에도 있다). 무엇을 학습하는지 --objective로 준다: dpo, sft",
                en="not of DPO alone (GRPO and KTO have it too): say what is trained by --objective: dpo, sft",
            ),
        )
    return "sft"


def _loss(keys: Keys, objective: str) -> tuple[str, ...]:
    """The losses that are added up; NotSupported for one that the trainer has not, or that is not counted."""
    losses, known = keys.words("loss_type"), _LOSSES[objective]
    if unknown := [loss for loss in losses if loss not in known]:
        raise keys.not_counted(
            "loss_type", f"{unknown[0]!r:.60}; " + tr(ko="세는 값", en="counted") + f": {', '.join(known)}"
        )
    return losses


def _of_pairs(keys: Keys, found: dict[str, Any], stage: int) -> dict[str, Any]:
    """The fields that DPOConfig adds. WrongValue for what DPOTrainer itself refuses."""
    precomputed, first = keys.flag("precompute_ref_log_probs"), keys.whole("precompute_ref_batch_size", 1)
    if stage and "deepspeed" in keys.document.values and (precomputed or not found["peft"]):
        why = tr(
            ko="DeepSpeed가 맡은 기준 모델은 실행해 보지 않았다. fsdp로 나눈 것은 센다",
            en="DPO with a reference that DeepSpeed holds was not run; what fsdp splits is counted",
        )
        raise keys.not_counted("deepspeed", why)
    if stage and not found["peft"] and found["precision"].startswith("autocast"):
        name = "dtype" if "dtype" in keys.document.values else "torch_dtype"
        keys.note(name, LESS, tr(ko="기준 모델을 fp32로 셌다", en="the reference is counted in fp32"))
    keys.get("label_smoothing_factor")  # the Trainer's, which makes no difference to this loss
    if keys.flag("sync_ref_model") and (precomputed or found["peft"]):
        other = "precompute_ref_log_probs" if precomputed else "use_peft"
        raise keys.wrong("sync_ref_model", tr(ko=f"{other}와 함께 켤 수 없다", en=f"not together with {other}"))
    if precomputed and first > found["batch_size"]:
        why = tr(
            ko="기준 로그 확률을 미리 계산하는 순전파는 세지 않았다",
            en="the forwards before the training are not counted",
        )
        keys.note("precompute_ref_batch_size", MORE, why)
    if not keys.flag("disable_dropout", True):
        keys.note("disable_dropout", MORE)
    return {"objective": "dpo", "reference": "precomputed" if precomputed else "same"}


def _pads(keys: Keys, pairs: bool) -> bool:
    """Whether a micro-batch is padded to its longest sample. A note where all its samples are laid end to end.

    DPOTrainer does neither, whatever it is asked (TRL 1.16).
    """
    packs, flat = keys.flag("packing"), keys.flag("padding_free")
    if pairs:
        return True
    if packs and keys.word("packing_strategy", "bfd") != "wrapped":
        flat = True
    if flat and "flash" not in str(keys.get("attn_implementation", "")):
        keys.note("packing" if packs else "padding_free", MORE, end_to_end())
    return not (packs or flat)


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
    if new.reference != old.reference:
        for name in ("sync_ref_model", "dataset_streaming", "streaming"):
            if keys.flag(name):  # DPOTrainer refuses both
                raise keys.wrong(name, "precompute_ref_log_probs")
        found["precompute_ref_log_probs"] = new.reference == "precomputed"
    if new.pairs and new.peft != old.peft and keys.flag("sync_ref_model"):
        raise keys.wrong("sync_ref_model", "use_peft")
    if new.precision != old.precision and new.precision.startswith("autocast"):
        found["dtype"] = "bfloat16" if "bf16" in new.precision else "float16"
    return found
