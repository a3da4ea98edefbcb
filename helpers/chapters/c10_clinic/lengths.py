"""From the lengths of one's own texts to the peaks of an epoch: which step passes the limit, and what helps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

import virtual_gpu
from virtual_gpu.cards import card
from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.models.build import build_model
from virtual_gpu.models.configs import load_config
from virtual_gpu.units import GiB, human_bytes

from ...charts import Chart
from ...experiment import predict_memory
from ...gpu import allocator_set_to
from ...rows import LeftRows

ROW = 512  # tokens: the shape in which the grid is run; what counts is their number
GRID = tuple(1024 * n for n in (1, 2, 4, 8, 16, 32))  # tokens of a step that are run; between them lies a line
MODEL = {"model_id": "gpt2", "precision": "fp32", "optimizer": "adamw_fused"}


def example_lengths(texts: int = 2000) -> list[int]:
    """Tokens of made-up texts: most are short, few are long, none beyond 1,024. The same every time."""
    drawn = np.random.default_rng(0).lognormal(4.8, 0.6, texts)
    return [int(length) for length in drawn.clip(8, 1024)]


def random_batches(lengths: Sequence[int], batch_size: int, seed: int = 0) -> list[list[int]]:
    """As a DataLoader with shuffle=True draws them: the lengths of each batch."""
    order = list(lengths)
    random.Random(seed).shuffle(order)
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


def grouped_batches(lengths: Sequence[int], batch_size: int, seed: int = 0) -> list[list[int]]:
    """As transformers' own sampler groups them (`train_sampling_strategy="group_by_length"`), the longest first."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(list(lengths), batch_size, generator=generator)
    return [[lengths[i] for i in order[at : at + batch_size]] for at in range(0, len(order), batch_size)]


def budget_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Batches of as many texts, sorted by length, as `tokens` padded tokens hold."""
    batches: list[list[int]] = [[]]
    for length in sorted(lengths, reverse=True):
        if batches[-1] and batches[-1][0] * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(length)
    return batches


def packed_batches(lengths: Sequence[int], rows: int, row: int = 1024) -> list[list[int]]:
    """Texts put one after the other into rows of `row` tokens, the largest that fits first; batches of full rows."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = min((n for n, left in enumerate(room) if left >= length), key=room.__getitem__, default=None)
        if at is None:
            room.append(row - length)
        else:
            room[at] -= length
    return [[row] * len(room[at : at + rows]) for at in range(0, len(room), rows)]


