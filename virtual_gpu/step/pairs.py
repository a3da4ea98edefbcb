"""DPO's loss: of pairs of answers, by the model that is trained and by the one that it was before.

Rafailov et al., "Direct Preference Optimization", 2023, arXiv 2305.18290, equation 7. In three orders:

- tiles of the logits: TRL 1.16, `DPOTrainer._compute_loss`: first the policy's log probabilities of the answers, then
  the reference's.
- whole logits, row by row: TRL 1.6 to 1.13 (1.8 was run), `DPOTrainer._compute_loss` with `selective_log_softmax` and
  `entropy_from_logits` of trl/trainer/utils.py. Policy's and reference's stay until the loss is there, and then the
  policy's are copied once more, for the entropy that is logged. axolotl 0.18 trains by TRL 1.8. Before 1.6 both are
  copied at once; 1.14 makes the entropy in a kernel.
- whole logits, in fp32: LLaMA-Factory, src/llamafactory/train/dpo/trainer.py, which keeps the policy's for a metric
  until the loss is there.

Dropout is off in all (`without_dropout`). What has one number a token is left out, but for what TRL's head leaves. Of
a mixture of experts TRL adds the routers' loss, where the configuration has a coefficient (1.8 to 1.13 by one of their
own); LLaMA-Factory does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import WrongValue
from ..language import tr
from ..models.depth import text_config

BETA = 0.1  # both libraries' default; no byte hangs on it
# What DPOTrainer asks of its head: beside the log probabilities, numbers of which it makes metrics.
OF_THE_HEAD = ("log_probs", "entropy", "mean_logits", "is_top1")
REFERENCES = ("same", "half", "precomputed")
TOKENS = 128  # of which TRL computes the entropy at once
ROUTERS = 0.001  # TRL 1.8, DPOConfig's router_aux_loss_coef

Forward = Callable[..., Any]  # (model, inputs by name) → its outputs, in the precision of the training


def side_by_side(pairs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """(samples, 2, length) → (2 × samples, length): first all chosen answers, then all rejected ones."""
    return {name: value.transpose(0, 1).flatten(0, 1) for name, value in pairs.items()}


def without_dropout(model: nn.Module) -> None:
    """Switch dropout off, as TRL's `disable_dropout_in_model` does; functions that a model calls itself keep theirs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def preference_loss(
    forward: Forward,
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    *,
    reference: nn.Module | None = None,
    known: torch.Tensor | None = None,
    fused_lm_head: bool = True,
    by_row: bool = False,
) -> torch.Tensor:
    """DPO's loss of `inputs`, all (2 × samples, length) by `side_by_side`: "input_ids", "labels" (-100: no answer), and
    "attention_mask" where there is padding.

    reference: the model as it was; None is `model` with its adapters switched off. known: the reference's log
    probability of each answer, (2 × samples), where they were made before. fused_lm_head: of TRL's head, which `model`
    and `reference` then have (`models.fused_head`); else whole logits, by_row: as TRL before it. WrongValue where there
    is no reference.
    """
    if reference is None and known is None and not hasattr(model, "disable_adapter"):
        raise WrongValue(
            tr(
                ko=f"{type(model).__name__}에는 끌 어댑터가 없다. reference에 기준 모델을 주거나 그 로그 확률을 준다.",
                en=f"{type(model).__name__} has no adapters to switch off: give a reference, or what it said.",
            )
        )
    by_row = by_row and not fused_lm_head
    score = _by_head if fused_lm_head else _by_row if by_row else _whole
    routers = _routers_coefficient(model, by_row) if fused_lm_head or by_row else 0.0
    scores, kept = score(forward, model, inputs, **({"output_router_logits": True} if routers else {}))
    if known is None:
        with torch.no_grad(), _as_reference(model, reference) as before:
            known, of_reference = score(forward, before, inputs)
        if not by_row:
            del of_reference
    chosen, rejected = (scores - known).chunk(2)
    loss = -nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()
    loss = loss + routers * kept.aux_loss if routers else loss
    if by_row:
        _entropy(kept.logits)  # of which TRL makes a metric; while the reference's logits are there
    return loss


Scored = tuple[torch.Tensor, Any]  # the log probability of each answer, what stays beside it until the loss is there


def _by_head(forward: Forward, model: nn.Module, inputs: Mapping[str, torch.Tensor], **more: Any) -> Scored:
    outputs = forward(model, **inputs, **more, use_cache=False, fused_lm_head=True)
    return outputs.log_probs.sum(-1), outputs


def _whole(forward: Forward, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Scored:
    logits = forward(model, **_read(inputs), use_cache=False).logits.float()
    answers, labels = _answers(inputs)
    chances = logits[:, :-1].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return (chances * answers).sum(-1), logits


def _by_row(forward: Forward, model: nn.Module, inputs: Mapping[str, torch.Tensor], **more: Any) -> Scored:
    outputs = forward(model, **_read(inputs), **more, use_cache=False)
    logits = outputs.logits[:, :-1]
    answers, labels = _answers(inputs)
    if logits.dtype == torch.float32:  # as they are where accelerate makes them so, under mixed precision
        chosen = logits.gather(-1, labels[..., None])[..., 0]
        chances = chosen - torch.stack([row.logsumexp(-1) for row in logits])
    else:
        rows = []
        for row, label in zip(logits, labels[..., None], strict=True):
            of_row = row.log_softmax(-1)  # there until the next one is
            rows.append(of_row.gather(-1, label)[..., 0])
        chances = torch.stack(rows)
    return (chances * answers).sum(-1), outputs


def _read(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the model reads of a batch."""
    return {name: value for name, value in inputs.items() if name != "labels"}


def _answers(inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(which tokens are answers', the tokens), one place on."""
    labels = inputs["labels"][:, 1:]
    answers = labels != -100
    return answers, labels.masked_fill(~answers, 0)


@torch.no_grad()
def _entropy(logits: torch.Tensor) -> torch.Tensor:
    found = []
    for some in logits[:, :-1].reshape(-1, logits.shape[-1]).split(TOKENS):
        chances = some.log_softmax(-1)
        found.append(-(chances.exp() * chances).sum(-1))
    return torch.cat(found)


def _routers_coefficient(model: nn.Module, by_row: bool) -> float:
    """By how much the routers' loss counts (DPOTrainer's `router_aux_loss_coef`, by default the configuration's)."""
    config = text_config(model.config)
    if by_row:
        return ROUTERS if hasattr(config, "output_router_logits") else 0.0
    coefficient = getattr(config, "router_aux_loss_coef", None) if hasattr(config, "output_router_logits") else None
    return float(coefficient or 0.0)


@contextmanager
def _as_reference(model: nn.Module, reference: nn.Module | None) -> Iterator[nn.Module]:
    if reference is not None:
        yield reference
        return
    with model.disable_adapter():
        yield model
