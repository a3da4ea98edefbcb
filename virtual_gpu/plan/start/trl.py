"""A configuration of TRL, as `trl sft`, `trl dpo` or `trl grpo --config FILE` reads it.

TRL 1.10 (f2cd577, 2026-07): trainer/sft_config.py and base_config.py (gradient checkpointing on, bf16 on without fp16,
length 1024), trainer/model_config.py (weights in fp32, LoRA r 16 and dropout 0.05, no double quantization),
trainer/utils.py. TRL 1.16: the loss from tiles of the logits (`models.fused_head`). Its trainers do not call
`prepare_model_for_kbit_training`: what is not 4-bit stays in `dtype`. Adapters on bf16 weights lie in bf16 there and in
fp32 here: at most 14 bytes a parameter of them too many.

DPO: TRL 1.16, trainer/dpo_config.py, scripts/dpo.py: the defaults are the same. A file that says nothing that only one
of the two has is of SFT, unless the caller says otherwise; one whose keys GRPO's or KTO's file has too is asked about.
GRPO: TRL 1.16, trainer/grpo_config.py: completions of 512 tokens, 8 of a prompt; how long a prompt is no file says, but
of older TRL (max_prompt_length).
"""

from __future__ import annotations

from typing import Any

from ...cards import GPUSpec
from ...language import tr
from ...models.configs import checkpoint_dtype, load_config
from ...models.fused_head import has_fused_head, has_logits_by_row
from ...step.setting import ASLEEP, AWAKE, Setting
from . import hugging_face
from .keys import EITHER, LESS, MORE, Keys, end_to_end, free, off

NAME = "TRL"
METHODS = ("full", "lora", "qlora")
FLASH = {"attn_implementation": "sdpa"}  # key → value of a line that takes sdpa in place of FlashAttention
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
    "grpo": ("grpo", "dapo", "dr_grpo", "bnpo", "luspo", "cispo"),
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
_OF_GRPO = (  # and RLOO; of these nothing changes but numbers, one a token at most
    "num_generations", "num_iterations", "steps_per_generation", "epsilon", "reward_funcs", "reward_weights",
    "use_vllm",
)  # fmt: skip
_OF_OTHERS = (  # of KTO, CPO, rewards and distillation
    "reward_model_path", "judge", "desirable_weight", "undesirable_weight", "cpo_alpha", "simpo_gamma",
    "center_rewards_coefficient", "teacher_model_name_or_path",
)  # fmt: skip
# GRPOConfig's arguments that make no difference to a step's memory, or are read in `_of_completions`.
_FREE_IN_GRPO = (
    *_OF_GRPO, "reward_model_name_or_path", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "delta",
    "epsilon_high", "importance_sampling_level", "scale_rewards", "mask_truncated_completions", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "log_completions", "num_completions_to_print", "max_prompt_length", "max_completion_length",
    "generation_batch_size", "num_generations_eval", "chat_template_kwargs", "log_unique_prompts",
    "ds3_gather_for_generation", "multi_objective_aggregation", "use_bias_correction_kl", "remove_unused_columns",
    "vllm_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_enable_sleep_mode", "vllm_model_impl",
    "vllm_tensor_parallel_size", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_group_port", "vllm_structured_outputs_regex", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
)  # fmt: skip
_NOT_IN_GRPO = (  # what makes another step of it
    "use_transformers_continuous_batching", "use_transformers_paged", "cast_lm_head_to_fp32", "disable_dropout",
    "cache_implementation", "pad_to_multiple_of", "sync_ref_model", "use_liger_loss", "entropy_coef",
    "use_adaptive_entropy", "off_policy_mask_threshold",
)  # fmt: skip
_EFFECTS_OF_DPO = {LESS: ("reference_free", "use_logits_to_keep"), MORE: ("force_use_ref_model",)}
_EFFECTS = {
    LESS: ("activation_offloading",),
    MORE: ("use_dora", "lora_target_parameters"),
    EITHER: ("accelerate_config", "model_init_kwargs"),
}


def knows(values: dict[str, Any]) -> bool:
    """Whether a file with these keys is one."""
    litgpt = "checkpoint_dir" in values and isinstance(values.get("train"), dict)
    return "model_name_or_path" in values or (bool({*values} & {*_ONLY}) and not litgpt)


