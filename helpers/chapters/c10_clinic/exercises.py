"""Chapter 10's exercises and cases: batches by a budget, a validation that keeps nothing; two late deaths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import torch

import virtual_gpu
from virtual_gpu.language import tr
from virtual_gpu.units import choose, human_bytes

from ...rows import LeftRows
from ...self_check import Case, Exercise, filled, right
from .growth import small_gpt
from .lengths import Epoch, budget_batches, example_lengths
from .shapes import EXPANDABLE, SMALL, Shape, shape_of, varied_lengths

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


class _Ran(LeftRows):
    """What each step of case 10-B left, and the error that ended it."""

    def __init__(self, shape: Shape):
        heads = (
            tr(ko="스텝", en="step"),
            tr(ko="스텝 뒤 allocated", en="allocated after it"),
            tr(ko="그 스텝의 최대", en="most in it"),
            "reserved",
        )
        alive = zip(shape.held, shape.most, shape.reserved, strict=True)
        rows = [[step, *map(human_bytes, sizes)] for step, sizes in enumerate(alive, 1)]
        if shape.wanted:
            rows[-1][:2] = f"{rows[-1][0]} (OOM)", "–"  # it has no "after"
        super().__init__(heads, rows)
        ended = tr(ko="끝까지 갔다.", en="It came to its end.")
        self.said = shape.message.split(" If reserved but")[0] or ended

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self.said}"

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}<p>{escape(self.said)}</p>"


def _epoch(seed: int = 9, max_length: int = 512, empty_cache: bool = False, expandable: bool = False) -> _Ran:
    """Case 10-B: sixteen steps on a small virtual card, up to the death of one, step by step."""
    return _Ran(_shape(seed, max_length, empty_cache, expandable))


def _shape(seed: int = 9, max_length: int = 512, empty_cache: bool = False, expandable: bool = False) -> Shape:
    settings = EXPANDABLE if expandable else None
    return shape_of(SMALL, varied_lengths(seed, max_length), empty=empty_cache, settings=settings)


_WHY_NOT = {
    "leak": lambda: tr(
        ko="새는 것이라면 스텝 뒤에 남는 텐서가 늘어야 한다. 첫 스텝과 마지막에서 둘째 스텝을 비교한다.",
        en="A leak leaves more tensors after each step: compare the first step with the last but one.",
    ),
    "longest": lambda: tr(
        ko="그 배치가 커서 죽었다면 살아 있던 텐서에 T를 더한 것이 카드보다 커야 한다. 더해 본다.",
        en="Too large a batch would want more, with what was alive, than the card has: add the two.",
    ),
    "other_process": lambda: tr(
        ko="메시지의 전체에서 F를 뺀 것과 이 프로세스의 것을 비교한다.",
        en="Compare the message's total less what is free with this process's own.",
    ),
}


def _judge_why(answer: Mapping[str, Any]) -> str:
    answer = filled(answer)
    for name in answer:
        choose(name, ("why", "change"), tr(ko="칸", en="field"))
    causes = ("fragmentation", *_WHY_NOT)
    why, change = choose(filled(answer.get("why")), causes, tr(ko="까닭", en="cause")), filled(answer.get("change"))
    if why in _WHY_NOT:
        return _WHY_NOT[why]()
    for name in change:
        choose(name, ("seed", "max_length", "empty_cache", "expandable"), tr(ko="설정", en="setting"))
    shape = _shape(**change)
    if shape.wanted:
        step = len(shape.held)
        return tr(
            ko=f"까닭은 맞다. 그 설정으로는 스텝 {step}에서 죽는다.", en=f"The cause; but it dies in step {step}."
        )
    if not set(change) <= {"empty_cache", "expandable"}:
        return tr(ko="까닭은 맞다. 글은 그대로 두고 살린다.", en="The cause; now save it with the same texts.")
    most = human_bytes(max(shape.most))
    return right(tr(ko=f"텐서의 최대 {most}는 처음부터 들어갔다.", en=f"The tensors' peak, {most}, fitted all along."))


def _retry(where: str = "after", record: str = "error", empty_cache: bool = True, collect: bool = False) -> LeftRows:
    """Case 10-A: a step of 24 dies, something of the error is recorded, then one of 4 is tried."""
    import gc

    where, record = choose(where, ("inside", "after"), "where"), choose(record, ("error", "message"), "record")
    held = 0

    def again() -> str:
        nonlocal held
        if collect:
            gc.collect()
        if empty_cache:
            torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        try:
            _one_step(4)
        except torch.OutOfMemoryError:
            return "OOM"
        return tr(ko="끝까지 갔다", en="came to its end")

    with virtual_gpu.cuda("T4"):
        failed, result = None, ""
        try:
            _one_step(24)
        except torch.OutOfMemoryError as error:
            failed = error if record == "error" else str(error)
            if where == "inside":
                result = again()
        if failed and where == "after":
            result = again()
        failed = None
    heads = (tr(ko="다시 하기 전에 살아 있는 것", en="alive before the retry"), tr(ko="배치 4", en="batch 4"))
    return LeftRows(heads, [[human_bytes(held), result]])


def _one_step(batch_size: int) -> None:
    model = small_gpt(layers=2).cuda()
    hidden = [torch.zeros(batch_size, 1024, dtype=torch.long, device="cuda")]
    model(input_ids=hidden[0], labels=hidden[0]).loss.backward()


def _judge_retry(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    for name in changes:
        choose(name, ("where", "record", "empty_cache", "collect"), tr(ko="설정", en="setting"))
    held, result = _retry(**changes)[0]
    if result == "OOM":
        return tr(ko=f"또 죽는다. {held}가 아직 살아 있다.", en=f"It dies again: {held} are alive still.")
    if set(changes) != {"record"}:
        return tr(ko="된다. 그런데 바꿀 것은 하나면 된다.", en="It works; one change alone does, too.")
    return right(tr(ko=f"남은 것 {held}.", en=f"{held} are left."))


CASES = {
    "10-B": lambda: Case(
        "10-B",
        _judge_why,
        lambda: [
            tr(
                ko="세 열 가운데 늘어난 것은 어느 것인가? 나머지 둘은 무엇을 말하는가?",
                en="Which of the three columns grows, and what do the other two say?",
            ),
            tr(
                ko="메시지의 텐서(allocated)에 T를 더해 카드 전체와 비교하고, T를 F + R과 비교한다.",
                en="Compare the tensors and T together with the card, and T with F + R.",
            ),
        ],
        'first = case("10-B").run()\nsame_texts = case("10-B").run(expandable=True)\n'
        'answer = {"why": "fragmentation", "change": {"expandable": True}}',
        experiment=_epoch,
        thread="meta-pytorch/torchtune #1185, sgl-project/SpecForge #739",
    ),
    "10-A": lambda: Case(
        "10-A",
        _judge_retry,
        lambda: [
            tr(ko="'다시 하기 전에 살아 있는 것'을 본다. 누가 붙들고 있는가?", en="See what is alive: who holds it?"),
            tr(
                ko="except가 끝난 뒤에도 예외를 가리키는 이름이 있는가?", en="After except, does a name hold the error?"
            ),
        ],
        'same = case("10-A").run(collect=True)\nchanges = {"record": "message"}',
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
            tr(
                ko="`out`처럼 이름을 붙인 것은 다음 배치의 순전파 동안 살아 있다. 이름 없이 잇거나 끝에 `del` 한다.",
                en="What has a name (`out`) lives through the next batch's forward: give it none, or `del` it.",
            ),
            "torch.no_grad(), .item()",
        ],
        "def validate(model, batches):\n    with torch.no_grad():\n"
        "        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in batches]\n"
        "    return sum(losses) / len(losses)",
    ),
}
