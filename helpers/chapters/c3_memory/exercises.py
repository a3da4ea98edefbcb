"""Chapter 3: what lies in GPU memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from virtual_gpu.drawing.labels import phase_label
from virtual_gpu.language import tr
from virtual_gpu.units import GiB, MiB, choose, human_bytes

from ...experiment import predict_memory
from ...self_check import Case, Empty, Exercise, compare, filled, right
from .loops import evaluate_with_trainer, goes_through, train_on_lengths
from .losses import loss_cost, loss_error, whole_loss

_LOGITS = {  # the four numbers whose product are the bytes of the message in 3.1
    16: tr(ko="배치 크기", en="the batch"),
    256: tr(ko="길이", en="the length"),
    30080: tr(ko="어휘의 크기", en="the vocabulary"),
    4: tr(ko="fp32의 바이트", en="the bytes of fp32"),
}


def _judge_tensor(sizes: Sequence[int]) -> str:
    sizes = list(filled(sizes))
    if wrong := compare(math.prod(filled(size) for size in sizes), 470 * MiB, tr(ko="곱", en="the product")):
        return wrong
    if missing := [name for size, name in _LOGITS.items() if size not in sizes]:
        return tr(
            ko=f"곱은 맞다. 그런데 무엇의 크기인지가 빠졌다: {', '.join(missing)}.",
            en=f"The product is right, but this is missing: {', '.join(missing)}.",
        )
    return right(tr(ko="토큰마다 어휘 전체에 매긴 점수, 로짓이다.", en="A score for each word at each token: logits."))


def _judge_largest_batch(batch: int) -> str:
    def fits(size: int) -> bool:
        return predict_memory(batch_size=size, sequence_length=512, gpu="T4").fits

    batch = filled(batch)
    here = predict_memory(batch_size=batch, sequence_length=512, gpu="T4")
    if not here.fits:
        return tr(ko=f"배치 크기 {batch}: {here.excess}", en=f"Batch {batch}: {here.excess}")
    if fits(batch + 1):
        left = human_bytes(here.capacity_bytes - here.needed_bytes)
        return tr(
            ko=f"배치 크기 {batch}: 들어간다. 아직 {left}가 남아 더 키울 수 있다.",
            en=f"Batch {batch} fits; {left} are left, so a larger one does too.",
        )
    return right(tr(ko=f"{batch + 1}부터는 넘친다.", en=f"{batch + 1} does not fit."))


BUDGET = 8 * GiB
_ALONE = ({"optimizer": "adamw_fused"}, {"optimizer": "adamw_8bit"}, {"gradient_checkpointing": True})


def _judge_budget(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    allowed = {"gradient_checkpointing", "optimizer", "precision", "attention"}
    for name in changes:
        choose(name, allowed, tr(ko="설정", en="setting"))
    if not str(changes.get("optimizer", "adamw")).startswith("adamw"):
        return tr(ko="이 문제에서는 Adam 계열 옵티마이저만 쓴다.", en="Only Adam's family counts here.")
    report = predict_memory(batch_size=8, gpu="T4", **changes)
    peak = human_bytes(report.needed_bytes)
    if report.needed_bytes > BUDGET:
        over = human_bytes(report.needed_bytes - BUDGET)
        return tr(
            ko=f"최대 {peak}, 예산을 {over} 넘는다. 최대가 되는 단계: {phase_label(report.peak_phase)}",
            en=f"Peak {peak}, {over} over the budget, in {report.peak_phase}.",
        )
    one_is_enough = any(predict_memory(batch_size=8, gpu="T4", **one).needed_bytes <= BUDGET for one in _ALONE)
    fewest = 1 if one_is_enough else 2
    if len(changes) > fewest:
        return tr(
            ko=f"최대 {peak}. 들어갔지만 설정을 {len(changes)}개 바꾸었다. {fewest}개로도 된다.",
            en=f"Peak {peak}: it fits, with {len(changes)} settings changed. {fewest} will do.",
        )
    return right(tr(ko=f"최대 {peak}.", en=f"Peak {peak}."))


def _judge_loss(loss: Callable) -> str:
    if not (error := loss_error(loss)) < 1e-5:
        return tr(
            ko=f"손실이나 그레이디언트가 틀렸다(상대 오차 {error:.2g}). 메모리는 그다음 문제다.",
            en=f"The loss or its gradients are wrong (relative error {error:.2g}): that comes before memory.",
        )
    cost, whole = loss_cost(loss), loss_cost(whole_loss)
    if cost.flops < whole.flops:  # the scores and two gradients are three products, whoever makes them
        return tr(
            ko="값은 맞지만 셀 수 없다. 속이 보이지 않는 연산(custom op)이 있다. PyTorch의 보통 연산으로 쓴다.",
            en="Right, but it cannot be counted: an opaque (custom) operation multiplies. Use plain operations.",
        )
    score = tr(
        ko=f"{human_bytes(cost.peak_bytes)}, 추가 연산 {cost.flops / whole.flops - 1:.0%}",
        en=f"{human_bytes(cost.peak_bytes)}, {cost.flops / whole.flops - 1:.0%} extra work",
    )
    best = tr(
        ko=f"알려진 가장 좋은 기록은 {human_bytes(BEST_LOSS_BYTES)}, 추가 연산 0%다.",
        en=f"The best known score is {human_bytes(BEST_LOSS_BYTES)} and no extra work.",
    )
    if cost.peak_bytes >= 1.25 * GiB or cost.flops > whole.flops:
        return tr(
            ko=f"값은 맞다. {score}. 1.25 GiB 아래, 추가 연산 없이도 된다.",
            en=f"Its values are right: {score}. Less than 1.25 GiB will do, without extra work.",
        )
    return right(f"{score}. {best}")


_SMALLEST_LOSS = """\
class GradientsAtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, labels, chunks=64):
        total, hidden_grad, head_grad = 0.0, torch.empty_like(hidden), torch.zeros_like(head)
        for h, y, h_grad in zip(hidden.chunk(chunks), labels.chunk(chunks), hidden_grad.chunk(chunks)):
            scores = (h @ head.T).float()
            total = total + torch.nn.functional.cross_entropy(scores, y, reduction="sum") / len(labels)
            scores = scores.softmax(-1)
            scores[torch.arange(len(y)), y] -= 1
            scores = (scores / len(labels)).to(h.dtype)
            torch.mm(scores, head, out=h_grad)
            torch.addmm(head_grad, scores.T, h, out=head_grad)
        ctx.save_for_backward(hidden_grad, head_grad)
        return total

    @staticmethod
    def backward(ctx, above):
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad.mul_(above), head_grad.mul_(above), None, None


