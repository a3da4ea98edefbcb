"""Every case: what it runs, with which environment, and what of the card it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A process. call: "module:function"; given: its arguments. gib: memory of the card that it takes at most; alone:
    nothing else runs meanwhile. seconds: its timeout. outside: it makes its own virtual card. card: "card" where it has
    no virtual side. needs: another case first.
    """

    name: str
    call: str
    given: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    gib: float = 8
    alone: bool = False
    seconds: int = 90
    outside: bool = False
    card: bool = False

    def run(self) -> None:
        module, _, function = self.call.partition(":")
        target: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), function)
        target(**self.given)


def _conf(text: str) -> dict[str, str]:
    return {"PYTORCH_ALLOC_CONF": text}


ALLOCATOR = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max_split_64": "max_split_size_mb:64",
    "max_split_200": "max_split_size_mb:200",
    "max_split_64_non_split_40": "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "roundup_4": "roundup_power2_divisions:4",
    "roundup_list": "roundup_power2_divisions:[1:2,8:4,64:8,>:1]",
    "gc_0.6": "garbage_collection_threshold:0.6",
    "gc_0.8_max_split_64": "garbage_collection_threshold:0.8,max_split_size_mb:64",
    "gc_0.6_expandable": "garbage_collection_threshold:0.6,expandable_segments:True",
    "roundup_4_expandable": "roundup_power2_divisions:4,expandable_segments:True",
    "max_split_64_expandable": "max_split_size_mb:64,expandable_segments:True",
    "fraction_0.05": "per_process_memory_fraction:0.05",
}
EAGER, LAZY = {"CUDA_MODULE_LOADING": "EAGER"}, {"CUDA_MODULE_LOADING": "LAZY"}
SMALL_LORA = "1.3b-lora"


def _levers(tag: str, base: str, names: str, gib: float, seconds: int = 110, trace: bool = False) -> Case:
    return Case(f"levers-{tag}", "levers:run", {"base": base, "wanted": tuple(names.split()), "trace": trace},
                gib=gib, seconds=seconds)  # fmt: skip


