"""Losses of Liger-Kernel's benchmark scripts, in PyTorch: on logits, on a hidden state and a head, of preferences."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from virtual_gpu.counting.gpu import VirtualGPU

from .calls import Program


def _head(s: SimpleNamespace, width: int | None = None) -> torch.Tensor:
    return torch.empty(s.V, width or s.H, dtype=s.dtype, requires_grad=True)


# -- on logits --------------------------------------------------------------------------------------------------------


def cross_entropy(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """Of B·T rows of V."""
    x = torch.randn(s.B * s.T, s.V, requires_grad=True)
    target = torch.randint(s.V, (s.B * s.T, 1)).squeeze(1)
    return Program(lambda: F.cross_entropy(x, target))


def kl_div(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """Against probabilities; the input is a log_softmax that keeps its own graph."""
    x = torch.randn(s.B * s.T, s.V, requires_grad=True).log_softmax(dim=-1)
    target = torch.randn(s.B * s.T, s.V).softmax(dim=-1)
    return Program(lambda: F.kl_div(x, target, reduction="batchmean"), retain=True)


def _kl(x: torch.Tensor, target: torch.Tensor, reduction: str = "batchmean") -> torch.Tensor:
    return F.kl_div(x, target, reduction=reduction, log_target=True)


def jsd(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """By the script of 2024, where a row has B and T; by that of 2026, where it has the tokens at once."""
    rows, width, loss = (s.BT, s.vocab_size, _jsd_of_2026) if hasattr(s, "BT") else (s.B * s.T, s.V, _jsd_of_2024)
    x = torch.randn(rows, width, requires_grad=True).log_softmax(dim=-1)
    target = torch.randn(rows, width).log_softmax(dim=-1)
    return Program(lambda: loss(x, target), retain=True)


def _jsd_of_2024(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    m = 0.5 * (torch.exp(log_p) + torch.exp(log_q))
    log_m = torch.log(m)
    loss = 0.5 * (_kl(log_m, log_p) + _kl(log_m, log_q))
    return loss


def _jsd_of_2026(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    m = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    loss = 0.5 * _kl(torch.log(m), log_p, "none").sum(dim=-1) + 0.5 * _kl(torch.log(m), log_q, "none").sum(dim=-1)
    loss = (loss / log_q.shape[0]).sum()
    return loss.to(torch.float)


def tvd(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """Half the sum of differences."""
    p = torch.randn(s.B * s.T, s.V, requires_grad=True).softmax(dim=-1)
    q = torch.randn(s.B * s.T, s.V).softmax(dim=-1)

    def forward() -> torch.Tensor:
        distance = torch.abs(p - q) / 2.0
        return torch.sum(distance) / p.size(0)

    return Program(forward, retain=True)


# -- on a hidden state and a head -------------------------------------------------------------------------------------


def fused_linear_cross_entropy(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """Head and loss; Liger's head is there too."""
    ours, liger = _head(s), _head(s)
    x = torch.randn(s.BT, s.H, dtype=s.dtype, requires_grad=True)
    target = torch.randint(s.V, (s.BT, 1)).squeeze(1)

    def forward() -> torch.Tensor:
        logits = F.linear(x, ours)
        return F.cross_entropy(logits, target)

    return Program(forward, holds=(liger,))


