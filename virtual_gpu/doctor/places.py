"""From a traceback to the moment of a run: loading, forward, loss, backward, the optimizer's step, evaluation, …"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .frames import Frame

LOADING, RESUMING, SAVING = "loading", "resuming", "saving"
FORWARD, ATTENTION, LOGITS, BACKWARD = "forward", "attention", "logits_and_loss", "backward"
OPTIMIZER_STATES, OPTIMIZER_STEP = "optimizer_first_step", "optimizer_step"
EVALUATION_GATHERS, EVALUATION, GENERATION = "evaluation_gathers", "evaluation", "generation"
WRAPPING, GATHERING = "wrapping", "gathering_shards"


@dataclass(frozen=True)
class Place:
    """Where the request came from: the moment, how sure the frame makes it, and the frame."""

    moment: str
    sure: str
    frame: Frame


# moment, how sure, pattern of "file::function::code". What stands first is the more telling: an evaluation has a
# forward pass inside, `generate` has many, a first step is inside `step`. Names as in torch 1.x to 2.13, transformers
# 4 and 5, peft, trl, accelerate, deepspeed 0.15, bitsandbytes 0.45; the file is its path from the package on.
_KNOWN = [
    (EVALUATION_GATHERS, "certain",
     r"::(?:nested_concat|torch_pad_and_concatenate|pad_across_processes|_pad_across_processes"
     r"|gather_for_metrics|nested_gather|_nested_gather)::|EvalLoopContainer"
     r"|trainer_pt_utils\.py::add::"),
    (RESUMING, "certain",
     r"::(?:_load_from_checkpoint|_load_optimizer_and_scheduler|_load_rng_state|load_state|load_checkpoint)::"
     r"|^torch/optim/\S*::load_state_dict::"),
    (SAVING, "certain",
     r"::(?:_save_checkpoint|_save_optimizer_and_scheduler|save_pretrained|save_model|save_checkpoint"
     r"|_zero3_consolidated_16bit_state_dict|save_16bit_model|save_fsdp_model|save_fsdp_optimizer"
     r"|get_state_dict|full_optim_state_dict)::|^torch/serialization\.py::(?:_?save|_legacy_save)::"),
    (LOADING, "certain",
     r"::(?:from_pretrained|from_config|_load_pretrained_model|_load_state_dict_into_meta_model"
     r"|load_checkpoint_and_dispatch|load_checkpoint_in_model|set_module_tensor_to_device|dispatch_model"
     r"|_materialize_copy|from_single_file)::"),
    (RESUMING, "likely",
     r"^torch/serialization\.py::(?:load|_load|_legacy_load|_cuda_deserialize|restore_location"
     r"|default_restore_location)::|torch\.load\("),
    (GENERATION, "certain",
     r"^transformers/generation/\S*::|^transformers/cache_utils\.py::"
     r"|::(?:_?greedy_search|_?beam_search|_sample|generate)::|\.generate\("),
    (OPTIMIZER_STATES, "certain",
     r"^(?:torch/optim|bitsandbytes/optim)/\S*::(?:_init_group|init_state|get_state_buffer|_init_state)::"
     r"|^(?:torch/optim|transformers/optimization)\S*::\w*::.{0,80}zeros_like\("
     r"|::initialize_optimizer_states::"),
    (OPTIMIZER_STEP, "certain",
     r"^(?:torch/optim|bitsandbytes/optim)/\S*::\w*(?:step|adam|adamw|sgd|foreach|update)\w*::"
     r"|^deepspeed/runtime/\S*::(?:step|_take_model_step)::|^torch/nn/utils/clip_grad\.py::"),
    (EVALUATION, "certain", r"::(?:evaluation_loop|prediction_loop|prediction_step|evaluate)::"),
    (BACKWARD, "certain",
     r"^torch/autograd/(?:__init__|graph)\.py::|^torch/_tensor\.py::backward::"
     r"|_engine_run_backward\(|_execution_engine\.run_backward\("),
    (LOGITS, "certain",
     r"::(?:cross_entropy|fixed_cross_entropy|nll_loss|ForCausalLMLoss|selective_log_softmax|_get_per_token_logps\w*"
     r"|entropy_from_logits)::|logits\.(?:float|to)\(|logits = self\.lm_head"
     r"|\blm_head\(|\.log_softmax\(|shift_logits\b.{0,60}contiguous"),
    (GATHERING, "certain",
     r"^deepspeed/runtime/zero/(?:partition_parameters|partitioned_param_coordinator)\.py::"
     r"|^torch/distributed/fsdp/\S*::(?:_unshard\w*|unshard|all_gather\w*|_alloc_padded_unsharded_flat_param)::"),
    (WRAPPING, "certain",
     r"^torch/nn/parallel/distributed\.py::(?:__init__|_ddp_init_helper)::"
     r"|^deepspeed/__init__\.py::initialize::|^deepspeed/runtime/\S*::__init__::"),
    (LOADING, "likely",
     r"^torch/nn/modules/module\.py::(?:to|cuda|_apply|convert|half|bfloat16|<lambda>)::"
     r"|\bmodel\w*\.(?:to|cuda)\("),
    (ATTENTION, "certain",
     r"::(?:eager_attention_forward|_attn|scaled_dot_product_attention)::"
     r"|(?:scores|attn_\w*|attention_\w*).{0,60}(?:matmul|softmax|bmm)\("
     r"|softmax\((?:attn|scores|attention)"),
    (FORWARD, "certain", r"::(?:forward|_call_impl|_wrapped_call_impl|compute_loss|training_step)::"),
]  # fmt: skip
MOMENTS = frozenset(moment for moment, _, _ in _KNOWN)
_PATTERNS = [(moment, sure, re.compile(pattern)) for moment, sure, pattern in _KNOWN]
_RECOMPUTED = re.compile(r"^torch/utils/checkpoint\.py::(?:unpack_hook|backward|recompute_fn)::")
_WITHIN = {OPTIMIZER_STEP: OPTIMIZER_STATES, EVALUATION: EVALUATION_GATHERS}  # the wider → what says more
MOST = 3  # moments that are worth saying


def places(frames: Sequence[Frame]) -> list[Place]:
    """The moments that these frames show, the most telling first; of the same moment the innermost frame."""
    found: list[Place] = []
    said = [(_said(frame), frame) for frame in reversed(frames)]
    for moment, sure, pattern in _PATTERNS:
        frame = next((frame for text, frame in said if pattern.search(text)), None)
        if frame and moment not in {place.moment for place in found}:
            found.append(Place(moment, sure, frame))
    shown = {place.moment for place in found}
    found = [place for place in found if _WITHIN.get(place.moment) not in shown]
    if len(found) > 1:  # that a forward pass runs says nothing where something in it is known
        found = [place for place in found if place.moment != FORWARD]
    return found[:MOST]


def recomputed(frames: Sequence[Frame]) -> bool:
    """Whether gradient checkpointing was running its forward pass again inside backward: it is on already."""
    return any(_RECOMPUTED.search(_said(frame)) for frame in frames)


def offloaded(frames: Sequence[Frame]) -> bool:
    """Whether checkpoints were on their way to the CPU or back (PyTorch's `save_on_cpu`): they are moved already."""
    return any(frame.function in ("pack_to_cpu", "unpack_from_cpu") for frame in frames)


def _said(frame: Frame) -> str:
    return f"{frame.path}::{frame.function}::{frame.code[:300]}"
