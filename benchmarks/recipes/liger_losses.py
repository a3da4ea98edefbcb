"""Losses of Liger-Kernel's benchmark scripts, in PyTorch: on logits, or on a hidden state and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from virtual_gpu.counting.gpu import VirtualGPU

from .calls import Program
from .recipe import Stated


def head(s: Stated, width: int | None = None) -> torch.Tensor:
    """The weight of a head, to V numbers from `width`."""
    return torch.empty(s.V, width or s.H, dtype=s.dtype, requires_grad=True)


# -- on logits --------------------------------------------------------------------------------------------------------


def cross_entropy(gpu: VirtualGPU, s: Stated) -> Program:
    """Of B·T rows of V."""
    x = torch.randn(s.B * s.T, s.V, requires_grad=True)
    target = torch.randint(s.V, (s.B * s.T, 1)).squeeze(1)
    return Program(lambda: F.cross_entropy(x, target))


def kl_div(gpu: VirtualGPU, s: Stated) -> Program:
    """Against probabilities; the input is a log_softmax that keeps its own graph."""
    x = torch.randn(s.B * s.T, s.V, requires_grad=True).log_softmax(dim=-1)
    target = torch.randn(s.B * s.T, s.V).softmax(dim=-1)
    return Program(lambda: F.kl_div(x, target, reduction="batchmean"), retain=True)


def _kl(x: torch.Tensor, target: torch.Tensor, reduction: str = "batchmean") -> torch.Tensor:
    return F.kl_div(x, target, reduction=reduction, log_target=True)


def jsd(gpu: VirtualGPU, s: Stated) -> Program:
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


def tvd(gpu: VirtualGPU, s: Stated) -> Program:
    """Half the sum of differences."""
    p = torch.randn(s.B * s.T, s.V, requires_grad=True).softmax(dim=-1)
    q = torch.randn(s.B * s.T, s.V).softmax(dim=-1)

    def forward() -> torch.Tensor:
        distance = torch.abs(p - q) / 2.0
        return torch.sum(distance) / p.size(0)

    return Program(forward, retain=True)


# -- on a hidden state and a head -------------------------------------------------------------------------------------


def fused_linear_cross_entropy(gpu: VirtualGPU, s: Stated) -> Program:
    """Head and loss; Liger's head is there too."""
    ours, liger = head(s), head(s)
    x = torch.randn(s.BT, s.H, dtype=s.dtype, requires_grad=True)
    target = torch.randint(s.V, (s.BT, 1)).squeeze(1)

    def forward() -> torch.Tensor:
        logits = F.linear(x, ours)
        return F.cross_entropy(logits, target)

    return Program(forward, holds=(liger,))


def fused_linear_jsd(gpu: VirtualGPU, s: Stated) -> Program:
    """Student and teacher heads, which Liger's module shares; the teacher's weight is trained too."""
    student, teacher = head(s), head(s)
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

    def program(gpu: VirtualGPU, s: Stated) -> Program:
        heads = [head(s, width) for width in (s.H // 2, s.H, s.H // 2, s.H)]
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


PROGRAMS = {
    "cross_entropy": cross_entropy,
    "kl_div": kl_div,
    "jsd": jsd,
    "tvd": tvd,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_jsd": fused_linear_jsd,
    "distill_jsd_loss": _distilled(_jsd_distance),
    "distill_cosine_loss": _distilled(_cosine_distance),
}
