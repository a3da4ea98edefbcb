"""Every lever of the page: what it changes in the program, and the lines that do the same in a program of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import activations as V
from . import data as D
from . import losses as L
from . import optimizers as O
from . import weights as W
from .kernels import triton_launches_nothing as triton
from .program import Program, adapted, checkpointed

SMALL, LARGE = "EleutherAI/polyglot-ko-1.3b", "meta-llama/Llama-3.1-8B"
EQUAL, ROUNDING, OTHER = "equal", "rounding", "other"

# name → the program that the levers beside it change in one place
BASES: dict[str, Program] = {
    "1.3b": Program("T4", SMALL, 16, 256, torch.float32, torch.float16, prepare=checkpointed),
    "1.3b-lora": Program("T4", SMALL, 16, 256, torch.float16, torch.float16, adapt=adapted),
    "8b": Program("RTX 4090", LARGE, 1, 2048, torch.bfloat16, prepare=checkpointed),
    "8b-lora": Program("RTX 4090", LARGE, 1, 2048, torch.bfloat16, torch.bfloat16, adapt=adapted),
    "8b-texts": Program(
        "RTX 4090", LARGE, 8, 2048, torch.bfloat16, torch.bfloat16, adapt=adapted, data=D.padded,
        prepare=checkpointed,
    ),
    "moe-lora": Program(
        "H100", "Qwen/Qwen3-30B-A3B", 1, 2048, torch.bfloat16, torch.bfloat16, adapt=W.attention_only,
        prepare=checkpointed,
    ),
}  # fmt: skip
FULL, ADAPTERS, TEXTS, EXPERTS = ("1.3b", "8b"), ("1.3b-lora", "8b-lora"), ("8b-texts",), ("moe-lora",)


@dataclass(frozen=True)
class Lever:
    """A change of a program's pieces.

    bases: of which programs. result: what it does to what is computed: EQUAL, ROUNDING (the same mathematics in another
    order or format), OTHER (another algorithm). needs: packages beside torch, transformers and peft. kernels: part of
    the FLOPs is in kernels that nobody counts.
    """

    key: str
    group: str
    bases: tuple[str, ...]
    change: Mapping[str, Any]
    result: str
    needs: tuple[str, ...] = ()
    kernels: bool = False

    def of(self, base: str) -> Program:
        return replace(BASES[base], **self.change)

    def missing(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [package for package in self.needs if installed(package) is None]


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _galore(optim: str, arguments: str) -> Any:
    return {"optimizer": O.by_trainer(optim, optim_target_modules="all-linear", optim_args=arguments)}


_RANK = f"rank={O.RANK}"
LIGER, TRITON, BNB = ("liger-kernel", "triton"), ("triton",), ("bitsandbytes",)
LEVERS = (
    Lever("chunks", "loss", ADAPTERS, {"loss": L.chunks_recomputed}, ROUNDING),
    Lever("pytorch_chunks", "loss", ADAPTERS, {"loss": L.pytorch_chunks}, ROUNDING),
    Lever("liger_loss", "loss", ADAPTERS, {"loss": L.liger, "around": triton}, ROUNDING, LIGER),
    Lever("cut", "loss", ADAPTERS, {"loss": L.cut, "around": triton}, ROUNDING, ("cut-cross-entropy", *TRITON), True),
    Lever(
        "trl", "loss", ADAPTERS, {"loss": L.trl, "prepare": L.with_trl_head, "around": triton}, ROUNDING,
        ("trl", *TRITON),
    ),
    Lever("logits_to_keep", "loss", ADAPTERS, {"loss": L.only_the_last}, EQUAL),
    Lever("liger", "loss", ("8b-lora",), {"prepare": L.liger_everywhere, "around": triton}, ROUNDING, LIGER),
    Lever("checkpointing", "activations", ADAPTERS, {"prepare": checkpointed}, EQUAL),
    Lever("every_second", "activations", ADAPTERS, {"prepare": V.every_second}, EQUAL),
    Lever("pairs", "activations", ADAPTERS, {"prepare": V.pairs}, EQUAL),
    Lever("selective", "activations", ADAPTERS, {"prepare": V.selective}, EQUAL),
    Lever("attention_kept", "activations", ADAPTERS, {"prepare": V.only_attention_kept}, EQUAL),
    Lever("save_on_cpu", "activations", ADAPTERS, {"saving": V.saved_on_cpu}, EQUAL),
    Lever("trl_offload", "activations", ADAPTERS, {"saving": V.trl_offload}, EQUAL, ("trl",)),
    Lever(
        "checkpoints_on_cpu", "activations", ADAPTERS, {"prepare": checkpointed, "saving": V.saved_on_cpu}, EQUAL
    ),
    Lever("tiled_mlp", "activations", ADAPTERS, {"prepare": V.tiled_mlp}, ROUNDING),
    Lever("foreach", "optimizer", FULL, {"optimizer": O.pytorch("AdamW", foreach=True)}, ROUNDING),
    Lever("loop", "optimizer", FULL, {"optimizer": O.pytorch("AdamW", foreach=False)}, ROUNDING),
    Lever("adamw_8bit", "optimizer", FULL, {"optimizer": O.bitsandbytes("AdamW8bit")}, OTHER, BNB),
    Lever("paged", "optimizer", FULL, {"optimizer": O.paged(4)}, ROUNDING, BNB),
    Lever("paged_8bit", "optimizer", FULL, {"optimizer": O.paged(1)}, OTHER, BNB),
    Lever("in_backward", "optimizer", FULL, {"optimizer": O.in_backward}, EQUAL),
    Lever("8bit_in_backward", "optimizer", FULL, {"optimizer": O.eight_bit_in_backward}, OTHER, BNB),
    Lever("adafactor", "optimizer", FULL, {"optimizer": O.by_trainer("adafactor")}, OTHER),
    Lever("lion", "optimizer", FULL, {"optimizer": O.bitsandbytes("Lion")}, OTHER, BNB),
    Lever("lion_8bit", "optimizer", FULL, {"optimizer": O.bitsandbytes("Lion8bit")}, OTHER, BNB),
    Lever("muon", "optimizer", FULL, {"optimizer": O.muon}, OTHER),
    Lever("adam_mini", "optimizer", FULL, {"optimizer": O.adam_mini}, OTHER, ("adam-mini",)),
    Lever("galore", "optimizer", FULL, _galore("galore_adamw", _RANK), OTHER, ("galore-torch",)),
    Lever("galore_layerwise", "optimizer", FULL, _galore("galore_adamw_layerwise", _RANK), OTHER, ("galore-torch",)),
    Lever("apollo", "optimizer", FULL, _galore("apollo_adamw", _RANK), OTHER, ("apollo-torch",)),
    Lever(
        "apollo_mini", "optimizer", FULL, _galore("apollo_adamw", "rank=1,scale_type=tensor"), OTHER, ("apollo-torch",)
    ),
    Lever("lomo", "optimizer", ("8b",), {"optimizer": O.by_trainer("lomo")}, OTHER, ("lomo-optim",)),
    Lever("adalomo", "optimizer", ("8b",), {"optimizer": O.by_trainer("adalomo")}, OTHER, ("lomo-optim",)),
    Lever("sgd", "optimizer", FULL, {"optimizer": O.pytorch("SGD")}, OTHER),
    Lever("nf4", "weights", ADAPTERS, {"load": W.four_bits("nf4")}, OTHER, BNB),
    Lever("nf4_double", "weights", ADAPTERS, {"load": W.four_bits("nf4", double=True)}, OTHER, BNB),
    Lever("fp4", "weights", ADAPTERS, {"load": W.four_bits("fp4")}, OTHER, BNB),
    Lever("int8", "weights", ADAPTERS, {"load": W.eight_bits()}, OTHER, BNB, kernels=True),
    Lever(
        "nf4_checkpointed", "weights", ADAPTERS, {"load": W.four_bits("nf4", double=True), "prepare": checkpointed},
        OTHER, BNB,
    ),
    Lever("modules_to_save", "weights", ADAPTERS, {"adapt": W.with_whole_embeddings}, OTHER),
    Lever("tied", "weights", FULL, {"load": W.tied}, OTHER),
    Lever("float8", "weights", ("8b",), {"prepare": W.float8}, OTHER, ("torchao",)),
    Lever("longest_alone", "data", TEXTS, {"data": D.longest_alone}, EQUAL),
    Lever("packed", "data", TEXTS, {"data": D.packed}, OTHER),
    Lever("padding_free_sdpa", "data", TEXTS, {"data": D.padding_free}, ROUNDING),
    Lever(
        "padding_free", "data", TEXTS, {"data": D.padding_free, "attention": "flash_attention_2"}, ROUNDING,
        kernels=True,
    ),
    Lever("experts_too", "experts", EXPERTS, {"adapt": W.experts_too}, OTHER),
)  # fmt: skip
