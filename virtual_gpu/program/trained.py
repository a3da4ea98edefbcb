"""What a program was training when its run ended, and what the card must hold for that whatever the activations."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .changed import CAUSAL, has_switch, is_trained, kind_of_blocks
from .quantized import state_tensors
from .watch import Watch


@dataclass(frozen=True)
class Trained:
    """With adapters, quantized to 4 or 8 bits, without fp32 weights, without a switch for checkpoints; bytes.

    diffusers: what is trained is of that library, whose switch has another name.
    causal: a model of transformers' …ForCausalLM, or none there yet: where LoRA, QLoRA and the fused head have a place.
    grouped: transformers handed sdpa heads in groups, for which it took the math kernel.
    blocks: the class of those that the change block_checkpointing recomputes, or the classes; "" without any.
    weights: all parameters. gradients: of those that are trained. states: of PyTorch's Adam or AdamW, 0 with any other
    optimizer or none yet. eight_bit_states: one byte for each of its two. All 0 where ranks share the parameters, or
    where hooks take gradients before all of them are there.
    """

    adapters: bool = False
    quantized: bool = False
    sixteen_bits: bool = False
    own: bool = False
    diffusers: bool = False
    causal: bool = True
    grouped: bool = False
    blocks: str = ""
    weights: int = 0
    gradients: int = 0
    states: int = 0
    eight_bit_states: int = 0

    def least(self, *, eight_bit: bool = False) -> int:
        """Bytes that a step cannot do without: weights, gradients and the optimizer's states are there together."""
        return self.weights + self.gradients + (self.eight_bit_states if eight_bit else self.states)


def trained(watch: Watch) -> Trained:
    """What the models and optimizers that are there say."""
    storages = watch.gpu.mode.storages  # of this card: a notebook's kernel may hold models of another one

    def is_here(parameter: torch.nn.Parameter) -> bool:
        return parameter.is_cuda and parameter.untyped_storage()._cdata in storages

    roots = [root for root in watch.modules.roots if any(map(is_here, root.parameters()))]
    parts = {part for root in roots for part in root.modules()}
    parameters = {p for part in parts for p in part.parameters(recurse=False)}
    kinds = {
        "adapters": any(type(part).__module__.startswith("peft.") for part in parts),
        "quantized": any(state_tensors(part) for part in parts),
        "own": bool(parts) and not any(map(has_switch, parts)),
        "diffusers": any(hasattr(part, "enable_gradient_checkpointing") and is_trained(part) for part in parts),
        "causal": not parts or any(type(part).__name__.endswith(CAUSAL) for part in parts),
        "grouped": watch.gpu.rules.math_for_groups and "transformers.integrations.sdpa_attention" in sys.modules,
        "blocks": ", ".join(sorted({kind.__name__ for kind in map(kind_of_blocks, roots) if kind is not None})),
        "sixteen_bits": not any(p.dtype == torch.float32 and p.ndim > 1 for p in parameters),
    }
    learns = [p for p in parameters if p.requires_grad]
    taken_early = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in learns)
    if watch.gpu.ranks > 1 or taken_early or any(map(is_traceable_wrapper_subclass, parameters)):
        return Trained(**kinds)
    adams = [one for one in gc.get_objects() if type(one) in (torch.optim.Adam, torch.optim.AdamW)]
    stepped = {p for adam in adams for group in adam.param_groups for p in group["params"] if p.requires_grad}
    return Trained(
        **kinds, weights=_nbytes(parameters), gradients=_nbytes(learns), states=2 * _nbytes(stepped),
        eight_bit_states=2 * sum(p.numel() for p in stepped if p.is_cuda),
    )  # fmt: skip


def _nbytes(parameters: set[torch.nn.Parameter] | list[torch.nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p.is_cuda)
