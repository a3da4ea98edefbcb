"""Every lever of the page: what it changes in the program, and the lines that do the same in a program of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel

from . import activations as V
from . import data as D
from . import losses as L
from . import optimizers as O
from . import ranks as R
from . import stages as S
from . import two_models as T
from . import weights as W
from .kernels import triton_launches_nothing as triton
from .program import LORA_RANK, Program, adapted, checkpointed, fused_adamw, nothing, once, whole

SMALLEST, SMALL, LARGE = "meta-llama/Llama-3.2-1B", "EleutherAI/polyglot-ko-1.3b", "meta-llama/Llama-3.1-8B"
LARGER, LARGEST = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"
# Meta's layout of 405B: The Llama 3 Herd of Models, arXiv 2407.21783, table 4 and section 3.3 (parameters stay gathered
# after forward; the first and the last stage have a layer less; gradients are summed in fp32).
META = S.Grid(pipeline=16, data=128, tensor=8, ends=1)
EQUAL, ROUNDING, OTHER = "equal", "rounding", "other"

# name → the program that the levers beside it change in one place
BASES: dict[str, Program | T.Preferences] = {
    "1.3b": Program("T4", SMALL, 16, 256, torch.float32, torch.float16, prepare=checkpointed),
    "1.3b-lora": Program("T4", SMALL, 16, 256, torch.float16, torch.float16, adapt=adapted),
    "8b": Program("RTX 4090", LARGE, 1, 2048, torch.bfloat16, prepare=checkpointed),
    "8b-lora": Program("RTX 4090", LARGE, 1, 2048, torch.bfloat16, torch.bfloat16, adapt=adapted),
    "8b-32k": Program(
        "RTX 4090", LARGE, 1, 32768, torch.bfloat16, torch.bfloat16, adapt=adapted, prepare=checkpointed,
        load=W.four_bits("nf4", double=True, upcast=False),
    ),
    "8b-texts": Program(
        "RTX 4090", LARGE, 8, 2048, torch.bfloat16, torch.bfloat16, adapt=adapted, data=D.padded,
        prepare=checkpointed,
    ),
    "moe-lora": Program(
        "H100", "Qwen/Qwen3-30B-A3B", 1, 2048, torch.bfloat16, torch.bfloat16, adapt=W.attention_only,
        prepare=checkpointed,
    ),
    "1.3b-x2": Program(
        "T4", SMALL, 16, 256, torch.float32, torch.float16, prepare=checkpointed, split=R.ddp(), gpus=2
    ),
    "8b-x8": Program(
        "H100", LARGE, 1, 2048, torch.float32, torch.bfloat16, prepare=checkpointed, split=R.ddp(), gpus=8
    ),
    "8b-long-x8": Program(
        "H100", LARGE, 1, 16384, torch.float32, torch.bfloat16, load=R.on_meta, prepare=checkpointed,
        split=R.fsdp2(R.halves(torch.bfloat16)), gpus=8,
    ),
    "70b-x8": Program(
        "H100", LARGER, 1, 2048, torch.bfloat16, load=R.on_meta, prepare=checkpointed,
        split=R.fsdp2(R.halves(torch.bfloat16)), gpus=8,
    ),
    "405b-x16384": Program(
        "H100", LARGEST, 16, 8192, torch.float32, gpus=16384, rank=META.first_of(1), groups=META.sizes,
        load=S.stages_of(pipelining.Schedule1F1B, META, nothing), passes=S.scheduled, around=loss_parallel,
    ),
    "moe-x8": Program(
        "H100", "Qwen/Qwen3-30B-A3B", 1, 2048, torch.float32, prepare=checkpointed, optimizer=R.adamw_of_each,
        load=R.by_transformers(fsdp_size=8), gpus=8,
    ),
    "8b-lora-x2": Program(
        "RTX 3090", LARGE, 1, 2048, torch.bfloat16, torch.bfloat16, adapt=adapted, prepare=checkpointed,
        split=R.ddp(), gpus=2,
    ),
    "1b-dpo": T.Preferences("RTX 3090", SMALLEST, 16, 4, 1024, "dpo"),
    "1b-grpo": T.Preferences("RTX 3090", SMALLEST, 32, 4, 1024, "grpo"),
    "1.7b-grpo": T.Preferences("RTX 4090", "Qwen/Qwen3-1.7B", 32, 4, 1024, "grpo", replace(T.TRAINER, method="lora")),
}  # fmt: skip
FULL, ADAPTERS, TEXTS, EXPERTS = ("1.3b", "8b"), ("1.3b-lora", "8b-lora"), ("8b-texts",), ("moe-lora",)
ONE_LONG = ("8b-32k",)
TWO, EIGHT, LONG, TWO_ADAPTERS = ("1.3b-x2",), ("8b-x8",), ("8b-long-x8",), ("8b-lora-x2",)
PAIRS, COMPLETIONS = ("1b-dpo",), ("1b-grpo", "1.7b-grpo")
SEVENTY, LAYOUT, EIGHT_EXPERTS = ("70b-x8",), ("405b-x16384",), ("moe-x8",)
CARDS = TWO + EIGHT


@dataclass(frozen=True)
class Lever:
    """A change of a program's pieces.

    bases: of which programs. result: what it does to what is computed: EQUAL, ROUNDING (the same mathematics in another
    order or format), OTHER (another algorithm). needs: packages beside torch, transformers and peft. kernels: its FLOPs
    cannot be counted, as where part of them is in kernels of its own.
    """

    key: str
    group: str
    bases: tuple[str, ...]
    change: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
    result: str
    needs: tuple[str, ...] = ()
    kernels: bool = False

    def of(self, base: str) -> Program | T.Preferences:
        change = self.change(BASES[base]) if callable(self.change) else self.change
        return replace(BASES[base], **change)

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


def _fsdp2(**settings: Any) -> Callable[[Program], dict[str, Any]]:
    """In the 16 bits of the program, as accelerate runs it, but for other settings."""
    return lambda base: {
        "load": R.on_meta, "split": R.fsdp2(**{"policy": R.halves(base.autocast)} | settings),
        "groups": settings.get("grid", ()),
    }  # fmt: skip


def _zero_1(**settings: Any) -> Callable[[Program], dict[str, Any]]:
    return lambda base: {"optimizer": R.zero_1, "split": R.ddp(**settings), "rank": R.fullest(base)}


def _sharded_adapters(method: str) -> dict[str, Any]:
    split = R.fsdp2(R.halves(torch.bfloat16))
    return {"load": R.with_adapters(method, LORA_RANK), "adapt": None, "split": split}


def _accumulating(start: Any, waits: Any = None) -> Callable[[Program], dict[str, Any]]:
    return lambda base: {**(start(base) if start else {}), "passes": R.accumulated(waits)}


def _stage(schedule: type, rank: int) -> dict[str, Any]:
    return {
        "load": S.stages_of(schedule), "prepare": nothing, "split": whole, "passes": S.scheduled, "batch": 32,
        "rank": rank,
    }  # fmt: skip


def _layout(
    schedule: type = pipelining.Schedule1F1B, prepare: Any = nothing, place: int = 1, **grid: Any
) -> dict[str, Any]:
    """Meta's layout but for one thing; place: in the pipeline."""
    return {"load": S.stages_of(schedule, replace(META, **grid), prepare), "rank": META.first_of(place)}