# -- alone: what others hold would be in every figure -----------------------------------------------------------------
FIRST = (
    Case("facts", "card:facts", alone=True, seconds=30),
    Case("context-lazy", "card:context", env=LAZY, alone=True, seconds=45, card=True),
    Case("context-eager", "card:context", env=EAGER, alone=True, seconds=45, card=True),
    *(
        Case(f"library-{which}", "card:library", {"which": which}, alone=True, seconds=25, card=True)
        for which in ("mm16", "nccl")
    ),
    Case("most", "card:most", alone=True, seconds=30),
    Case("oom-default", "messages:plain", alone=True, seconds=30),
    Case("oom-expandable", "messages:plain", env=_conf("expandable_segments:True"), alone=True, seconds=30),
    Case("oom-max-split", "messages:plain", env=_conf("max_split_size_mb:512"), alone=True, seconds=30),
    Case("oom-another", "messages:another", alone=True, seconds=30),
    Case("oom-graphs", "messages:graphs", alone=True, seconds=20),
    Case("oom-libraries", "messages:libraries", alone=True, seconds=40),
    Case("rates", "times:rates", alone=True, seconds=40),
)
MODELS = (
    Case("models", "side:write_checkpoints", alone=True, seconds=80, card=True),
    Case("steps", "times:steps", alone=True, seconds=80, gib=70),
    Case("adapters", "times:adapters", alone=True, seconds=50, gib=40),
)
LAST = (Case("oom-gpt2", "messages:model", alone=True, seconds=45, gib=78),)
# -- side by side, what matters most first ----------------------------------------------------------------------------
TOGETHER = (
    Case("two-models", "chapters:two_models", gib=38, seconds=110),
    *(
        Case(f"experiments-{n}", "chapters:experiments", {"part": n, "parts": 4}, gib=gib, seconds=100, outside=True)
        for n, gib in enumerate((28, 26, 25, 20))
    ),
    Case("generation", "chapters:generation", gib=12, seconds=110),
    Case("evaluation", "chapters:evaluation", gib=22, seconds=80),
    Case("loading", "chapters:loading", gib=8, seconds=90),
    Case("policy", "chapters:policy", gib=26, seconds=100),
    _levers("lora-base", SMALL_LORA, "base checkpointing", 14, trace=True),
    _levers("lora-losses", SMALL_LORA, "chunks liger_loss trl logits_to_keep", 14, trace=True),
    _levers("full-8bit", "1.3b", "adamw_8bit lion_8bit paged paged_8bit", 19, trace=True),
    _levers("lora-weights", SMALL_LORA, "nf4 nf4_double int8 nf4_checkpointed modules_to_save", 15, trace=True),
    Case("sharded", "chapters:sharded", gib=31, seconds=70),
    Case(
        "liger-orpo", "unexplained:preferences", {"kind": "fused_linear_orpo_loss", "rows": "ORPO"}, gib=18, seconds=100
    ),
    Case("liger-kto", "unexplained:preferences", {"kind": "kto_loss", "rows": "KTO"}, gib=15, seconds=90),
    Case("prefix", "unexplained:prefix", gib=23, seconds=60),
    *(
        Case(f"allocator-{name}", "allocator:sequence", env=_conf(text) if text else {}, gib=5.5, seconds=40)
        for name, text in ALLOCATOR.items()
    ),
    Case("allocator-borders", "allocator:borders", gib=3, seconds=30),
    Case("allocator-borders-expandable", "allocator:borders", env=_conf("expandable_segments:True"), gib=3, seconds=30),
    Case("allocator-streams", "allocator:streams", gib=2, seconds=30),
    Case("allocator-pools", "allocator:pools", gib=2, seconds=30),
    Case("clinic", "allocator:clinic", gib=16, seconds=60),
    *(
        Case(f"cublas-{name}", "cublas:workspaces", env=env, gib=2, seconds=40)
        for name, env in {
            "default": {},
            "4096_8": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            "16_8": {"CUBLAS_WORKSPACE_CONFIG": ":16:8"},
            "0_0": {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
            "lt_1024": {"CUBLASLT_WORKSPACE_SIZE": "1024"},
            "not_unified": {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"},
            "prefer_lt": {"TORCH_BLAS_PREFER_CUBLASLT": "1"},
        }.items()
    ),
    *(Case(f"first-{which}", "cublas:first", {"which": which}, gib=1, seconds=25) for which in ("mm", "linear")),
    Case("liger-multi-token", "unexplained:multi_token", gib=2, seconds=50),
    _levers("lora-saved", SMALL_LORA, "every_second pairs selective attention_kept tiled_mlp", 14, trace=True),
    _levers("lora-cpu", SMALL_LORA, "save_on_cpu trl_offload checkpoints_on_cpu", 7, trace=True),
    _levers("full-base", "1.3b", "base foreach loop", 27, trace=True),
)
# -- where there is time ----------------------------------------------------------------------------------------------
MORE = (
    _levers("full-others", "1.3b", "sgd adafactor 8bit_in_backward in_backward muon tied", 24, trace=True),
    Case("liger-jsd", "unexplained:preferences", {"kind": "distill_jsd_loss", "rows": "JSD"}, gib=27, seconds=90),
    Case(
        "liger-simpo",
        "unexplained:preferences",
        {"kind": "fused_linear_simpo_loss", "rows": "ORPO"},
        gib=18,
        seconds=90,
    ),
    Case("liger-embedding", "unexplained:embedding", gib=14, seconds=70),
    Case("clinic-expandable", "allocator:clinic", env=_conf("expandable_segments:True"), gib=16, seconds=60),
    Case("allocator-streams-expandable", "allocator:streams", env=_conf("expandable_segments:True"), gib=2, seconds=40),
    _levers("8b-lora", "8b-lora", "base liger liger_loss checkpointing", 36, 90),
    _levers("8b-texts", "8b-texts", "base packed padding_free_sdpa", 46, 90),
)
CASES = {case.name: case for case in (*FIRST, *MODELS, *TOGETHER, *LAST, *MORE)}
