"""Chapter 8: fine-tunings side by side, as tables and charts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from virtual_gpu.drawing.labels import html_table
from virtual_gpu.language import tr

from .pictures import draw_rates, draw_runs

COUNT = 32  # questions of a task


@dataclass
class Run:
    """One fine-tuning: the loss of every step, and what was known of the new and the old task along the way.

    history: (step, answers known of the new task, of the old one), each of 32.
    """

    name: str
    model: nn.Module = field(repr=False)
    trainable: int
    lr: float
    losses: list[float] = field(default_factory=list, repr=False)
    history: list[tuple[int, int, int]] = field(default_factory=list, repr=False)

    @property
    def learned(self) -> int:
        """Answers known of the new task at the end."""
        return self.history[-1][1]

    @property
    def kept(self) -> int:
        """Answers still known of the old task at the end."""
        return self.history[-1][2]


class Runs(list):
    """Runs as a table; `chart()` draws their losses and what they forgot."""

    def chart(self) -> Any:
        """Loss by step, and answers known of both tasks by step."""
        return draw_runs(self, COUNT)

    def _repr_html_(self) -> str:
        heads = [
            tr(ko="방법", en="method"),
            tr(ko="학습하는 파라미터", en="trainable parameters"),
            tr(ko="마지막 손실", en="last loss"),
            tr(ko=f"새 과제({COUNT}개 중)", en=f"new task (of {COUNT})"),
            tr(ko=f"옛 과제({COUNT}개 중)", en=f"old task (of {COUNT})"),
        ]
        rows = [
            [run.name, f"{run.trainable:,}", f"{run.losses[-1]:.2f}", str(run.learned), str(run.kept)] for run in self
        ]
        return html_table(heads, rows)

    def __repr__(self) -> str:
        return "\n".join(f"{run.name}: {run.trainable:,}, {run.learned}, {run.kept}" for run in self)


class Rates(list):
    """Runs as a table of answers known: a row a method (their names), a column a learning rate; `chart()` draws it."""

    def chart(self) -> Any:
        """Answers known by learning rate, a line a method."""
        return draw_rates({name: list(row.items()) for name, row in self._known().items()}, COUNT)

    def _known(self) -> dict[str, dict[float, int]]:
        rows: dict[str, dict[float, int]] = {}
        for run in sorted(self, key=lambda run: run.lr):
            rows.setdefault(run.name, {})[run.lr] = run.learned
        return rows

    def _rows(self) -> list[list[str]]:
        rates = sorted({run.lr for run in self})
        head = [tr(ko="학습률", en="learning rate"), *(f"{lr:g}" for lr in rates)]
        return [head, *([name, *(str(row.get(lr, "–")) for lr in rates)] for name, row in self._known().items())]

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return html_table(head, rows)

    def __repr__(self) -> str:
        return "\n".join(" ".join(row) for row in self._rows())