def read(
    keys: Keys, spec: GPUSpec, gpus: int, peft: str | None, objective: str | None = None
) -> tuple[dict[str, Any], int]:
    """(fields of a Setting, ZeRO's stage). objective: what the caller says is trained for.

    Of GRPO with an engine on the same card there is "engine" beside the fields.
    """
    keys.refuse(*_OF_OTHERS)
    objective = objective or _objective(keys)
    keys.refuse(*(() if objective == "grpo" else (*_OF_GRPO, "reward_model_name_or_path")))
    found = hugging_face.common(keys, checkpointing=True)
    whole = "max_length" in keys.document.values and keys.get("max_length") is None  # nothing is cut off
    found |= {
        "model_id": keys.word("model_name_or_path"),
        "sequence_length": None if whole else keys.whole("max_length", keys.whole("max_seq_length", 1024)),
        "lora_rank": keys.whole("lora_r", 16),
        "lora_dropout": keys.share("lora_dropout", 0.05),
        "lora_targets": _targets(keys.words("lora_target_modules")),
        "modules_to_save": keys.words("lora_modules_to_save"),
        "double_quantization": keys.flag("use_bnb_nested_quant"),
        "rest_in_fp32": False,
    }
    quantized = keys.flag("load_in_4bit")
    found["peft"] = ("qlora" if quantized else "lora") if keys.flag("use_peft") else None
    found["precision"] = _precision(keys, found["model_id"], found["peft"])
    if "attn_implementation" in keys.document.values and keys.get("attn_implementation") == "eager":
        found["attention"] = "eager"
    if quantized and not found["peft"]:
        raise keys.wrong("load_in_4bit", tr(ko="use_peft: true와 함께 적는다", en="goes with use_peft: true"))
    found["gradient_checkpointing"] |= hugging_face.checkpoints_by_fsdp(keys)
    stage = hugging_face.shards(keys, gpus)
    found["load_in_8bit"] = not quantized and hugging_face.in_8_bits(keys, found["peft"] is not None, stage)
    found["trained_dtype"] = "bf16" if quantized or found["load_in_8bit"] else ""  # sft_trainer.py, "When using QLoRA"
    if keys.flag("use_liger_kernel") and objective != "sft":  # whose loss is from tiles anyway
        keys.note("use_liger_kernel", LESS)
    pairs, sft = objective == "dpo", objective == "sft"
    found["padded"] = _pads(keys, not sft)
    if pairs:
        found |= _of_pairs(keys, found, stage)
    if objective == "grpo":
        found |= _of_completions(keys, found, stage, gpus)
    loss = _loss(keys, objective)
    # From all logits at once.
    smooths = sft and "dft" not in loss and not off(keys.document.values.get("label_smoothing_factor"))
    found["fused_lm_head"] = fused = has_fused_head() and not smooths
    found["logits_by_row"] = not fused
    if pairs and not fused and (keys.flag("use_weighting") or "sft" in loss):
        keys.note("use_weighting" if keys.flag("use_weighting") else "loss_type", MORE)
    if not fused and not smooths:
        keys.note(
            "loss_type", EITHER if pairs and not has_logits_by_row() else LESS,
            tr(ko="로짓을 통째로 둔 것으로 셌다. 조각내는 TRL(1.16의 기본값)은 덜 든다",
               en="counted with all logits at once; TRL that makes them in tiles (the default of 1.16) takes less"),
        )  # fmt: skip
    effects = {effect: (*names, *hugging_face.EFFECTS[effect]) for effect, names in _EFFECTS.items()}
    known = free(NAME)
    if pairs:
        effects = {effect: (*names, *_EFFECTS_OF_DPO.get(effect, ())) for effect, names in effects.items()}
        known = known | {*_OF_DPO, *_OF_DPO_ALONE} - {name for names in _EFFECTS_OF_DPO.values() for name in names}
    if objective == "grpo":
        known = known | {*_FREE_IN_GRPO}
    keys.rest(effects, hugging_face.free_names() | known)
    return found, stage


