"""Which changes (see `virtual_gpu.changes`) to try first, by what ran out."""

from __future__ import annotations

from . import foreign, places

# Folders of transformers' models that Liger has no kernels for (liger_kernel/transformers/monkey_patch.py of 0.8.5).
WITHOUT_LIGER = frozenset(
    ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi", "xglm")
)

# cause → what to try, in this order. Numbers' causes first, then moments, then messages without numbers.
FIRST = {
    "other_process": ("other_processes", "one_card_a_rank", "restart"),
    "in_handler": ("outside_handler", "restart", "accumulation"),
    "limit": ("no_limit", "accumulation", "checkpointing"),
    "larger_than_card": ("accumulation", "shorter", "sdpa"),
    "outside_pytorch": ("other_processes", "one_card_a_rank", "restart"),
    "freed_since": ("other_processes", "restart", "expandable"),
    "fragmentation": ("expandable", "accumulation", "checkpointing"),
    "cannot_tell": ("checkpointing", "accumulation", "eight_bit"),
    places.LOADING: ("sixteen_bits", "qlora", "device_map"),
    places.RESUMING: ("load_on_cpu", "restart", "eight_bit"),
    places.SAVING: ("to_cpu_first", "model_only", "expandable"),
    places.FORWARD: ("checkpointing", "accumulation", "shorter"),
    places.ATTENTION: ("sdpa", "shorter", "accumulation"),
    places.LOGITS: ("fused_loss", "fused_head", "checkpointing", "accumulation", "shorter"),
    places.BACKWARD: ("checkpointing", "accumulation", "offload", "lora"),
    places.OPTIMIZER_STATES: ("eight_bit", "lora", "qlora"),
    places.OPTIMIZER_STEP: ("fused", "eight_bit", "lora"),
    places.EVALUATION_GATHERS: ("preprocess_logits", "loss_only", "eval_batch"),
    places.EVALUATION: ("eval_batch", "loss_only", "eval_accumulation"),
    places.GENERATION: ("fewer_sequences", "fewer_tokens", "offloaded_cache"),
    places.WRAPPING: ("bucket_view", "sixteen_bits", "lora"),
    places.GATHERING: ("accumulation", "checkpointing", "shorter"),
    foreign.CARD: ("synchronous", "other_processes", "smaller_batch"),
    foreign.LIBRARY: ("smaller_batch", "other_processes", "blocking"),
    foreign.HOST: ("fewer_workers", "streaming", "device_map"),
    "host_loading": ("sixteen_bits", "qlora", "device_map"),
    foreign.SHARE: ("engine_share", "other_processes", "engine_sleep"),
    foreign.CACHE: ("engine_more", "engine_length"),
    foreign.OTHER: (),
    foreign.ELSE: (),
    foreign.FP16: ("weights_in_fp32", "trained_in_fp32"),
    foreign.BF16: ("trained_in_fp32", "bf16"),
}
