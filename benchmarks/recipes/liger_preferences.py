"""Losses of preferences in Liger-Kernel's benchmark scripts, in PyTorch: pairs, labelled sequences, policies."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from virtual_gpu.counting.gpu import VirtualGPU

from .calls import Program
from .liger_losses import head
from .recipe import Stated


def _token_log_probabilities(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """The mean log probability of each sequence's labels."""
    mask = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    tokens = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (tokens * mask).sum(-1) / mask.sum(-1)


def _preferred(alignment, *, trains_input: bool = True):
    """A loss over pairs, half of the batch chosen, half rejected: cross-entropy of the chosen and an alignment loss."""

    def program(gpu: VirtualGPU, s: Stated) -> Program:
        ours, liger = head(s), head(s)
        biased = getattr(s, "bias", False)
        biases = [torch.empty(s.V, dtype=s.dtype, requires_grad=True) for _ in range(2 * biased)]
        x = torch.randn(s.B, s.T, s.H, dtype=s.dtype, requires_grad=trains_input)
        target = torch.randint(s.V, (s.B, s.T))

        def concatenated() -> tuple[torch.Tensor, ...]:
            half = s.B // 2
            outputs = x @ ours.t()
            if biases:
                outputs = outputs + biases[0]
            logits = outputs.float()
            chosen = F.cross_entropy(logits[:half].view(-1, s.V), target[:half].view(-1))
            log_p = _token_log_probabilities(logits, target, -100)
            return log_p[:half], log_p[half:], logits[:half], logits[half:], chosen

        def forward() -> torch.Tensor:
            output = concatenated()
            losses = alignment(output[0], output[1])
            return output[4] * 1.0 - losses.mean()

        return Program(forward, holds=(liger, biases))

    return program


def _dpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    difference = 0.1 * (chosen - rejected)
    return -F.logsigmoid(difference)


def _orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * F.logsigmoid(odds)


def orpo(gpu: VirtualGPU, s: Stated) -> Program:
    """By the first script (commit 02a168d1), which had sequences of 4,096 and stayed in bf16; then as the others."""
    if s.T != 4096:
        return _preferred(_orpo)(gpu, s)
    ours, liger = head(s), head(s)
    x = torch.randn(s.B, s.T, s.H, dtype=s.dtype, requires_grad=True)
    target = torch.randint(s.V, (s.B, s.T))

    def forward() -> torch.Tensor:
        half = s.B // 2
        logits = F.linear(x, ours)
        chosen_loss = F.cross_entropy(logits[:half].view(-1, s.V), target[:half].view(-1))
        log_p = F.log_softmax(logits, dim=-1).mean(dim=-1)
        losses = _orpo(log_p[:half], log_p[half:])
        return chosen_loss - losses.mean()

    return Program(forward, holds=(liger,))


def _cpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    logits = chosen - rejected
    return F.logsigmoid(0.1 * logits) * (1 - 0.0) + F.logsigmoid(-0.1 * logits) * 0.0


def _simpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    logits = chosen - rejected
    logits = logits - (0.5 / 0.1)
    return F.logsigmoid(0.1 * logits) * (1 - 0.0) + F.logsigmoid(-0.1 * logits) * 0.0


def kto_loss(gpu: VirtualGPU, s: Stated) -> Program:
    """Chosen and rejected by labels of a bit each; a reference model; the input asks for no gradient.

    Which sequences are chosen is drawn: half of them here, and the copies of both together are all of the logits.
    """
    heads = [torch.empty(s.V, s.H, dtype=s.dtype, requires_grad=True) for _ in range(4)]
    biases = [torch.empty(s.V, dtype=s.dtype, requires_grad=True) for _ in range(4)] if s.bias else [None] * 4
    x = torch.randn(s.B, s.T, s.H, dtype=s.dtype)
    target = torch.randint(s.V, (s.B, s.T))
    chosen, rejected = (torch.empty(max(1, s.B // 2), dtype=torch.int64) for _ in range(2))
    kl = torch.randn(1, dtype=s.dtype)
    seen = torch.randn(s.B, s.T, s.H, dtype=s.dtype)

    def concatenated() -> tuple[torch.Tensor, ...]:
        outputs = x @ heads[0].t()
        if biases[0] is not None:
            outputs = outputs + biases[0]
        logits = outputs.float()
        nothing = torch.zeros(())
        log_p = _token_log_probabilities(logits, target, s.ignore_index)
        return log_p[chosen], log_p[rejected], logits[chosen], logits[rejected], nothing

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits = seen @ heads[1].t()
            if biases[1] is not None:
                logits = logits + biases[1]
            log_p = _token_log_probabilities(logits, target, s.ignore_index)
            return log_p[chosen], log_p[rejected]

    def forward() -> torch.Tensor:
        output = concatenated()
        seen_chosen, seen_rejected = reference()
        chosen_ratio = output[0] - seen_chosen
        chosen_losses = 1 - F.sigmoid(s.beta * (chosen_ratio - kl))
        rejected_ratio = output[1] - seen_rejected
        rejected_losses = 1 - F.sigmoid(s.beta * (kl - rejected_ratio))
        losses = torch.cat((chosen_losses, rejected_losses), 0)
        loss = output[4] * 1.0 + losses.mean()
        output[2].detach().sum(), output[3].detach().sum()
        return loss

    return Program(
        forward,
        holds=(
            heads,
            biases,
        ),
    )


def grpo(gpu: VirtualGPU, s: Stated) -> Program:
    """Importance sampling by token or by sequence, with a reference model."""
    heads = [head(s) for _ in range(4)]
    x = torch.randn(s.B, s.T, s.H, dtype=s.dtype, requires_grad=True)
    tokens = torch.randint(0, s.V, (s.B, s.T))
    mask = torch.ones(s.B, s.T)
    advantages = torch.randn(s.B, dtype=s.dtype)
    seen = torch.randn(s.B, s.T, s.H, dtype=s.dtype)

    def forward() -> torch.Tensor:
        logits = x @ heads[0].t()
        log_probs = F.log_softmax(logits.float(), dim=-1)
        log_p = log_probs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            ref_logits = seen @ heads[1].t()
            ref_log_probs = F.log_softmax(ref_logits.float(), dim=-1)
            ref_log_p = ref_log_probs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        log_ratio = log_p - log_p.detach()
        if s.importance_sampling_level == "token":
            weights = log_ratio
        else:
            weights = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
            weights = weights.unsqueeze(-1)
        first = torch.exp(weights)
        second = torch.clamp(first, 1 - 0.2, 1 + 0.2)
        first_loss = first * advantages.unsqueeze(1)
        second_loss = second * advantages.unsqueeze(1)
        loss = -torch.min(first_loss, second_loss)
        kl = torch.exp(ref_log_p - log_p) - (ref_log_p - log_p) - 1.0
        loss = loss + 0.1 * kl
        return (loss * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    return Program(forward, holds=(heads,))


PROGRAMS = {
    "fused_linear_orpo_loss": orpo,
    "fused_linear_cpo_loss": _preferred(_cpo),
    "fused_linear_simpo_loss": _preferred(_simpo),
    "dpo_loss": _preferred(_dpo, trains_input=False),
    "kto_loss": kto_loss,
    **dict.fromkeys(("fused_linear_grpo_loss_token", "fused_linear_grpo_loss_sequence"), grpo),
}
