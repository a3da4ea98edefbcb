"""Sequence parallelism, beside tensor parallelism: what lies between the matrices is split along the tokens.

PyTorch's SequenceParallel for the norms; the head keeps the logits of its part of the vocabulary, and the loss comes
from these (`loss_parallel`). For blocks of Llama's form: two norms, attention and an MLP.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ..language import tr

MATRICES = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_BLOCK = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def why_uneven(length: int, degree: int) -> str:
    """Why so many tokens are not split between so many GPUs; empty where they can be."""
    if length % degree:
        return tr(
            ko=f"길이({length})가 {degree}의 배수가 아니다",
            en=f"a length of {length} does not divide by {degree}",
        )
    return ""


def why_no_sequence(model: torch.nn.Module) -> str:
    """Why the tokens of that model are not split between the GPUs of a layer; empty where they can be."""
    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        return tr(
            ko="임베딩과 출력층이 한 텐서여서 로짓을 어휘로 나누지 못한다",
            en="embedding and head are one tensor: the logits are not split along the vocabulary",
        )
    body = model.base_model
    plan = {
        name.removeprefix("layers.*.") for name, style in model.config.base_model_tp_plan.items() if "wise" in style
    }
    blocks = getattr(body, "layers", ())
    alike = all({name for name, _ in block.named_children()} == _BLOCK for block in blocks)
    ends = {"embed_tokens", "layers", "norm"} <= {name for name, _ in body.named_children()}
    if plan >= MATRICES and plan - MATRICES <= {"embed_tokens", "norm"} and blocks and alike and ends:
        return ""
    return tr(
        ko="블록이 Llama와 같은 구조(정규화 둘, 어텐션, MLP)가 아니다",
        en="its blocks are not of Llama's form (two norms, attention, an MLP)",
    )


def plan_of_tokens(logits_whole: bool = False) -> dict[str, Any]:
    """Llama's plan of names and styles: between the matrices each GPU has its part of the tokens.

    logits_whole=False: each keeps the logits of its part of the vocabulary, for `loss_parallel`.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    here, everywhere = Shard(1), Replicate()
    columns, rows = ColwiseParallel, RowwiseParallel
    block = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": here}, desired_input_kwarg_layouts={"hidden_states": everywhere}
        ),
        **{f"self_attn.{name}_proj": columns() for name in "qkv"},
        "self_attn.o_proj": rows(output_layouts=here),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(here,), desired_input_layouts=(everywhere,)),
        "mlp.gate_proj": columns(),
        "mlp.up_proj": columns(),
        "mlp.down_proj": rows(output_layouts=here),
    }
    return {
        "model.embed_tokens": columns(output_layouts=everywhere),
        "model.layers.0": PrepareModuleInput(
            input_layouts=(everywhere,), desired_input_layouts=(here,), use_local_output=True
        ),
        **{f"model.layers.*.{name}": style for name, style in block.items()},
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": columns(
            input_layouts=here, output_layouts=everywhere if logits_whole else Shard(-1), use_local_output=logits_whole
        ),
    }


def loss_of_parts() -> AbstractContextManager:
    """In which a loss of split logits is computed, and its backward runs."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()
