"""Levers on logits and loss: what is computed from the last hidden state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

CHUNK = 256  # tokens
Batch = dict[str, torch.Tensor]


class PythonBodies(TorchDispatchMode):
    """Run the body of an operation that is written in Python: a fake mode only asks it for its results' shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = OPDEFS.get(f"{func.namespace}::{func._opname}")
        return (found._init_fn if found else func)(*args, **(kwargs or {}))


def causal(model: nn.Module) -> Any:
    """transformers' model under peft's adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def before_the_head(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden state of each token but the last, the head's weight, the token that follows each)."""
    inner = causal(model)
    hidden = inner.base_model(**batch, use_cache=False).last_hidden_state
    return hidden[:, :-1].flatten(0, 1), inner.get_output_embeddings().weight, batch["input_ids"][:, 1:].flatten()


def chunks_recomputed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The textbook's way: the logits of some tokens at a time, computed again in backward."""
    hidden, weight, target = before_the_head(model, batch)

    def of_chunk(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum")

    parts = zip(hidden.split(CHUNK), target.split(CHUNK), strict=True)
    return sum(checkpoint(of_chunk, *part, use_reentrant=False) for part in parts) / len(target)


def pytorch_chunks(model: nn.Module, batch: Batch) -> torch.Tensor:
    """PyTorch's own since 2.13."""
    hidden, weight, target = before_the_head(model, batch)
    hidden = hidden.to(weight.dtype)  # it is no operation of autocast
    with PythonBodies():
        return F.linear_cross_entropy(hidden, weight, target, options=nn.LinearCrossEntropyOptions())


def only_the_last(model: nn.Module, batch: Batch) -> torch.Tensor:
    """`logits_to_keep`: the logits of the answer, here the last quarter; the prompt has no loss."""
    ids = batch["input_ids"]
    answer = ids.shape[1] // 4
    logits = model(**batch, use_cache=False, logits_to_keep=answer + 1).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, -answer:].flatten())


def liger(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Liger's fused linear cross-entropy: the gradients of a chunk's logits are computed in forward, in their place."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight, target = before_the_head(model, batch)
    return LigerFusedLinearCrossEntropyLoss()(weight, hidden.to(weight.dtype), target)


def cut(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Apple's cut cross-entropy: no logits in the card's memory at all."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight, target = before_the_head(model, batch)
    return linear_cross_entropy(hidden.to(weight.dtype), weight, target)


def with_trl_head(model: nn.Module) -> None:
    """What TRL's SFTTrainer does to the model since 1.16 before it trains."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(causal(model), outputs=("log_probs", "entropy", "is_top1"))


def trl(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch, labels=batch["input_ids"], use_cache=False, fused_lm_head=True).loss


def liger_everywhere(model: nn.Module) -> None:
    """`use_liger_kernel=True`: every operation of the model that Liger has a kernel for. transformers' own call."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known

    kind = model.config.model_type
    if kind not in known:
        raise NotImplementedError(f"Liger has no kernels for {kind}")
    _apply_liger_kernel_to_instance(model=causal(model))
