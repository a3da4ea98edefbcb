"""Helpers of the course. Heavy libraries are imported where they are first needed, so `import helpers` is light."""

import importlib

_HOME = {
    "set_language": "language",
    "check_environment": "environment",
    "course_map": "course",
    "use_gpu": "gpu",
    "current_gpu": "gpu",
    "print_gpu_utilization": "gpu",
    "cleanup": "gpu",
    "make_dummy_dataset": "data",
    "load_model_and_tokenizer": "models",
    "count_parameters": "models",
    "estimate_memory_of_gradients": "training",
    "estimate_memory_of_optimizer": "training",
    "train_model": "training",
    "gpu_memory_experiment": "experiment",
    "gpu_memory_sweep": "experiment",
    "predict_memory": "experiment",
    "memory_panel": "panels.memory",
    "number_panel": "panels.number_formats",
    "quantize": "quantization",
    "example_tensor": "quantization",
    "quantization_panel": "panels.quantization",
    "accumulation_panel": "panels.accumulation",
    "enable_checkpointing": "training",
    "record_chain": "checkpointing",
    "sweep_segments": "checkpointing",
    "compare_steps": "checkpointing_costs",
    "training_flops": "flops",
    "largest_fitting": "largest",
    "both_levers": "checkpointing_costs",
    "checkpointing_panel": "panels.checkpointing",
    "checkpointing_memory_panel": "panels.checkpointing",
    "run_ranks": "distributed.launcher",
    "shard_ledger": "distributed.ledger",
    "rank_step": "distributed.rank_step",
    "zero_panel": "panels.zero",
    "lora_panel": "panels.lora",
    "plan_training": "planner",
    "planner_panel": "panels.planner",
    "exercise": "exercises",
    "human_bytes": "units",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'helpers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