@cache
def _measured(gpu: str) -> tuple[int, ...]:
    """What a step of GPT-2 needs with each number of tokens of the GRID, run on a virtual card."""
    return tuple(needed(tokens // ROW, ROW, gpu) for tokens in GRID)


def needed(batch_size: int, length: int, gpu: str = "T4") -> int:
    """Bytes that a step of GPT-2 needs, run on a virtual card."""
    return predict_memory(**MODEL, batch_size=batch_size, sequence_length=length, gpu=gpu).needed_bytes


def step_peaks(batches: Sequence[Sequence[int]], gpu: str = "T4") -> list[int]:
    """The tensors' peak in each step of a training that begins with these batches, on a card without a limit."""
    with virtual_gpu.cuda(gpu, limited=False):
        return list(_trained(batches))


def died_in(batches: Sequence[Sequence[int]], settings: str | None = None, gpu: str = "T4") -> int | None:
    """The step in which a training with these batches really dies, counted from 1; None where it comes to its end.

    settings: PYTORCH_ALLOC_CONF, as it is by default.
    """
    done = 0
    with allocator_set_to(settings), virtual_gpu.cuda(gpu):
        try:
            for _ in _trained(batches):
                done += 1
        except torch.OutOfMemoryError:
            return done + 1
    return None


def _trained(batches: Sequence[Sequence[int]]) -> Iterator[int]:
    """Each step's peak, on the card that there is."""
    model = build_model(load_config(MODEL["model_id"]), torch.float32).to_empty(device="cuda").eval()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batch in batches:
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.zeros(len(batch), max(batch), dtype=torch.long, device="cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield torch.cuda.max_memory_allocated()


def peak_of(tokens: int, gpu: str = "T4") -> int:
    """Bytes that a step of GPT-2 needs with so many tokens, padding counted: run, or on the line between two runs.

    WrongValue for more tokens than the largest run has.
    """
    if tokens > GRID[-1]:
        raise WrongValue(
            tr(ko=f"토큰 {tokens:,}개: {GRID[-1]:,}개까지다.", en=f"{tokens:,} tokens: {GRID[-1]:,} at most.")
        )
    return int(np.interp(tokens, GRID, _measured(gpu)))


@dataclass(frozen=True)
class Epoch:
    """An epoch's batches, each as the lengths of its texts, on a card. padded: every text as long as the longest."""

    batches: list[list[int]]
    gpu: str = "T4"

    @property
    def limit(self) -> int:
        """Bytes that the card has for PyTorch."""
        return card(self.gpu).capacity_bytes

    @property
    def peaks(self) -> list[int]:
        """What each step needs: the batch padded to its longest text."""
        return [peak_of(len(batch) * max(batch), self.gpu) for batch in self.batches]

    @property
    def beyond(self) -> list[int]:
        """The steps that need more than the card has, counted from 1."""
        return [step for step, peak in enumerate(self.peaks, 1) if peak > self.limit]

    @property
    def padding(self) -> float:
        """The share of the tokens that is padding."""
        computed = sum(len(batch) * max(batch) for batch in self.batches)
        return 1 - sum(map(sum, self.batches)) / computed

    def chart(self) -> Chart:
        """Each step's peak in its order, and how often each comes."""
        peaks, beyond = [peak / GiB for peak in self.peaks], self.beyond
        first = (
            tr(ko=f"스텝 {beyond[0]}에서 처음 한도를 넘는다", en=f"step {beyond[0]} is the first beyond")
            if beyond
            else tr(ko="한도를 넘는 스텝이 없다", en="none is beyond")
        )
        median = float(np.median(peaks))
        title = tr(ko=f"스텝마다 필요한 메모리: {first}", en=f"what each step needs: {first}")
        seen = tr(
            ko=f"{len(peaks)}스텝, 중앙값 {median:.2f}, 최대 {max(peaks):.2f} GiB, 한도를 넘는 스텝 {len(beyond)}개",
            en=f"{len(peaks)} steps: median {median:.2f}, highest {max(peaks):.2f} GiB, {len(beyond)} beyond",
        )
        chart = Chart(title, seen, columns=2)
        left, right = chart.axes
        left.plot(range(1, len(peaks) + 1), peaks, lw=1.2)
        left.set_xlabel(tr(ko="스텝", en="step"))
        left.set_ylabel("GiB")
        right.hist(peaks, bins=20)
        right.set_xlabel("GiB")
        right.set_ylabel(tr(ko="스텝의 수", en="steps"))
        right.yaxis.get_major_locator().set_params(integer=True)
        left.axhline(self.limit / GiB, color="#b3400b", lw=1.5)
        right.axvline(self.limit / GiB, color="#b3400b", lw=1.5)
        return chart

    def _repr_svg_(self) -> str:
        return self.chart().svg()

    def __repr__(self) -> str:
        return repr(self.chart())


def compared(ways: dict[str, list[list[int]]], gpu: str = "T4") -> LeftRows:
    """Ways to make batches of the same texts: steps, padding, the highest peak, the first step beyond the card."""
    rows = []
    for name, batches in ways.items():
        epoch = Epoch(batches, gpu)
        peaks, beyond = epoch.peaks, epoch.beyond
        first = beyond[0] if beyond else tr(ko="없다", en="none")
        median, highest = human_bytes(int(np.median(peaks))), human_bytes(max(peaks))
        rows.append([name, len(batches), f"{epoch.padding:.0%}", median, highest, first])
    heads = (
        "",
        tr(ko="스텝", en="steps"),
        tr(ko="패딩", en="padding"),
        tr(ko="필요한 메모리의 중앙값", en="needed, median"),
        tr(ko="가장 큰 것", en="highest"),
        tr(ko="한도를 처음 넘는 스텝", en="first beyond the limit"),
    )
    return LeftRows(heads, rows)