def _objective(keys: Keys) -> str:
    """What the file is for, by what only one of the trainers has."""
    losses, said = {*keys.words("loss_type")}, {*keys.document.values}
    if losses & {*_LOSSES["grpo"]}:
        return "grpo"
    if shared := [name for name in keys.document.values if name in _OF_GRPO]:
        raise keys.wrong(
            shared[0],
            tr(
                ko="GRPO만 쓰는 키가 아니다(RLOO에도 있다). GRPO라면 --objective grpo로 준다",
                en="not of GRPO alone (RLOO has it too): if it is GRPO, say --objective grpo",
            ),
        )
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
    _note_reference(keys, found, stage)
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


def _note_reference(keys: Keys, found: dict[str, Any], stage: int) -> None:
    """What is not counted of a reference that is split: it is loaded in the type of the file."""
    if stage and not found["peft"] and found["precision"].startswith("autocast"):
        name = _name_of_dtype(keys)
        keys.note(name, LESS, tr(ko="기준 모델을 fp32로 셌다", en="the reference is counted in fp32"))


def _why_not_split(keys: Keys, found: dict[str, Any], stage: int) -> str:
    """Why GRPO of a split model is not counted as the file has it; empty where it is."""
    if not keys.document.values.get("use_vllm"):
        return tr(
            ko="GRPO에서는 나눈 모델로 답을 만드는 것을 실행해 보지 않았다. use_vllm이면 센다",
            en="of GRPO a generation by a split model was not run; with use_vllm it is counted",
        )
    version = (keys.document.values.get("fsdp_config") or {}).get("fsdp_version", 2)
    if str(version) == "1" and keys.document.values.get("beta") and not found["peft"]:
        return tr(
            ko="FSDP1은 기준 모델을 블록마다 나눈다. fsdp_version: 2로 나눈 것만 센다",
            en="FSDP 1 splits a reference block by block; with fsdp_version: 2 it is counted",
        )
    if stage == 1:
        return tr(ko="GRPO의 ZeRO-1은 세지 않는다", en="of GRPO ZeRO-1 is not counted")
    if keys.document.values.get("deepspeed") and (stage == 2 or found["peft"] or keys.document.values.get("beta")):
        return tr(
            ko="DeepSpeed의 GRPO는 기준 모델 없는 전체 미세 조정의 3단계만 센다. fsdp로 나눈 것은 센다",
            en="of GRPO under DeepSpeed only stage 3 of full fine-tuning without a reference is counted; what fsdp "
            "splits is counted",
        )
    return ""


