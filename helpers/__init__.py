"""Helpers of the course. Heavy libraries are imported where they are first needed, so `import helpers` is light."""

import importlib
import os

from virtual_gpu.language import set_language as _set_language

_HOME = {
    "set_language": "virtual_gpu.language",
    "check_environment": ".environment",
    "course_map": ".course",
    "use_gpu": ".gpu",
    "current_gpu": ".gpu",
    "print_gpu_utilization": ".gpu",
    "cleanup": ".gpu",
    "make_dummy_dataset": ".data",
    "load_model_and_tokenizer": ".models",
    "count_parameters": "virtual_gpu.models.build",
    "estimate_memory_of_gradients": "virtual_gpu.step.optimizers",
    "estimate_memory_of_optimizer": "virtual_gpu.step.optimizers",
    "train_model": ".training",
    "gpu_memory_experiment": ".experiment",
    "gpu_memory_sweep": ".experiment",
    "predict_memory": ".experiment",
    "memory_panel": ".chapters.c3_memory.panel",
    "allocator_panel": ".chapters.c3_memory.scrubber",
    "number_panel": ".chapters.c1_numbers.panel",
    "quantize": ".chapters.c2_quantization.quantization",
    "example_tensor": ".chapters.c2_quantization.examples",
    "quantization_panel": ".chapters.c2_quantization.panel",
    "accumulation_panel": ".chapters.c4_accumulation.panel",
    "enable_checkpointing": "virtual_gpu.step.run",
    "record_chain": ".chapters.c5_checkpointing.chain",
    "sweep_segments": ".chapters.c5_checkpointing.chain",
    "compare_steps": ".chapters.c5_checkpointing.steps",
    "training_flops": "virtual_gpu.step.flops",
    "largest_fitting": ".experiment",
    "both_levers": ".chapters.c5_checkpointing.costs",
    "checkpointing_panel": ".chapters.c5_checkpointing.panel",
    "checkpointing_memory_panel": ".chapters.c5_checkpointing.panel",
    "run_ranks": ".ranks.launcher",
    "shard_ledger": "virtual_gpu.shards.ledger",
    "rank_step": "virtual_gpu.shards.rank_step",
    "zero_panel": ".chapters.c6_distributed.panel",
    "ring_panel": ".chapters.c6_distributed.ring",
    "lora_panel": ".chapters.c8_lora.panel",
    "plan_training": ".experiment",
    "planner_panel": ".chapters.c9_planner.panel",
    "doctor_panel": ".chapters.c10_clinic.panel",
    "caught": ".chapters.c10_clinic.caught",
    "cache_panel": ".chapters.c11_outside.panel",
    "grpo_panel": ".chapters.c12_two_models.panel",
    "images_panel": ".chapters.c13_images.panel",
    "exercise": ".chapters",
    "case": ".chapters",
    "guess": ".guessing",
    "guesses": ".guessing",
    "human_bytes": "virtual_gpu.units",
}
__all__ = sorted(_HOME)

# The course speaks Korean, whatever the machine does: its pages do.
_set_language("en" if os.environ.get("COURSE_LANGUAGE") == "en" else "ko")


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'helpers' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