def small_loss(hidden, head, labels):
    return GradientsAtOnce.apply(hidden, head, labels)
"""
BEST_LOSS_BYTES = 635_568_640  # what _SMALLEST_LOSS takes; a test counts it


EXERCISES = {
    "3-1": lambda: Exercise(
        "3-1",
        _judge_tensor,
        lambda: [
            tr(
                ko="470 MiB를 배치 16과 길이 256으로 나누어 본다. 토큰 하나에 몇 바이트인가?",
                en="Divide 470 MiB by the batch, 16, and the length, 256: how many bytes are a token's?",
            ),
            tr(
                ko="토큰 하나에 120,320바이트다. 은닉층 크기 2048과 어휘 30080 가운데 나누어떨어지는 것은?",
                en="120,320 bytes a token. Which divides it, the width 2048 or the vocabulary 30080?",
            ),
        ],
        "sizes = [16, 256, 30080, 4]",
    ),
    "3-2": lambda: Exercise(
        "3-2",
        _judge_budget,
        lambda: [
            tr(
                ko="무엇이 최대를 만드는지 먼저 본다: 스텝의 임시 텐서인가, 옵티마이저 상태인가, 순전파 상태인가?",
                en="See first what makes the peak: the step's temporaries, the state, or activations?",
            ),
            tr(
                ko="옵티마이저 상태를 줄이면 최대가 역전파로 옮겨 간다. 그때 남는 것은 순전파 상태다.",
                en="With a smaller state the peak moves to backward; what is left are activations.",
            ),
        ],
        'changes = {"optimizer": "adamw_8bit", "gradient_checkpointing": True}',
    ),
    "3-3": lambda: Exercise(
        "3-3",
        _judge_loss,
        lambda: [
            tr(
                ko="조각의 그레이디언트는 순전파에서 이미 알 수 있다. 소프트맥스에서 정답 자리만 1을 빼면 된다.",
                en="A piece's gradient is known in forward already: the softmax, less 1 at the label.",
            ),
            tr(
                ko="torch.autograd.Function의 forward에서 두 그레이디언트를 구해 두고 backward에서 돌려준다.",
                en="Make both gradients in the forward of a torch.autograd.Function, return them in its backward.",
            ),
            tr(
                ko="head의 그레이디언트에 더할 곱을 만들면 한 벌 더 든다. torch.addmm(…, out=…)은 제자리에서 더한다.",
                en="A product made beside head's gradient is one more copy of it; torch.addmm(…, out=…) adds in place.",
            ),
        ],
        _SMALLEST_LOSS,
    ),
    "3-4": lambda: Exercise(
        "3-4",
        _judge_largest_batch,
        lambda: [
            tr(
                ko="predict_memory(batch_size=…, sequence_length=512, gpu='T4').fits가 True인 가장 큰 수를 찾는다.",
                en="Find the largest batch for which predict_memory(…).fits is True.",
            ),
            tr(
                ko="한 번에 하나씩 늘려도 되고, 반씩 나누어 찾아도 된다.",
                en="Go up one by one, or bisect.",
            ),
        ],
        "largest_batch = 1\n"
        'while predict_memory(batch_size=largest_batch + 1, sequence_length=512, gpu="T4").fits:\n'
        "    largest_batch += 1",
    ),
}


def _judge_max_length(max_length: int) -> str:
    max_length = filled(max_length)
    if isinstance(max_length, bool) or not isinstance(max_length, int):
        return tr(ko=f"{max_length!r}: 토큰의 수여야 한다.", en=f"{max_length!r}: must be a number of tokens.")
    rows = train_on_lengths("item", max_length)
    if rows[-1][1] == "OOM":
        step = rows[-1][0]
        return tr(
            ko=f"{max_length}토큰에서 잘라도 스텝 {step}에서 멈춘다.",
            en=f"Cut at {max_length}: dies in step {step}.",
        )
    if goes_through(max_length + 32):
        return tr(
            ko=f"{max_length}이면 끝까지 간다. 그런데 덜 잘라도 간다.",
            en=f"{max_length} goes through, but it could be cut less.",
        )
    return right(
        tr(
            ko="새는 곳은 없었다. 가장 긴 배치 하나가 최대를 정한다.",
            en="Nothing leaked: the one longest batch decides.",
        )
    )


def _judge_evaluation(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    if not isinstance(changes, dict):
        raise Empty
    rows = evaluate_with_trainer(**changes)
    batches, peak, result = rows[0]
    if result.startswith("OOM"):
        return tr(
            ko=f"배치 {batches}에서 멈춘다. 모아 둔 것은 그대로다. {result}",
            en=f"It dies at batch {batches}: what is collected is the same. {result}",
        )
    if changes.get("keep") == "nothing":
        return tr(
            ko=f"끝까지 간다(최대 {peak}). 그러나 지표를 계산할 것이 남지 않는다.",
            en=f"It comes to its end (peak {peak}), but nothing is left for the metric.",
        )
    return right(
        tr(
            ko=f"최대 {peak}. 샘플 128개의 로짓은 모두 {human_bytes(128 * 512 * 50257 * 4)}다.",
            en=f"Peak {peak}. All logits of the 128 samples are {human_bytes(128 * 512 * 50257 * 4)}.",
        )
    )


CASES = {
    "3-A": lambda: Case(
        "3-A",
        _judge_max_length,
        lambda: [
            tr(
                ko="'스텝 뒤'가 늘어나는가? total을 바꾸면 달라지는가? 그렇다면 몇 바이트인가?",
                en='Does "after it" grow? Does it change with total, and by how many bytes?',
            ),
            tr(
                ko="늘어나지 않는다면 새는 것이 아니다. 스텝 안의 최대가 왜 스텝마다 다른지 생각한다.",
                en="If it does not grow, nothing leaks. Why is the peak another in every step?",
            ),
            tr(
                ko="멈춘 스텝의 배치만 길다. max_length를 반씩 좁혀 간다.",
                en="Only the batch it dies at is long: halve the range of max_length.",
            ),
        ],
        'with_item = case("3-A").run(total="item")\n'
        'shorter = case("3-A").run(max_length=512)\n'
        'between = case("3-A").run(max_length=544)\n'
        'too_long = case("3-A").run(max_length=576)\n'
        "max_length = 544",
        experiment=train_on_lengths,
        thread="huggingface/transformers #26284, allenai/allennlp #2515, facebookresearch/ParlAI #407",
    ),
    "3-B": lambda: Case(
        "3-B",
        _judge_evaluation,
        lambda: [
            tr(
                ko="메시지의 크기를 배치 하나의 로짓(배치 크기 × 512 × 50257 × 4바이트)으로 나누어 본다.",
                en="Divide the size in the message by one batch's logits (batch × 512 × 50257 × 4 bytes).",
            ),
            tr(
                ko="Trainer는 지표를 계산하려고 모든 배치의 로짓을 GPU에서 이어 붙인다. 지표가 쓰는 것은 무엇인가?",
                en="For a metric the Trainer joins all batches' logits, on the GPU. What of them does it need?",
            ),
        ],
        'smaller = case("3-B").run(batch_size=4)\nchanges = {"keep": "argmax"}',
        experiment=evaluate_with_trainer,
        thread="huggingface/transformers #8476, #7232",
    ),
}