def _of_completions(keys: Keys, found: dict[str, Any], stage: int, gpus: int) -> dict[str, Any]:
    """The fields that GRPOConfig adds, and the engine where one is on the card."""
    keys.refuse(*_NOT_IN_GRPO)
    if stage and (why := _why_not_split(keys, found, stage)):
        raise keys.not_counted("deepspeed" if keys.document.values.get("deepspeed") else "fsdp", why)
    if keys.document.values.get("beta"):
        _note_reference(keys, found, stage)
    completion, iterations = keys.whole("max_completion_length", 512), keys.whole("num_iterations", 1)
    batch, accumulated = found["batch_size"], found["gradient_accumulation_steps"]
    at_once = keys.whole("generation_batch_size", None)
    if at_once and at_once % (batch * gpus):
        why = tr(
            ko=f"한 번에 학습하는 답의 수({batch * gpus})의 배수여야 한다",
            en=f"must be a multiple of the {batch * gpus} completions that are trained on at once",
        )
        raise keys.wrong("generation_batch_size", why)
    steps = keys.whole("steps_per_generation", at_once and at_once // (batch * gpus)) or accumulated
    if steps < accumulated or (steps > accumulated and iterations == 1):
        why = tr(ko="gradient_accumulation_steps와 같을 때만 센다", en="counted as gradient_accumulation_steps alone")
        raise keys.not_counted("generation_batch_size" if at_once else "steps_per_generation", f"{steps}; {why}")
    each = keys.whole("num_generations", 8)
    if batch * steps * gpus % each:
        made = batch * steps * gpus
        why = tr(
            ko=f"한꺼번에 만드는 답 {made}개가 그 배수가 아니다. TRL이 거절한다",
            en=f"the {made} completions that are generated at once are no multiple of it: TRL refuses that",
        )
        raise keys.wrong("num_generations", why)
    prompt, longest = keys.whole("max_prompt_length", None), keys.whole("vllm_max_model_length", None)
    own = {
        "objective": "grpo", "completion_length": completion, "iterations": iterations, "rollout": batch * steps,
        "beta": keys.share("beta", 0.0),
        "sequence_length": prompt + completion if prompt else longest,
    }  # fmt: skip
    if not keys.flag("use_vllm"):
        return own
    keys.word("vllm_mode", "colocate", among=("colocate",))
    keys.refuse("vllm_structured_outputs_regex")
    if not keys.flag("vllm_importance_sampling_correction", True):
        why = tr(
            ko="정책의 로그 확률을 한 번 더 계산하는 것으로 셌다",
            en="counted with the policy's log probabilities made once more",
        )
        keys.note("vllm_importance_sampling_correction", LESS, why)
    if keys.whole("vllm_tensor_parallel_size", 1) > 1:
        raise keys.not_counted("vllm_tensor_parallel_size", tr(ko="1만 센다", en="1 alone is counted"))
    if found["peft"] == "qlora" or found["load_in_8bit"]:
        raise keys.not_counted("use_vllm", "load_in_8bit" if found["load_in_8bit"] else "load_in_4bit")
    if found["modules_to_save"]:
        why = tr(ko="vLLM에 건네는 것은 실행해 보지 않았다", en="was not run with a vLLM engine")
        raise keys.not_counted("lora_modules_to_save", why)
    share = keys.share("vllm_gpu_memory_utilization", 0.3)
    if not share:
        raise keys.wrong("vllm_gpu_memory_utilization", tr(ko="0보다 커야 한다", en="must be more than 0"))
    vllm = ASLEEP if keys.flag("vllm_enable_sleep_mode") else AWAKE
    return own | {"vllm": vllm, "engine": {"share": share, "longest": longest}}


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


def _name_of_dtype(keys: Keys) -> str:
    """As the file calls it: older TRL has another name."""
    return "torch_dtype" if {"torch_dtype", "dtype"} & {*keys.document.values} == {"torch_dtype"} else "dtype"


def _precision(keys: Keys, model: str | None, peft: str | None) -> str:
    computes = hugging_face.autocast(keys, bf16=True)
    name = _name_of_dtype(keys)
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
    if new.completions and new.sequence_length != old.sequence_length:  # of a prompt with its completion
        raise keys.wrong("max_completion_length", "--length")
    if new.vllm and new.peft == "qlora":
        raise keys.wrong("use_vllm", "load_in_4bit")
    older = "max_seq_length" in keys.document.values and "max_length" not in keys.document.values
    found = hugging_face.changed(keys, old, new, sequence_length="max_seq_length" if older else "max_length")
    found |= {"vllm_enable_sleep_mode": True} if new.vllm == ASLEEP != old.vllm else {}
    if "steps_per_generation" in keys.document.values and new.completions:
        steps = new.rollout // new.batch_size
        found |= {"steps_per_generation": steps} if steps != old.rollout // old.batch_size else {}
    if new.peft != old.peft:
        found |= {"use_peft": True} if old.peft is None else {}
        found |= {"load_in_4bit": True} if new.peft == "qlora" else {}
        found |= {"load_in_8bit": False} if old.load_in_8bit else {}
    if new.reference != old.reference:
        for name in ("sync_ref_model", "dataset_streaming", "streaming"):
            if keys.flag(name):  # DPOTrainer refuses both
                raise keys.wrong(name, "precompute_ref_log_probs")
        found["precompute_ref_log_probs"] = new.reference == "precomputed"
    if new.pairs and new.peft != old.peft and keys.flag("sync_ref_model"):
        raise keys.wrong("sync_ref_model", "use_peft")
    if new.precision != old.precision and new.precision.startswith("autocast"):
        found[_name_of_dtype(keys)] = "bfloat16" if "bf16" in new.precision else "float16"
    if new.precision == "fp32" and old.precision.startswith("autocast"):
        found[_name_of_dtype(keys)] = "float32"
    return found
