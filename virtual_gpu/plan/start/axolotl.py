"""A configuration of axolotl, as `axolotl train FILE` reads it.

axolotl 0.18.0 (067b021, 2026-07): utils/schemas/{config,peft,training,model}.py (length 512, micro-batch 1, no
checkpointing, bf16 "auto"), utils/config/__init__.py `resolve_dtype` (weights are loaded in the type that is computed
in), loaders/model.py (double quantization; what is not 4-bit is cast back to that type after
`prepare_model_for_kbit_training`; without flash attention embeddings and norms of a full fine-tuning stay in fp32).
`rl: dpo` and `ipo`: core/trainers/dpo/ (TRL 1.8's DPOTrainer, see `step.pairs`, on whole logits whichever loss the
plugins bring), train.py `setup_reference_model` (of all weights a second model as the first, of adapters the model
without them; TRL makes the adapters). It empties PyTorch's cache after each micro-batch, which is not counted: it takes
less of what is reserved, none of what tensors need.
"""

from __future__ import annotations

from typing import Any

from ...cards import GPUSpec
from ...errors import WrongValue
from ...language import tr
from ...models.adapters import is_pattern
from ...step.optimizers import name_for_trainer
from ...step.setting import Setting
from . import hugging_face
from .keys import EITHER, LESS, MORE, Keys, end_to_end, free, off

NAME = "axolotl"
METHODS = ("full", "lora", "qlora")
# Without either it is transformers' choice, sdpa (utils/schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL).
FLASH = {"flash_attention": False, "attn_implementation": "sdpa"}
PADS_ONE = True  # to a multiple of 64 tokens, or to sequence_len (core/builders/causal.py)
_EFFECTS = {
    LESS: (
        "liger_cross_entropy", "liger_rope", "liger_rms_norm",
        "liger_swiglu", "liger_glu_activation", "liger_layer_norm", "chunked_cross_entropy", "activation_offloading",
        "layer_offloading", "tiled_mlp", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel",
        "unfrozen_parameters", "gc_steps", "torch_empty_cache_steps", "auto_find_batch_size", "quantize_moe_experts",
    ),
    MORE: (
        "lora_target_parameters", "peft_use_dora", "neftune_noise_alpha", "fp32_norms",
        "selective_checkpointing", "peft_trainable_token_indices", "peft_layer_replication", "dynamic_checkpoint",
        "noisy_embedding_alpha",
    ),
    EITHER: (
        "torch_compile", "fp8", "qat", "relora", "sequence_parallel_degree", "context_parallel_size",
        "tensor_parallel_size", "dp_replicate_size", "lora_rank_pattern", "use_pose",
        "peft_layers_to_transform", "overrides_of_model_config", "overrides_of_model_kwargs", "bnb_config_kwargs",
        "device_map", "max_memory", "gpu_memory_limit", "use_kernels", "deepcompile", "peft",
        "freeze_mm_modules", "lisa_n_layers", "experts_implementation", "trainer_cls", "s2_attention", "use_onebitllms",
        "llama4_linearized_experts", "scaling_softmax", "use_eaft", "shrink_embeddings", "reinit_weights",
        "flash_attn_fuse_mlp", "fused_attn_kernel", "sage_attention",
    ),
}  # fmt: skip


# Losses of DPO that ask the logits for nothing but the answers' log probabilities.
_SAME_LOGITS = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm",
)  # fmt: skip
_PLUGINS = ("CutCrossEntropyPlugin", "LigerPlugin")  # what they change has keys of its own


def knows(values: dict[str, Any]) -> bool:
    """Whether a file with these keys is one."""
    return "base_model" in values


