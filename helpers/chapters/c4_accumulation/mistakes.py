"""Chapter 4: the six mistakes of an accumulating loop, as a table that the cells fill with what they measure."""

from __future__ import annotations

from html import escape

import torch

from virtual_gpu.language import tr
from virtual_gpu.units import choose

from ...environment import html_rows
from .accumulation import difference


def _known() -> dict[str, tuple[str, str, str]]:
    """name → (what is done wrong, what is seen, how it is right)."""
    return {
        "undivided": (
            tr(ko="손실을 나누지 않는다", en="the loss is not divided"),
            tr(ko="손실과 노름이 누적 횟수만큼 커진다", en="loss and norm grow with the number of steps"),
            tr(ko="누적 횟수로 나눈다", en="divide by the number of micro-batches"),
        ),
        "zeroed": (
            tr(ko="마이크로 배치마다 zero_grad()", en="zero_grad() for every micro-batch"),
            tr(ko="노름이 작고, 배치를 키운 보람이 없다", en="a small norm; the large batch does not help"),
            tr(ko="옵티마이저 스텝 뒤에 한 번", en="once, after the optimizer's step"),
        ),
        "mean_of_means": (
            tr(ko="길이가 다른데 평균의 평균을 낸다", en="a mean of means over different lengths"),
            tr(ko="누적 횟수를 바꾸면 손실 곡선이 달라진다", en="the curve depends on the number of steps"),
            tr(ko="합을 구해 묶음 전체의 토큰 수로 나눈다", en="sums, divided by the tokens of all of them"),
        ),
        "left_over": (
            tr(ko="덜 찬 마지막 묶음을 꽉 찬 듯 나눈다", en="the last, shorter group is divided as a full one"),
            tr(ko="에폭의 끝에서 손실과 노름이 뚝 떨어진다", en="loss and norm drop at the end of an epoch"),
            tr(ko="실제 수로 나누어 한 스텝 더 간다", en="divide by what there is, and step once more"),
        ),
        "clipped_inside": (
            tr(ko="마이크로 배치마다 클리핑한다", en="clipping for every micro-batch"),
            tr(ko="노름은 맞아서 눈에 띄지 않는다", en="nothing: the norm is right"),
            tr(ko="다 모은 뒤, 스텝 직전에 한 번", en="once, just before the step"),
        ),
        "scheduled_inside": (
            tr(ko="학습률 일정을 마이크로 배치마다 옮긴다", en="the schedule moves for every micro-batch"),
            tr(ko="학습률이 일찍 0이 된다", en="the learning rate is 0 early"),
            tr(ko="옵티마이저 스텝마다 한 번", en="once for every optimizer step"),
        ),
    }


MISTAKES = tuple(_known())


class Mistakes(dict):
    """name → what was measured, in words; names are those of MISTAKES. In a notebook the whole table, filled or not."""

    def __setitem__(self, name: str, measured: str) -> None:
        super().__setitem__(choose(name, MISTAKES, tr(ko="실수", en="mistake")), measured)

    def _rows(self) -> list[list[str]]:
        return [[name, *texts, self.get(name, "")] for name, texts in _known().items()]

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {self.get(name, '–')}" for name in MISTAKES)

    def _repr_html_(self) -> str:
        heads = (
            tr(ko="이름", en="name"),
            tr(ko="무엇을 틀리는가", en="mistake"),
            tr(ko="보이는 증상", en="what is seen"),
            tr(ko="옳게 하려면", en="remedy"),
            tr(ko="잰 값", en="measured"),
        )
        return html_rows(heads, [[escape(cell) for cell in row] for row in self._rows()])


def compared(wrong: torch.Tensor, right: torch.Tensor) -> str:
    """How large a gradient is beside the right one, and how far from it, both as shares of the right one's norm."""
    return tr(
        ko=f"크기 {wrong.norm() / right.norm():.2f}배, 차이 {difference(wrong, right):.3f}",
        en=f"size x{wrong.norm() / right.norm():.2f}, difference {difference(wrong, right):.3f}",
    )
