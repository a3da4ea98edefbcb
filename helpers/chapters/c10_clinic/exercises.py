"""Chapter 10's exercises and cases: batches by a budget, a validation that keeps nothing; two late deaths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

import virtual_gpu
from virtual_gpu.language import tr
from virtual_gpu.units import choose, human_bytes

from ...rows import LeftRows
from ...self_check import Case, Exercise, filled, right
from .growth import small_gpt
from .lengths import Epoch, budget_batches, example_lengths, random_batches

_BUDGET = 4096


def _judge_batches(batches: Callable[[Sequence[int], int], list[list[int]]]) -> str:
    lengths = example_lengths(400)
    made = [list(map(int, batch)) for batch in filled(filled(batches)(list(lengths), _BUDGET))]
    if sorted(length for batch in made for length in batch) != sorted(lengths):
        return tr(ko="모든 글이 꼭 한 번씩 들어 있어야 한다.", en="Every text belongs into one batch, once.")
    fullest = max(len(batch) * max(batch) for batch in made if batch)
    if fullest > _BUDGET:
        return tr(
            ko=f"패딩까지 {fullest:,}토큰인 배치가 있다. 예산은 {_BUDGET:,}이다.",
            en=f"One batch has {fullest:,} tokens with its padding; the budget is {_BUDGET:,}.",
        )
    padding, ours = Epoch(made).padding, Epoch(budget_batches(lengths, _BUDGET)).padding
    if padding > ours + 0.02:
        return tr(
            ko=f"예산은 지켰지만 {padding:.0%}가 패딩이다. {ours:.0%}까지 줄일 수 있다.",
            en=f"Within the budget, but {padding:.0%} are padding: {ours:.0%} will do.",
        )
    return right(tr(ko=f"배치 {len(made)}개, 패딩 {padding:.0%}.", en=f"{len(made)} batches, {padding:.0%} padding."))


def _judge_validation(validate: Callable[[torch.nn.Module, list[torch.Tensor]], float]) -> str:
    validate = filled(validate)
    torch.manual_seed(0)
    model = small_gpt(vocabulary=64, width=16)
    real = [torch.randint(64, (2, 12)) for _ in range(3)]
    with torch.no_grad():
        expected = sum(float(model(input_ids=ids, labels=ids).loss) for ids in real) / len(real)
    got = filled(validate(model, real))
    if isinstance(got, torch.Tensor):
        return tr(ko="텐서가 아니라 파이썬의 수를 돌려준다.", en="A number of Python is wanted, not a tensor.")
    if abs(float(got) - expected) > 1e-5:
        return tr(
            ko=f"평균 손실이 {got:.4f}이다. {expected:.4f}이어야 한다.", en=f"{got:.4f}: should be {expected:.4f}."
        )
    peaks = [_peak_of_validation(validate, batches) for batches in (1, 6)]
    grown = peaks[1] - peaks[0]
    if grown > 2**20:
        return tr(
            ko=f"값은 맞다. 배치 6개의 최대가 1개일 때보다 {human_bytes(grown)} 높다. 무엇인가 남는다.",
            en=f"The value is right, but 6 batches peak {human_bytes(grown)} above one: something is kept.",
        )
    least = _peak_of_validation(_without_graph, 1)
    if peaks[0] > 1.05 * least:
        return tr(
            ko=f"쌓이지는 않는다. 그런데 최대가 {human_bytes(peaks[0])}다. 그래프 없이는 {human_bytes(least)}다.",
            en=f"Nothing grows, but it peaks at {human_bytes(peaks[0])}: {human_bytes(least)} without graphs.",
        )
    return right(tr(ko=f"배치가 몇이든 최대 {human_bytes(peaks[1])}.", en=f"{human_bytes(peaks[1])}, however many."))


def _without_graph(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return sum(model(input_ids=ids, labels=ids).loss.item() for ids in batches) / len(batches)


def _peak_of_validation(validate: Callable[[torch.nn.Module, list[torch.Tensor]], float], batches: int) -> int:
    with virtual_gpu.cuda("T4"):
        model = small_gpt(vocabulary=8192, width=128).cuda()
        validate(model, [torch.zeros(8, 128, dtype=torch.long, device="cuda") for _ in range(batches)])
        return torch.cuda.max_memory_allocated()


@cache
def _lengths() -> tuple[int, ...]:
    return tuple(example_lengths())


def _epoch(seed: int = 0, batch_size: int = 16, max_length: int = 1024) -> LeftRows:
    """One epoch of case 10-B: where it dies, what that step needs, and what the five before it needed, in order."""
    lengths = [min(length, max_length) for length in _lengths()]
    epoch = Epoch(random_batches(lengths, batch_size, seed))
    step = epoch.deaths[0] if epoch.deaths else None
    before = epoch.peaks[: step and step - 1][-5:]
    died = epoch.batches[step - 1] if step else []
    heads = (
        tr(ko="죽는 스텝", en="dies in step"),
        tr(ko="그 스텝의 토큰", en="its tokens"),
        tr(ko="필요한 메모리", en="needed"),
        tr(ko="그 앞 다섯 스텝에 필요한 메모리", en="needed by the five before"),
    )
    tokens = f"{len(died) * max(died, default=0):,}" if died else "–"
    needed = human_bytes(epoch.peaks[step - 1]) if step else "–"
    return LeftRows(heads, [[step or "–", tokens, needed, ", ".join(map(human_bytes, before)) or "–"]])


_WHY_NOT = {
    "leak": lambda: tr(
        ko="새는 것이라면 스텝마다 조금씩 더 필요해지고, 시드를 바꾸어도 비슷한 스텝에서 죽는다. 두 시드를 비교한다.",
        en="A leak grows step by step and kills near the same step with every seed: compare two.",
    ),
    "fragmentation": lambda: tr(
        ko="이 셈은 길이만으로 죽는 스텝을 맞힌다. 긴 글을 자르면(max_length=512) 어떻게 되는지 본다.",
        en="Lengths alone say which step dies: see what cutting the long texts (max_length=512) does.",
    ),
    "other_process": lambda: tr(
        ko="다른 프로세스라면 배치의 길이와 상관이 없다. max_length를 줄여 본다.",
        en="Another process would not care how long the batch is: try a smaller max_length.",
    ),
}


def _judge_why(answer: str) -> str:
    why = choose(filled(answer), ("longest", *_WHY_NOT), tr(ko="까닭", en="cause"))
    if why in _WHY_NOT:
        return _WHY_NOT[why]()
    return right(tr(ko="시드가 바뀌면 긴 글이 오는 스텝도 바뀐다.", en="Another seed, another step for the long text."))


def _retry(where: str = "inside", empty_cache: bool = False, collect: bool = False) -> LeftRows:
    """Case 10-A: a step of 24 dies, then one of 4 is tried inside except or after it."""
    import gc

    where = choose(where, ("inside", "after"), "where")

    def clean() -> None:
        if collect:
            gc.collect()
        if empty_cache:
            torch.cuda.empty_cache()

    held = 0

    def again() -> str:
        nonlocal held
        clean()
        held = torch.cuda.memory_allocated()
        try:
            _one_step(4)
        except torch.OutOfMemoryError:
            return "OOM"
        return tr(ko="끝까지 갔다", en="came to its end")

    with virtual_gpu.cuda("T4"):
        failed, result = False, ""
        try:
            _one_step(24)
        except torch.OutOfMemoryError:
            failed = True
            if where == "inside":
                result = again()
        if failed and where == "after":
            result = again()
    heads = (tr(ko="다시 하기 전에 살아 있는 것", en="alive before the retry"), tr(ko="배치 4", en="batch 4"))
    return LeftRows(heads, [[human_bytes(held), result]])


def _one_step(batch_size: int) -> None:
    model = small_gpt(layers=2).cuda()
    hidden = [torch.zeros(batch_size, 1024, dtype=torch.long, device="cuda")]
    model(input_ids=hidden[0], labels=hidden[0]).loss.backward()


def _judge_retry(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    for name in changes:
        choose(name, ("where", "empty_cache", "collect"), tr(ko="설정", en="setting"))
    held, result = _retry(**changes)[0]
    if result == "OOM":
        return tr(ko=f"또 죽는다. {held}가 아직 살아 있다.", en=f"It dies again: {held} are alive still.")
    if set(changes) != {"where"}:
        return tr(ko="된다. 그런데 바꿀 것은 하나면 된다.", en="It works; one change alone does, too.")
    return right(tr(ko=f"남은 것 {held}.", en=f"{held} are left."))


CASES = {
    "10-B": lambda: Case(
        "10-B",
        _judge_why,
        lambda: [
            tr(
                ko="seed만 바꾸어 두어 번 실행한다. 죽는 스텝이 같은가?",
                en="A few runs that differ in seed: the same step?",
            ),
            tr(
                ko="새는 것이라면 죽기 전 스텝들의 최대는 어떤 모양이어야 하는가?",
                en="A leak: how would the peaks look?",
            ),
        ],
        'first = case("10-B").run(seed=4)\nsecond = case("10-B").run(seed=9)\n'
        'shorter = case("10-B").run(max_length=512)\nanswer = "longest"',
        experiment=_epoch,
        thread="huggingface/transformers #26284, allenai/allennlp #2515",
    ),
    "10-A": lambda: Case(
        "10-A",
        _judge_retry,
        lambda: [
            tr(ko="'다시 하기 전에 살아 있는 것'을 본다. 누가 붙들고 있는가?", en="See what is alive: who holds it?"),
            tr(ko="예외는 언제 사라지는가?", en="When does the exception go?"),
        ],
        'same = case("10-A").run(empty_cache=True, collect=True)\nchanges = {"where": "after"}',
        experiment=_retry,
        thread="pytorch/pytorch #27600, #10348",
    ),
}

EXERCISES = {
    "10-1": lambda: Exercise(
        "10-1",
        _judge_batches,
        lambda: [
            tr(
                ko="긴 것부터 정렬하면 배치의 첫 글이 그 배치의 길이다.",
                en="Sorted from the longest, the first is its length.",
            ),
            tr(
                ko="글 하나를 더했을 때 (글의 수 + 1) × 첫 글의 길이가 예산을 넘으면 새 배치를 연다.",
                en="Where (texts + 1) × the first one's length passes the budget, open another batch.",
            ),
        ],
        "def batches_of(lengths, budget):\n    batches = [[]]\n    for length in sorted(lengths, reverse=True):\n"
        "        if batches[-1] and batches[-1][0] * (len(batches[-1]) + 1) > budget:\n            batches.append([])\n"
        "        batches[-1].append(length)\n    return batches",
    ),
    "10-2": lambda: Exercise(
        "10-2",
        _judge_validation,
        lambda: [
            tr(
                ko="그래프를 만들지 않게 하는 것과, 값만 남기는 것. 둘이다.",
                en="No graph, and the value alone: two things.",
            ),
            "torch.no_grad(), .item()",
        ],
        "def validate(model, batches):\n    with torch.no_grad():\n"
        "        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in batches]\n"
        "    return sum(losses) / len(losses)",
    ),
}
