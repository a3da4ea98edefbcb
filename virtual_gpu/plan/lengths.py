"""Samples of the reader's own data, by their lengths: what a plan's length cuts off, and what padding adds to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WrongValue
from ..language import tr
from ..units import path_of

_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Lengths:
    """Tokens of each sample. all: in the order of the file. WrongValue where there are none, or one is below 1."""

    all: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = isinstance(self.all, tuple) and all(map(_is_length, self.all))
        if not whole or not self.all:
            raise WrongValue(
                tr(
                    ko=f"lengths={self.all!r:.80}: 토큰 수(1 이상)의 튜플이어야 하고, 하나는 있어야 한다.",
                    en=f"lengths={self.all!r:.80}: must be a tuple of numbers of tokens (1 or more), not an empty one.",
                )
            )

    @cached_property
    def sorted(self) -> np.ndarray:
        """(samples,): the shortest first."""
        return np.sort(np.array(self.all, dtype=np.int64))

    @property
    def longest(self) -> int:
        """Of one sample: where nothing is cut the planner counts with it, since some batch has it."""
        return int(self.sorted[-1])

    def up_to(self, share: float) -> int:
        """The length that this share of the samples does not exceed."""
        return int(self.sorted[max(0, int(np.ceil(share * len(self.all))) - 1)])

    def cut(self, length: int) -> tuple[float, float]:
        """(share of the samples, share of all tokens) that a limit of `length` tokens cuts."""
        over = self.sorted[self.sorted > length]
        return len(over) / len(self.all), float((over - length).sum() / self.sorted.sum())

    def padding(self, micro_batch: int, length: int) -> float:
        """Share of the tokens of an epoch that are padding: micro-batches of a shuffled order, padded to their longest.

        length: the limit. One order, always the same (NumPy's generator with seed 0).
        """
        order = np.random.default_rng(0).permutation(np.minimum(self.sorted, length))
        whole = len(order) // micro_batch * micro_batch
        batches = [order[:whole].reshape(-1, micro_batch), order[whole:].reshape(1, -1)]
        held = sum(int(batch.max(axis=1).sum()) * batch.shape[1] for batch in batches if batch.size)
        return 1 - float(order.sum()) / held

    def steps(self, batch: int, length: int) -> tuple[int, int]:
        """Optimizer steps of an epoch: (a batch of samples, a batch of rows of `length` tokens packed full)."""
        samples = -(-len(self.all) // batch)
        tokens = int(np.minimum(self.sorted, length).sum())
        return samples, -(-tokens // (batch * length))

    def line(self, length: int) -> str:
        """The samples in a line, and what the limit cuts."""
        count, longest = f"{len(self.all):,}", f"{self.longest:,}"
        parts = ", ".join(f"{share:.0%} ≤ {self.up_to(share):,}" for share in _SHARES)
        samples, tokens = self.cut(length)
        return tr(
            ko=f"샘플 {count}개: {parts}, 가장 긴 것 {longest}토큰. 길이 {length:,}에서 샘플의 {samples:.1%}가 "
            f"잘리고 토큰의 {tokens:.1%}를 잃는다",
            en=f"{count} samples: {parts}, the longest {longest} tokens. A length of {length:,} cuts "
            f"{samples:.1%} of the samples and loses {tokens:.1%} of the tokens",
        )

    def line_of(self, micro_batch: int, batch: int, length: int) -> str:
        """A plan's padding in a line, and what packing would leave of its steps."""
        steps, packed = self.steps(batch, length)
        return tr(
            ko=f"길이가 섞인 마이크로 배치 {micro_batch}: 토큰의 {self.padding(micro_batch, length):.0%}가 패딩이다. "
            f"에폭마다 {steps:,}스텝, 이어 담으면 {packed:,}스텝",
            en=f"micro-batches of {micro_batch}, shuffled: {self.padding(micro_batch, length):.0%} of the tokens are "
            f"padding. {steps:,} steps an epoch, {packed:,} if packed",
        )

    def to_dict(self, length: int) -> dict[str, Any]:
        """For JSON."""
        samples, tokens = self.cut(length)
        return {
            "samples": len(self.all), "longest": self.longest, "length": length, "cut_samples": samples,
            "cut_tokens": tokens, "up_to": {f"{share:g}": self.up_to(share) for share in _SHARES},
        }  # fmt: skip


def read_lengths(path: str | Path) -> Lengths:
    """The lengths in a file: a number in each line, or JSON: a list, or a line for each sample.

    A sample of JSON is a number, or an object with "length" or with its "input_ids". WrongValue names the line.
    """
    path = path_of(path, "path")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise WrongValue(tr(ko=f"{path}: 읽을 수 없다({error}).", en=f"{path} cannot be read ({error}).")) from error
    whole = _parsed(text)
    if isinstance(whole, list):
        return Lengths(tuple(_lengths(enumerate(whole, 1), path)))
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return Lengths(tuple(_lengths(((number, _parsed(line)) for number, line in lines if line), path)))


def _is_length(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def _lengths(samples: Iterable[tuple[int, Any]], path: Path) -> Iterator[int]:
    for number, sample in samples:
        value = sample
        if isinstance(sample, dict):
            value = sample.get("length", sample.get("input_ids"))
        if isinstance(value, list):
            value = len(value)
        if not _is_length(value):
            raise WrongValue(
                tr(
                    ko=f"{path}, {number}번째: {sample!r:.80}에서 길이를 알 수 없다. 줄마다 토큰 수 하나, 또는 "
                    '"length"나 "input_ids"가 있는 JSON이어야 한다.',
                    en=f"{path}, entry {number}: no length in {sample!r:.80}. A number of tokens in each line, or JSON "
                    'with "length" or "input_ids".',
                )
            )
        yield value