def _no_stages(split: Any, *groups: int) -> dict[str, Any]:
    """All layers on each card, or group of cards that share them, and one text."""
    return {
        "load": R.on_meta, "prepare": checkpointed, "split": split, "passes": once, "around": contextlib.nullcontext,
        "rank": 0, "batch": 1, "groups": groups,
    }  # fmt: skip


def _tensors(split: Any, **more: Any) -> dict[str, Any]:
    return {"load": R.on_meta, "split": split, "optimizer": R.adamw_of_each, **more}


_RANK = f"rank={O.RANK}"
_LONG = {"loss": L.pytorch_chunks}  # without it nothing else counts at this length
LIGER, TRITON, BNB, TRL = ("liger-kernel", "triton"), ("triton",), ("bitsandbytes",), ("trl",)
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
    Lever("offloaded", "activations", ADAPTERS, {"prepare": V.offloaded}, EQUAL),
    Lever("compiled", "activations", ADAPTERS, {"prepare": V.compiled}, ROUNDING),
    Lever("budget_half", "activations", ADAPTERS, {"prepare": V.compiled, "around": V.budget(0.5)}, ROUNDING),
    Lever("budget_fifth", "activations", ADAPTERS, {"prepare": V.compiled, "around": V.budget(0.2)}, ROUNDING),
    Lever("tiled_mlp", "activations", ADAPTERS, {"prepare": V.tiled_mlp}, ROUNDING),
    Lever("long_tiled", "long", ONE_LONG, {"prepare": V.tiled_mlp}, ROUNDING),
    Lever("long_chunks", "long", ONE_LONG, _LONG, ROUNDING),
    Lever("long_attention", "long", ONE_LONG, {**_LONG, "prepare": V.only_attention_kept}, ROUNDING),
    Lever("long_chunks_tiled", "long", ONE_LONG, {**_LONG, "prepare": V.tiled_mlp}, ROUNDING),
    Lever("long_chunks_offloaded", "long", ONE_LONG, {**_LONG, "prepare": V.offloaded}, ROUNDING),
    Lever("long_all", "long", ONE_LONG, {**_LONG, "prepare": V.tiled_mlp_offloaded}, ROUNDING),
    Lever("foreach", "optimizer", FULL, {"optimizer": O.pytorch("AdamW", foreach=True)}, ROUNDING),
    Lever("loop", "optimizer", FULL, {"optimizer": O.pytorch("AdamW", foreach=False)}, ROUNDING),
    Lever("adamw_8bit", "optimizer", FULL, {"optimizer": O.bitsandbytes("AdamW8bit")}, OTHER, BNB),
    Lever("ao_8bit", "optimizer", FULL, {"optimizer": O.torchao("AdamW8bit")}, OTHER, ("torchao",)),
    Lever("ao_4bit", "optimizer", FULL, {"optimizer": O.torchao("AdamW4bit")}, OTHER, ("torchao",)),
    Lever(
        "stochastic", "optimizer", ("8b",), {"optimizer": O.torchao("_AdamW", bf16_stochastic_round=True)}, OTHER,
        ("torchao",),
    ),
    Lever("paged", "optimizer", FULL, {"optimizer": O.bitsandbytes("PagedAdamW32bit")}, ROUNDING, BNB),
    Lever("paged_8bit", "optimizer", FULL, {"optimizer": O.bitsandbytes("PagedAdamW8bit")}, OTHER, BNB),
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
        "int8_checkpointed", "weights", ADAPTERS, {"load": W.eight_bits(), "prepare": checkpointed}, OTHER, BNB,
        kernels=True,
    ),
    Lever(
        "int8_reentrant", "weights", ADAPTERS, {"load": W.eight_bits(), "prepare": W.reentrant}, OTHER, BNB,
        kernels=True,
    ),
    Lever(
        "nf4_checkpointed", "weights", ADAPTERS, {"load": W.four_bits("nf4", double=True), "prepare": checkpointed},
        OTHER, BNB,
    ),
    Lever(
        "nf4_checkpointed_rest_16", "weights", ADAPTERS,
        {"load": W.four_bits("nf4", double=True, upcast=False), "prepare": checkpointed}, OTHER, BNB,
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
    Lever("dpo_precomputed", "pairs", PAIRS, T.by(reference="precomputed"), EQUAL, TRL),
    Lever("dpo_one", "pairs", PAIRS, {"micro_batch": 1}, ROUNDING, TRL),
    Lever("dpo_lora", "pairs", PAIRS, T.by(method="lora"), OTHER, TRL),
    Lever(
        "dpo_rows", "pairs", PAIRS, T.by(changed={"fused_lm_head": False, "logits_by_row": True}, fused_lm_head=False),
        ROUNDING,
    ),
    Lever("grpo_one", "completions", COMPLETIONS, {"micro_batch": 1}, ROUNDING, TRL),
    Lever("grpo_beta", "completions", COMPLETIONS, T.by({"beta": 0.04}), OTHER, TRL),
    Lever("grpo_iterations", "completions", COMPLETIONS, T.by({"iterations": 2}), OTHER, TRL),
    Lever("grpo_lora", "completions", COMPLETIONS[:1], T.by(method="lora"), OTHER, TRL),
    Lever(
        "grpo_vllm", "completions", COMPLETIONS, T.by({"vllm": "colocate"}, vllm="colocate"), OTHER, TRL,
    ),
    Lever(
        "grpo_vllm_asleep", "completions", COMPLETIONS, T.by({"vllm": "colocate"}, vllm="asleep"), OTHER, TRL,
    ),
    Lever("bucket_view", "cards", CARDS, {"split": R.ddp(gradient_as_bucket_view=True)}, EQUAL),
    Lever("zero_1", "cards", CARDS, _zero_1(), EQUAL),
    Lever("zero_1_view", "cards", CARDS, _zero_1(gradient_as_bucket_view=True), EQUAL),
    Lever("fsdp2", "cards", CARDS, _fsdp2(), ROUNDING),
    Lever("fsdp2_blocks", "cards", CARDS + SEVENTY, _fsdp2(only_blocks=True), ROUNDING),
    Lever("fsdp2_kept", "cards", CARDS + SEVENTY, _fsdp2(keep=True), ROUNDING),
    Lever("fsdp2_all_saved", "cards", CARDS + SEVENTY, lambda base: {**_fsdp2()(base), "prepare": nothing}, ROUNDING),
    Lever(
        "fsdp2_sums_32", "cards", CARDS,
        lambda base: _fsdp2(policy=MixedPrecisionPolicy(base.autocast, torch.float32))(base), ROUNDING,
    ),
    Lever("fsdp2_32", "cards", CARDS, _fsdp2(policy=None), ROUNDING),
    Lever("hsdp", "cards", EIGHT + SEVENTY, _fsdp2(grid=(2, 4)), ROUNDING),
    Lever(
        "fsdp2_offload", "cards", EIGHT,
        # one tensor at a time: the step is in the RAM of whoever runs this, 12 GB of it
        lambda base: {**_fsdp2(on_cpu=True)(base), "optimizer": O.pytorch("AdamW", foreach=False)}, ROUNDING,
    ),
    Lever("ddp_accumulated", "cards", CARDS, _accumulating(None), EQUAL),
    Lever("ddp_no_sync", "cards", CARDS, _accumulating(None, R.ddp_waits), ROUNDING),
    Lever("fsdp2_accumulated", "cards", CARDS, _accumulating(_fsdp2()), ROUNDING),
    Lever("fsdp2_no_sync", "cards", CARDS, _accumulating(_fsdp2(), R.fsdp2_waits), ROUNDING),
    Lever("tensor", "cards_split", EIGHT + SEVENTY, _tensors(R.tensors), ROUNDING),
    Lever("sequence", "cards_split", EIGHT + LONG + SEVENTY, _tensors(R.tokens_too(logits_whole=True)), ROUNDING),
    Lever(
        "loss_parallel", "cards_split", EIGHT + LONG + SEVENTY,
        _tensors(R.tokens_too(logits_whole=False), around=loss_parallel), ROUNDING,
    ),
    Lever(
        "fsdp2_tensor", "cards_split", EIGHT + SEVENTY,
        _tensors(
            R.tensors_and_fsdp2(R.halves(torch.bfloat16), together=2), optimizer=fused_adamw, groups=(4, 2)
        ),
        ROUNDING,
    ),
    Lever(
        "context", "cards_split", LONG,
        {"prepare": R.without_masks, "data": R.next_tokens, "loss": R.loss_of_part, "passes": R.text_in_parts},
        ROUNDING, kernels=True,  # DTensor asks for the shape of the whole text's attention, which is counted as work
    ),
    Lever(
        "experts", "cards_experts", EIGHT_EXPERTS,
        {"load": R.by_transformers(fsdp_size=8, ep_size=8), "groups": (8,)}, ROUNDING,
    ),
    Lever(
        "experts_in_fours", "cards_experts", EIGHT_EXPERTS,
        {"load": R.by_transformers(fsdp_size=8, ep_size=4), "groups": (8, 4, 2)}, ROUNDING,
    ),
    Lever(
        "experts_tensors", "cards_experts", EIGHT_EXPERTS,
        {"load": R.by_transformers(fsdp_size=4, tp_size=2, ep_size=8), "groups": (4, 2, 8)}, ROUNDING,
    ),
    Lever("gpipe", "cards_split", EIGHT, _stage(pipelining.ScheduleGPipe, 0), ROUNDING),
    Lever("one_f_one_b", "cards_split", EIGHT, _stage(pipelining.Schedule1F1B, 0), ROUNDING),
    Lever("one_f_one_b_last", "cards_split", EIGHT, _stage(pipelining.Schedule1F1B, 7), ROUNDING),
    Lever("interleaved", "cards_split", EIGHT, _stage(pipelining.ScheduleInterleaved1F1B, 0), ROUNDING),
    Lever("interleaved_last", "cards_split", EIGHT, _stage(pipelining.ScheduleInterleaved1F1B, 7), ROUNDING),
    Lever("zero_bubble", "cards_split", EIGHT, _stage(pipelining.ScheduleZBVZeroBubble, 0), ROUNDING),
    Lever("zero_bubble_last", "cards_split", EIGHT, _stage(pipelining.ScheduleZBVZeroBubble, 7), ROUNDING),
    Lever("layout_first", "cards_layout", LAYOUT, _layout(place=0), EQUAL),
    Lever("layout_last", "cards_layout", LAYOUT, _layout(place=15), EQUAL),
    Lever("layout_sums_16", "cards_layout", LAYOUT, _layout(policy=R.halves(torch.bfloat16)), ROUNDING),
    Lever("layout_interleaved", "cards_layout", LAYOUT, _layout(pipelining.ScheduleInterleaved1F1B), EQUAL),
    Lever("layout_zero_bubble", "cards_layout", LAYOUT, _layout(pipelining.ScheduleZBVZeroBubble), EQUAL),
    Lever(
        "layout_zero_bubble_last", "cards_layout", LAYOUT, _layout(pipelining.ScheduleZBVZeroBubble, place=15), EQUAL
    ),
    Lever("layout_compiled", "cards_layout", LAYOUT, _layout(prepare=V.blocks_compiled), ROUNDING),
    Lever("layout_products", "cards_layout", LAYOUT, _layout(prepare=V.products_between_cards_kept), EQUAL),
    Lever("layout_columns", "cards_layout", LAYOUT, _layout(prepare=V.columns_kept), EQUAL),
    Lever("layout_checkpointing", "cards_layout", LAYOUT, _layout(prepare=checkpointed), EQUAL),
    Lever("layout_resharded", "cards_layout", LAYOUT, _layout(prepare=checkpointed, keep=False), EQUAL),
    Lever(
        "layout_tensor_fsdp2", "cards_layout", LAYOUT,
        _no_stages(R.tensors_and_fsdp2(META.policy, META.tensor), 2048, META.tensor), ROUNDING,
    ),
    Lever("fsdp2_lora", "cards_lora", TWO_ADAPTERS + SEVENTY, _sharded_adapters("lora"), ROUNDING),
    Lever("ddp_qlora", "cards_lora", TWO_ADAPTERS, {"load": W.four_bits("nf4", double=True)}, OTHER, BNB),
    Lever("fsdp2_qlora", "cards_lora", TWO_ADAPTERS + SEVENTY, _sharded_adapters("qlora"), OTHER, BNB),
)  # fmt: skip