def read(
    keys: Keys, spec: GPUSpec, gpus: int, peft: str | None, objective: str | None = None
) -> tuple[dict[str, Any], int]:
    """(fields of a Setting, ZeRO's stage)."""
    rl = None if off(keys.get("rl")) else keys.word("rl")
    pairs = rl in ("dpo", "ipo")
    if rl and not pairs:
        raise keys.not_counted("rl", tr(ko="SFT와 DPO만 센다. GRPO는 TRL의 파일로 센다",
                                        en="SFT and DPO alone; GRPO is counted as a file of TRL"))  # fmt: skip
    keys.refuse("gptq", "reward_model", "process_reward_model", "model_quantization_config")
    adapter = keys.word("adapter", among=(None, "", "lora", "qlora")) or None
    if keys.flag("load_in_4bit") != (adapter == "qlora"):
        both = "adapter: qlora, load_in_4bit: true"
        raise keys.wrong("load_in_4bit", tr(ko=f"QLoRA라면 둘 다 적는다({both})", en=f"QLoRA has both ({both})"))
    precision = _precision(keys, adapter, spec)
    micro = keys.whole("micro_batch_size", 1)
    steps = keys.whole("gradient_accumulation_steps", None)
    total = keys.whole("batch_size", None)
    checkpointing = keys.get("gradient_checkpointing", False)
    if isinstance(checkpointing, str) and checkpointing in ("offload", "offload_disk", "unsloth"):
        keys.note("gradient_checkpointing", LESS, tr(ko="내리는 것은 세지 않았다", en="the offload is not counted"))
        checkpointing = True
    else:
        checkpointing = keys.flag("gradient_checkpointing")
    # utils/config/__init__.py; of DPO core/builders/base.py says False.
    how = keys.get("gradient_checkpointing_kwargs") or {"use_reentrant": not pairs}
    found = {
        "model_id": keys.word("base_model"),
        "sequence_length": keys.whole("sequence_len", 512),
        "batch_size": micro,
        "gradient_accumulation_steps": steps or max((total or micro) // micro, 1),
        "gradient_checkpointing": checkpointing,
        "use_reentrant": isinstance(how, dict) and how.get("use_reentrant") is True,
        "optimizer": hugging_face.optimizer(keys, "optimizer", "adamw_torch_fused"),
        "fp32_embedding_state": True,
        **hugging_face.optimizer_arguments(keys),
        "lora_rank": keys.whole("lora_r", 8),
        "lora_dropout": keys.share("lora_dropout", 0.0),
        "lora_targets": _targets(keys),
        "modules_to_save": keys.words("lora_modules_to_save"),
        "peft": adapter,
        "precision": precision,
        "rest_in_fp32": False,
        "padded": pairs or (off(keys.get("sample_packing")) and off(keys.get("batch_flattening"))),
    }
    if keys.flag("eager_attention"):
        found["attention"] = "eager"
    flash = keys.flag("flash_attention") or "flash" in str(keys.get("attn_implementation", ""))
    if pairs and keys.flag("sample_packing"):
        raise keys.wrong("sample_packing", f"rl: {rl}")  # utils/schemas/validation.py
    if not off(keys.get("sample_packing")) and not flash:
        keys.note("sample_packing", MORE, end_to_end())
    if adapter is None and "16" in precision and not flash and _keeps_fp32(keys):
        keys.note("base_model", MORE, tr(ko="플래시 어텐션 없이는 임베딩과 정규화층이 fp32다",
                                         en="without flash attention embeddings and norms are in fp32"))  # fmt: skip
    tiles = _loss_from_tiles(keys)
    found["fused_lm_head"] = bool(tiles) and not pairs and hugging_face.by_tiles(keys, tiles)
    found["gradient_checkpointing"] |= hugging_face.checkpoints_by_fsdp(keys, by_config=True)
    stage = hugging_face.shards(keys, gpus, by_config=True)
    found["load_in_8bit"] = hugging_face.in_8_bits(keys, adapter == "lora", stage)
    if pairs:
        found |= _of_pairs(keys, found, stage)
        found["gradient_checkpointing"] |= keys.document.values.get("gradient_checkpointing", False) is None  # TRL's
    keys.rest(_EFFECTS, free(NAME))
    return found, stage


def _of_pairs(keys: Keys, found: dict[str, Any], stage: int) -> dict[str, Any]:
    """The fields of DPO."""
    if stage:
        named = (name for name in ("deepspeed", "fsdp", "fsdp_config") if not off(keys.document.values.get(name)))
        raise keys.not_counted(next(named), "DPO")
    losses = keys.words("dpo_loss_type")
    if losses and keys.get("rl") == "ipo":
        raise keys.wrong("dpo_loss_type", "rl: dpo")
    if unknown := [loss for loss in losses if loss not in _SAME_LOGITS]:
        raise keys.not_counted("dpo_loss_type", f"{unknown[0]!r:.60}")
    keys.refuse("rl_adapter_ref_model", "dpo_use_weighting", "dpo_use_liger_kernel")
    free_here = ("rl_beta", "dpo_label_smoothing", "dpo_loss_weights", "dpo_padding_free")  # TRL 1.8 pads all the same
    for name in (*free_here, "liger_cross_entropy", "chunked_cross_entropy"):  # of losses that it does not ask for
        keys.get(name)
    quantized = found["peft"] == "qlora" or found["load_in_8bit"]
    precomputed = keys.flag("precompute_ref_log_probs")
    if precomputed and not found["peft"]:  # train.py brings the second model whatever this says
        why = tr(ko="기준 모델이 카드에 남는다. 순전파까지 셌다", en="the reference stays; its forward is counted too")
        keys.note("precompute_ref_log_probs", LESS, why)
    return {
        "objective": "dpo",
        "reference": "precomputed" if precomputed and found["peft"] else "same",
        "logits_by_row": True,
        "trained_dtype": "bf16" if quantized else "",  # by TRL, "When using QLoRA"
    }


def _keeps_fp32(keys: Keys) -> bool:
    """Whether embeddings and norms that are trained stay in fp32 (`_configure_embedding_dtypes` in loaders/model.py).

    Not where FSDP splits them, nor beside cut cross-entropy or attention of another kind than sdpa and eager.
    """
    plugins = [str(name).split(".")[-1] for name in keys.words("plugins")]
    cut = keys.flag("cut_cross_entropy", "CutCrossEntropyPlugin" in plugins)
    if cut or hugging_face.fsdp_section(keys, by_config=True) is not None:
        return False
    others = ("flex_attention", "xformers_attention", "sage_attention")
    attention = keys.get("attn_implementation") or next((name for name in others if keys.flag(name)), None)
    return attention in (None, "sdpa", "eager")


def _loss_from_tiles(keys: Keys) -> str:
    """The key by which the loss is from tiles of the logits: cut cross-entropy's, on where its plugin is, or Liger's.

    Empty where it is from whole ones. integrations/cut_cross_entropy/args.py; Liger's plugin alone does nothing
    (integrations/liger/args.py).
    """
    plugins = [str(name).split(".")[-1] for name in keys.words("plugins")]
    if [name for name in plugins if name not in _PLUGINS]:
        keys.note("plugins", EITHER)
    cut = "CutCrossEntropyPlugin" in plugins
    fused = keys.flag("liger_fused_linear_cross_entropy")
    if keys.flag("cut_cross_entropy", cut):
        return "plugins" if cut else "cut_cross_entropy"
    return "liger_fused_linear_cross_entropy" if fused else ""


def _targets(keys: Keys) -> str | tuple[str, ...]:
    try:
        if isinstance(pattern := keys.get("lora_target_modules"), str) and is_pattern(pattern):
            return pattern
    except WrongValue as error:
        raise keys.wrong("lora_target_modules", str(error)) from error
    everything, names = keys.flag("lora_target_linear"), keys.words("lora_target_modules")
    if everything or names == ("all-linear",):
        return "all-linear"
    return names or "attention"


def _precision(keys: Keys, adapter: str | None, spec: GPUSpec) -> str:
    auto = keys.get("bf16", "auto")
    full = isinstance(auto, str) and auto == "full"
    fp16 = keys.flag("fp16") or keys.flag("float16")
    if auto == "auto":
        bf16 = not fp16 and spec.has_bf16
        fp16 = fp16 or (not bf16 and keys.get("fp16") is None)
    else:
        bf16 = full or keys.flag("bf16")
    bf16 = bf16 or keys.flag("bfloat16")
    keys.get("float32")
    if bf16:
        return "autocast_bf16"
    if fp16 and adapter is None:
        raise keys.not_counted("fp16", tr(ko="fp16 가중치는 GradScaler가 받지 않는다", en="fp16 weights, GradScaler"))
    return "autocast_fp16" if fp16 else "fp32"


def write(keys: Keys, old: Setting, new: Setting) -> dict[str, Any]:
    """key → value of each line that makes the one setting the other."""
    found = hugging_face.changed(keys, old, new, batch_size="micro_batch_size", sequence_length="sequence_len")
    if new.gradient_checkpointing and not old.gradient_checkpointing:
        found = {key: value for key, value in found.items() if key not in hugging_face.CHECKPOINTING}
        found["gradient_checkpointing"] = True
    if found.pop("optim", None):
        found["optimizer"] = name_for_trainer(new.optimizer)
    if new.peft != old.peft:
        found["adapter"] = new.peft
        found |= {"load_in_4bit": True} if new.peft == "qlora" else {}
        found |= {"load_in_8bit": False} if old.load_in_8bit else {}
        if old.peft is None:
            found |= {"lora_r": new.lora_rank, "lora_alpha": 2 * new.lora_rank, "lora_target_linear": True}
    return found
