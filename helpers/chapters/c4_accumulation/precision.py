"""Chapter 4: what is lost when many small gradients are added up in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from virtual_gpu.language import tr

from ...charts import Chart, steady
from .accumulation import difference

ROUNDING = 1e-6


def sum_errors(
    gradients: Sequence[torch.Tensor], counts: Sequence[int], given_in: torch.dtype, added_in: torch.dtype
) -> dict[int, float]:
    """count → how far the running sum of the first `count` gradients is from their exact sum, as a share of it.

    gradients: vectors of one shape, rounded to `given_in` as a backward in that dtype gives them, then added to a sum
    in `added_in`, in a fixed order, over and over. Only the adding is judged: the exact sum is of the rounded ones.
    """
    generator = torch.Generator().manual_seed(0)
    running, exact = (torch.zeros_like(gradients[0], dtype=dtype) for dtype in (added_in, torch.float64))
    errors, added = {}, 0
    while added < max(counts):
        for k in torch.randperm(len(gradients), generator=generator).tolist():
            rounded = gradients[k].to(given_in)
            running += rounded
            exact += rounded
            added += 1
            if added in counts:
                errors[added] = difference(running.double(), exact)
    return errors


def draw_lost(errors: Mapping[str, Mapping[int, float]]) -> Chart:
    """name → count → share of the sum that is wrong: lines over the count, both axes by powers.

    What is nothing but fp32's rounding differs from CPU to CPU: it is drawn as ROUNDING, and said to be less.
    """
    last = {name: [*line.values()][-1] for name, line in errors.items()}
    said = {name: f"{error:.1e}" if error >= ROUNDING else f"< {ROUNDING:.0e}" for name, error in last.items()}
    ends = "; ".join(f"{name}: {error}" for name, error in said.items())
    chart = Chart(tr(ko="더한 횟수와 합의 오차", en="error of a sum over how often was added"), ends)
    for name, line in errors.items():
        heights = [max(error, ROUNDING) for error in steady(line.values(), 3)]
        label = f"{name} (< {ROUNDING:.0e})" if max(heights) == ROUNDING else name
        chart.ax.loglog(list(line), heights, marker="o", label=label, base=10)
    counts = sorted({count for line in errors.values() for count in line})
    chart.ax.set_xticks(counts, [str(count) for count in counts])
    chart.ax.set_xticks([], minor=True)
    chart.ax.set_xlabel(tr(ko="더한 마이크로 배치 수", en="micro-batches added"))
    chart.ax.set_ylabel(tr(ko="합의 상대 오차", en="relative error of the sum"))
    chart.ax.legend()
    return chart
