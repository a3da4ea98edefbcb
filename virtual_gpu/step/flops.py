"""Floating-point operations of a training step, counted by PyTorch on a virtual GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, sdpa_backward_flop_count, sdpa_flop_count

from ..cards import CATALOG
from ..counting.gpu import VirtualGPU
from ..models.adapters import add_adapters, module_names
from ..models.build import build_model
from ..models.configs import cached_by_model, load_config, running
from ..models.depth import linear_in_depth, text_config
from ..models.fused_head import fused_head
from ..models.kept import is_uniform
from ..turns import in_turn, refuse_in_a_block
from .pairs import preference_loss
from .run import set_checkpointing
from .setting import Setting


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    heads = query[1]
    return sdpa_flop_count(query, _with_heads(key, heads), _with_heads(value, heads))


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    heads = query[1]
    return sdpa_backward_flop_count(gradient, query, _with_heads(key, heads), _with_heads(value, heads))


def _addmm(added: torch.Size, a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """PyTorch's formula takes neither the type of the result (`out_dtype`) nor the operation in place."""
    return addmm_flop(added, a, b)


def grouped_flop(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Groups of rows, each with a matrix of its own, as experts compute; PyTorch's counter (2.13) knows them not.

    Rows (2 dimensions) by matrices (3), or in the gradients of the matrices by rows, or matrices by matrices.
    """
    if len(a) == len(b) == 2:
        return 2 * a[0] * a[1] * b[1]
    return 2 * math.prod(a if len(a) == 2 or len(b) == 3 else a[1:]) * b[-1]


def _with_heads(shape: torch.Size, heads: int) -> tuple[int, ...]:
    samples, _, *rest = shape
    return (samples, heads, *rest)


# PyTorch's own formulas, which up to 2.11 refuse grouped-query attention: there a head of the keys serves several heads
# of the queries and is multiplied with each.
_FORMULAS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{direction}"): formula
    for direction, formula in (("", _attention), ("_backward", _attention_backward))
    for kernel in ("flash", "efficient", "cudnn")
} | {torch.ops.aten.addmm: _addmm, torch.ops.aten.addmm_: _addmm, torch.ops.aten._grouped_mm: grouped_flop}


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products (attention among them) of one forward and one backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __repr__(self) -> str:
        return f"Flops(forward={self.forward / 1e12:.3f} T, backward={self.backward / 1e12:.3f} T)"


@in_turn
def count_flops(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    fused_lm_head: bool = False,
    objective: str = "sft",
    known: bool = False,
    scored: int = 0,
    forwards: int = 0,
) -> Flops:
    """The FLOPs of a loss and its backward, counted by PyTorch's FlopCounterMode on a virtual GPU.

    objective: "sft" is `model(**inputs).loss`, "dpo" the loss of pairs (`step.pairs`), with the reference's forward
    unless what it says is known. "grpo" is that of the last `scored` tokens, after so many `forwards` of them.
    fused_lm_head: the loss from TRL's head, which makes the logits a second time in backward.
    """
    refuse_in_a_block()
    gpu = VirtualGPU(CATALOG["A100-80GB"], limited=False)
    model, inputs = gpu.place(model), gpu.place(inputs)
    with ExitStack() as stack:
        if fused_lm_head:
            stack.enter_context(fused_head(model, virtual=True, some=bool(scored)))
            rows, length = inputs["input_ids"].shape
            gpu.answers.chosen = {rows * (length - 1): rows * scored} if scored else {}
            inputs = inputs if objective == "dpo" else {**inputs, "fused_lm_head": True}
        stack.enter_context(gpu.interrupts_wait())  # Ctrl+C inside PyTorch's own callbacks from C++ ends the process
        counter = stack.enter_context(FlopCounterMode(display=False, custom_mapping=_FORMULAS))
        with gpu:
            if objective == "dpo":
                reference = None if hasattr(model, "disable_adapter") else model  # what it computes is the same
                told = gpu.place(torch.zeros(len(inputs["input_ids"]))) if known else None
                how = {"reference": reference, "known": told, "fused_lm_head": fused_lm_head}
                loss = preference_loss(lambda model, **given: model(**given), model, inputs, **how)
            elif scored:
                # Whole logits are of those tokens alone, as TRL's head makes them.
                how = {} if fused_lm_head else {"logits_to_keep": scored}
                inputs = inputs if fused_lm_head else {"input_ids": inputs["input_ids"]}
                with torch.no_grad():
                    for _ in range(forwards):
                        model(**inputs, **how)
                loss = model(**inputs, **how)
                loss = loss.loss if fused_lm_head else loss.logits.float().sum()
            else:
                loss = model(**inputs).loss
            forward = counter.get_total_flops()
            loss.backward()
        return Flops(forward, counter.get_total_flops() - forward)


def flops_of(operation: Any, operands: Sequence[Any], more: Mapping[str, Any], out: Any) -> int:
    """The FLOPs of one operation that gave `out`, by PyTorch's formula; 0 where it has none."""
    formula = FlopCounterMode(display=False, custom_mapping=_FORMULAS).flop_registry.get(operation._overloadpacket)
    return formula(*operands, **more, out_val=out) if formula else 0


def training_flops(setting: Setting | None = None, **settings: Any) -> Flops:
    """The FLOPs of one micro-batch of the experiment's setting, linear in depth: run at two depths, where it can be.

    With adapters nothing is computed for the gradients of frozen weights. Of DPO the reference's forward is in it,
    unless its log probabilities were made before; of GRPO those of the log probabilities that its loss asks for, by
    the share of one of the steps that learn from them (`iterations`), and nothing of the generation.
    """
    setting = Setting.one(setting, settings)
    adapters = (setting.lora_rank, setting.lora_targets, setting.modules_to_save) if setting.peft else None
    of = (
        setting.model_id, setting.rows, setting.sequence_length, setting.gradient_checkpointing, adapters,
        setting.fused_lm_head, setting.kept_results, setting.objective, setting.reference == "precomputed",
        setting.completion_length,
    )  # fmt: skip
    found = _training_flops(*of, (setting.beta > 0) + (setting.iterations > 1 or bool(setting.vllm)))
    if setting.iterations == 1:
        return found
    alone = _training_flops(*of, 0).forward
    return replace(found, forward=alone + (found.forward - alone) // setting.iterations)


@cached_by_model
def _training_flops(
    model_id: str,
    rows: int,
    sequence_length: int,
    checkpointing: bool,
    adapters: tuple | None,
    fused_lm_head: bool,
    kept: tuple[str, ...],
    objective: str,
    known: bool,
    scored: int,
    forwards: int,
) -> Flops:
    def run(config: Any) -> dict[str, int]:
        how = checkpointing, adapters, fused_lm_head, kept, objective, known, scored, forwards
        return asdict(flops_of_config(config, rows, sequence_length, *how))

    config, names = load_config(model_id), module_names(*adapters[1:]) if adapters else ()
    return Flops(**(linear_in_depth(config, run, names) if is_uniform(kept) else run(config)))


@in_turn
def flops_of_config(
    config: Any,
    batch_size: int,
    sequence_length: int,
    checkpointing: bool,
    adapters: tuple | None = None,
    fused_lm_head: bool = False,
    kept: tuple[str, ...] = (),
    objective: str = "sft",
    known: bool = False,
    scored: int = 0,
    forwards: int = 0,
) -> Flops:
    """The FLOPs of one micro-batch with every layer run, under whatever `set_checkpoint_early_stop` says.

    batch_size: sequences. adapters: (rank, targets, modules_to_save) of LoRA, see `add_adapters`. fused_lm_head,
    objective, known, scored, forwards: see `count_flops`. kept: by checkpointed blocks, see `models.kept`.
    """
    model = build_model(config, torch.float16)
    if adapters:
        model = add_adapters(model, *adapters[:2], modules_to_save=adapters[2])
    model = set_checkpointing(model.train(), checkpointing, kept)
    text_config(model.config).use_cache = False
    ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    with running(config.model_type):
        inputs = {"input_ids": ids, "labels": ids}
        return count_flops(model, inputs, fused_lm_head, objective, known, scored, forwards)
