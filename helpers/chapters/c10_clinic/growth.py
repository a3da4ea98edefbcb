"""Lines that grow, or do not: what is held after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from virtual_gpu.language import tr
from virtual_gpu.units import GiB, MiB

from ...charts import Chart


def growth_chart(limit: int | None = None, **after: Sequence[int]) -> Chart:
    """Name → bytes after each step, one line each; limit: the card's, drawn across.

    In MiB more than after the first step; where a limit is given, in GiB as they are.
    """
    ends = {name: values[-1] - (0 if limit else values[0]) for name, values in after.items()}
    unit, size = ("GiB", GiB) if limit else ("MiB", MiB)
    said = ", ".join(f"{name} {value / size:,.2f} {unit}" for name, value in ends.items())
    chart = Chart(
        tr(ko="스텝마다의 메모리", en="memory by step")
        if limit
        else tr(ko="스텝이 끝난 뒤의 메모리", en="held after each step"),
        tr(ko=f"마지막 스텝에서 {said}", en=f"at the last step {said}"),
    )
    lines = {name: [(value - (0 if limit else values[0])) / size for value in values] for name, values in after.items()}
    near = max(map(max, lines.values())) / 200
    for at, (name, line) in enumerate(lines.items()):
        # A line under another one is wide, so that both are seen.
        under = any(_apart(line, other) < near for other in [*lines.values()][at + 1 :])
        wide = {"lw": 7, "ms": 11} if under else {"lw": 2, "ms": 4}
        chart.ax.plot(range(1, len(line) + 1), line, "o-", label=name, **wide)
    if limit:
        chart.ax.axhline(limit / size, color="#b3400b", lw=1.5)
    chart.ax.set_xlabel(tr(ko="스텝", en="step"))
    chart.ax.set_ylabel(unit if limit else tr(ko="첫 스텝 뒤보다 늘어난 MiB", en="MiB more than after the first"))
    chart.ax.legend()
    return chart


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=False))


def small_gpt(layers: int = 1, vocabulary: int = 50_257, width: int = 768) -> Any:
    """A GPT-2 of few layers, in evaluation's state (no dropout), its weights drawn anew."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, vocab_size=vocabulary, n_embd=width, n_head=max(1, width // 64), bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning
    return model
