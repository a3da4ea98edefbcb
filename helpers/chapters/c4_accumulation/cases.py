"""Chapter 4's cases: a second micro-batch that runs out of memory, and a loop with two mistakes in it."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.report import MemoryReport
from virtual_gpu.units import choose, positive_int

from ...experiment import predict_memory
from ...self_check import filled, right
from ...small_model import SmallLanguageModel, sentences
from .accumulation import gradient
from .mistakes import MISTAKES, compared

# ---- 4-A: it trains at accumulation 1 and not at 2 -------------------------------------------------------------------

REPORTED_BATCH, REPORTED_STEPS, MOST_STEPS = 12, 64, 4


def memory_of(batch_size: int = REPORTED_BATCH, gradient_accumulation_steps: int = 1) -> MemoryReport:
    """polyglot-ko-1.3b with fused AdamW on a T4, for few enough steps that the answer has to be found, not read."""
    if positive_int(gradient_accumulation_steps, "gradient_accumulation_steps") > MOST_STEPS:
        raise WrongValue(
            tr(
                ko=f"누적은 {MOST_STEPS}번까지만 실험할 수 있다. {REPORTED_STEPS}번은 거기서 짐작한다.",
                en=f"At most {MOST_STEPS} steps can be tried; {REPORTED_STEPS} has to be inferred.",
            )
        )
    return predict_memory(
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        optimizer="adamw_fused",
        gpu="T4",
    )


def judge_memory(answer: Any) -> str:
    """answer: GiB that 64 steps of batch 12 need."""
    answer = filled(answer)
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        return tr(ko=f"GiB를 숫자로 적는다. 지금은 {answer!r}이다.", en=f"A number of GiB; got {answer!r}.")
    once, twice = (memory_of(gradient_accumulation_steps=steps).needed_bytes / 2**30 for steps in (1, 2))
    if abs(answer / twice - 1) < 0.01:
        return right(
            tr(
                ko="그레이디언트는 두 번째 마이크로 배치부터 자리를 차지하고, 그 뒤로는 같은 자리에 더해진다.",
                en="Gradients take their room from the second micro-batch on; after it they are added in place.",
            )
        )
    if abs(answer / once - 1) < 0.01:
        return tr(
            ko=f"누적하지 않을 때의 값이다. {REPORTED_STEPS}번 누적하면 그보다 {twice - once:.2f} GiB 더 든다.",
            en=f"That is without accumulation: {REPORTED_STEPS} steps need {twice - once:.2f} GiB more.",
        )
    if answer > twice + (twice - once) / 2:
        return tr(
            ko=f"{answer - twice:.2f} GiB 많다. 누적할 때마다 늘어난다고 본 것은 아닌가? 2번과 3번을 견주어 본다.",
            en=f"{answer - twice:.2f} GiB too much. Does every step add? Compare 2 and 3.",
        )
    return tr(ko=f"정답의 {answer / twice:.2f}배다.", en=f"{answer / twice:.2f} times what it is.")


# ---- 4-B: two of the six mistakes are in this loop -------------------------------------------------------------------

GROUP = 4  # micro-batches of 4 sentences that this loop gathers for a step
GUILTY = frozenset({"mean_of_means", "clipped_inside"})
SUSPECTS = tuple(name for name in MISTAKES if name != "scheduled_inside")


def submitted_loop(lengths: str = "equal", micro_batches: int = GROUP, max_norm: float | None = None) -> str:
    """The gradient of the loop's last step beside that of the same sentences at once.

    lengths: "equal" (every answer has six characters) or "mixed", sorted. micro_batches: in the epoch, of which four
    make a step and the rest another. max_norm: clip to it; None does not clip.
    """
    rows = _rows(choose(lengths, ("equal", "mixed"), "lengths"))
    if not 1 <= positive_int(micro_batches, "micro_batches") <= len(rows) // GROUP:
        most = len(rows) // GROUP
        raise WrongValue(tr(ko=f"micro_batches는 1~{most}이다.", en=f"micro_batches must be 1 to {most}."))
    limit = float("inf") if max_norm is None else float(max_norm)
    parts = list(rows[: GROUP * micro_batches].split(GROUP))
    last = parts[(len(parts) - 1) // GROUP * GROUP :]
    model = _model()
    for part in last:
        (_mean_loss(model, part) / len(last)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
    found = gradient(model)
    model.zero_grad()
    _mean_loss(model, torch.cat(last)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    return compared(found, gradient(model))


def judge_loop(answer: Any) -> str:
    """answer: the names of the two mistakes."""
    answer = filled(answer)
    names = [answer] if isinstance(answer, str) or not isinstance(answer, Collection) else list(answer)
    for name in names:
        choose(name, SUSPECTS, tr(ko="실수", en="mistake"))
    found = GUILTY & set(names)
    if set(names) == GUILTY:
        return right(
            tr(
                ko="길이가 다르면 평균의 평균이 되고, 클리핑은 마이크로 배치마다 했다.",
                en="A mean of means where lengths differ, and clipping inside the loop.",
            )
        )
    return tr(
        ko=f"이 루프의 실수 둘 가운데 {len(found)}개를 찾았고, 죄 없는 것을 {len(set(names)) - len(found)}개 지목했다.",
        en=f"{len(found)} of the two found, {len(set(names)) - len(found)} innocent named.",
    )


@lru_cache(maxsize=2)
def _rows(lengths: str) -> torch.Tensor:
    """24 sentences: those whose answers have six characters, or of all lengths, the short ones first."""
    counts = (sentences()[1] >= 0).sum(1)
    if lengths == "equal":
        return (counts == 6).nonzero().flatten()[:24]
    return counts.argsort(stable=True)[torch.linspace(0, len(counts) - 1, 24).long()]


def _model() -> SmallLanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SmallLanguageModel().double()


def _mean_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    inputs, labels = sentences()
    return cross_entropy(model(inputs[rows]).flatten(0, 1), labels[rows].flatten())