def fused_linear_jsd(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """Student and teacher heads, which Liger's module shares; the teacher's weight is trained too."""
    student, teacher = _head(s), _head(s)
    x = torch.rand(s.BT, s.H, dtype=s.dtype, requires_grad=True)
    seen = torch.rand(s.BT, s.H, dtype=s.dtype)

    def forward() -> torch.Tensor:
        student_logits = F.linear(x, student)
        teacher_logits = F.linear(seen, teacher)
        student_prob = torch.log_softmax(student_logits / 1.0, dim=-1)
        teacher_prob = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return loss(student_prob, teacher_prob)

    def loss(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
        m = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
        found = 0.5 * _kl(torch.log(m), log_p) + (1 - 0.5) * _kl(torch.log(m), log_q)
        return found.to(s.dtype)

    return Program(forward)


def _distilled(distance):
    """A student of half the width and a teacher: cross-entropy and their logits' distance; Liger's heads besides."""

    def program(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
        heads = [_head(s, width) for width in (s.H // 2, s.H, s.H // 2, s.H)]
        student, teacher = heads[:2]
        seed = torch.rand(s.BT, s.H // 2, dtype=s.dtype)
        _, x = (seed.detach().clone().requires_grad_(True) for _ in range(2))
        seen = torch.rand(s.BT, s.H, dtype=s.dtype)
        target = torch.randint(0, s.V, (s.BT,))

        def logits_and_hard_loss() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            student_outputs = x @ student.t()
            with torch.no_grad():
                teacher_outputs = seen @ teacher.t()
            student_logits = student_outputs.view(s.BT, -1).float()
            teacher_logits = teacher_outputs.view(s.BT, -1).float()
            return student_logits, teacher_logits, F.cross_entropy(student_logits, target)

        def forward() -> torch.Tensor:
            output = logits_and_hard_loss()
            student_logits, teacher_logits, hard = output
            soft = distance(student_logits, teacher_logits)
            return s.weight_hard_loss * hard + s.weight_soft_loss * soft

        return Program(
            forward,
            holds=(
                heads,
                seed,
                _,
            ),
        )

    return program


def _jsd_distance(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """As in December 2024 (commit 9218cf07), when the rows were measured."""
    student_logits = student_logits / 1.0
    teacher_logits = teacher_logits / 1.0
    student = F.softmax(student_logits, dim=-1)
    teacher = F.softmax(teacher_logits, dim=-1)
    log_mean = torch.log((student + teacher) / 2)
    student_kl = _kl(log_mean, torch.log(student))
    teacher_kl = _kl(log_mean, torch.log(teacher))
    loss = (student_kl + teacher_kl) / 2
    return loss.mean()


def _cosine_distance(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    student_logits /= 1.0
    teacher_logits /= 1.0
    student = F.normalize(student_logits, p=2, dim=-1)
    teacher = F.normalize(teacher_logits, p=2, dim=-1)
    similarity = F.cosine_similarity(student, teacher, dim=-1)
    loss = 1.0 * (1 - similarity)
    return loss.mean()


# -- of preferences ---------------------------------------------------------------------------------------------------


def _token_log_probabilities(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """The mean log probability of each sequence's labels."""
    mask = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    tokens = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (tokens * mask).sum(-1) / mask.sum(-1)


def _preferred(alignment, *, trains_input: bool = True):
    """A loss over pairs, half of the batch chosen, half rejected: cross-entropy of the chosen and an alignment loss."""

    def program(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
        ours, liger = _head(s), _head(s)
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


def orpo(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """By the first script (commit 02a168d1), which had sequences of 4,096 and stayed in bf16; then as the others."""
    if s.T != 4096:
        return _preferred(_orpo)(gpu, s)
    ours, liger = _head(s), _head(s)
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


def kto_loss(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
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


def grpo(gpu: VirtualGPU, s: SimpleNamespace) -> Program:
    """Importance sampling by token or by sequence, with a reference model."""
    heads = [_head(s) for _ in range(4)]
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
    "cross_entropy": cross_entropy,
    "kl_div": kl_div,
    "jsd": jsd,
    "tvd": tvd,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_jsd": fused_linear_jsd,
    "distill_jsd_loss": _distilled(_jsd_distance),
    "distill_cosine_loss": _distilled(_cosine_distance),
    "fused_linear_orpo_loss": orpo,
    "fused_linear_cpo_loss": _preferred(_cpo),
    "fused_linear_simpo_loss": _preferred(_simpo),
    "dpo_loss": _preferred(_dpo, trains_input=False),
    "kto_loss": kto_loss,
    **dict.fromkeys(("fused_linear_grpo_loss_token", "fused_linear_grpo_loss_sequence"), grpo),
}
