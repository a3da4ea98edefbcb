"""Chapter 8: LoRA and QLoRA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from virtual_gpu.drawing.labels import phase_label
from virtual_gpu.language import tr
from virtual_gpu.report import MemoryReport
from virtual_gpu.step.setting import Setting
from virtual_gpu.units import choose, human_bytes

from ...experiment import predict_memory
from ...self_check import Case, Exercise, compare, filled, right
from .fine_tuning import fine_tune, pretrained_model
from .lora import trainable_parameters
from .runs import COUNT, Run, Runs

# (out, in) of the layers that get an adapter, and what they are: query_key_value, or all linear layers, of a model.
_LAYERS = {
    "100 × 100": [(100, 100)],
    "polyglot-ko-1.3b, query_key_value": [(6144, 2048)] * 24,
    "polyglot-ko-1.3b, all-linear": [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)] * 24,
}


def _judge_count(function: Callable[[list[tuple[int, int]], int], int]) -> str:
    for name, shapes in _LAYERS.items():
        for rank in (4, 8):
            expected = sum(rank * (out + into) for out, into in shapes)
            wrong = compare(function(list(shapes), rank), expected, f"{name}, r={rank}")
            if wrong:
                return wrong
    return right()


def _judge_merge(function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]) -> str:
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for out, into, rank, alpha in ((6, 4, 2, 4), (5, 8, 3, 3)):
        weight, a, b, x = numbers(out, into), numbers(rank, into), numbers(out, rank), numbers(10, into)
        answer = filled(function(weight.clone(), a.clone(), b.clone(), alpha))
        if not isinstance(answer, torch.Tensor) or answer.shape != weight.shape:
            shape = tuple(answer.shape) if isinstance(answer, torch.Tensor) else repr(answer)
            return tr(
                ko=f"W와 같은 모양 {tuple(weight.shape)}의 텐서를 돌려줘야 한다. 나온 것: {shape}",
                en=f"Return a tensor of W's shape {tuple(weight.shape)}; got {shape}.",
            )
        expected = x @ weight.T + (x @ a.T @ b.T) * alpha / rank
        error = float((x @ answer.T - expected).norm() / expected.norm())
        if error > 1e-9:
            return tr(
                ko=f"r={rank}, alpha={alpha}: 합친 가중치의 출력이 W와 어댑터를 따로 계산한 것과 {error:.1%} 다르다.",
                en=f"r={rank}, alpha={alpha}: the merged weight's outputs are off by {error:.1%}.",
            )
    return right()


TRAINABLE = 20_000_000


def _judge_budget(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    allowed = {"peft", "lora_rank", "lora_targets", "gradient_checkpointing", "optimizer"}
    for name in changes:
        choose(name, allowed, tr(ko="설정", en="setting"))
    setting = Setting(4, model_id="Llama-3.1-8B", sequence_length=512, **changes)
    count, _ = trainable_parameters(setting.model_id, setting.peft, setting.lora_rank, setting.lora_targets)
    report = predict_memory(setting, gpu="T4")
    found = tr(
        ko=f"학습하는 파라미터 {count:,}개, 최대 {human_bytes(report.needed_bytes)}.",
        en=f"{count:,} trainable parameters, peak {human_bytes(report.needed_bytes)}.",
    )
    if not report.fits:
        return tr(
            ko=f"{found} {report.excess} 최대가 되는 단계: {phase_label(report.peak_phase)}",
            en=f"{found} {report.excess} The peak is in {report.peak_phase}.",
        )
    if count < TRAINABLE:
        return tr(
            ko=f"{found} 들어가지만 학습하는 파라미터가 {TRAINABLE - count:,}개 모자란다.",
            en=f"{found} It fits; {TRAINABLE - count:,} trainable parameters are missing.",
        )
    return right(found)


# ---- cases ----------------------------------------------------------------------------------------------------------

ENOUGH = 30  # answers of 32
_REPORTED = {"rank": 16, "alpha": 32, "lr": 2e-3}  # the rate is the one that full fine-tuning learned with


@functools.cache
def _with_lora(rank: int, alpha: float, lr: float) -> Run:
    from virtual_gpu.models.adapters import add_adapters

    torch.manual_seed(1)
    model = add_adapters(pretrained_model(), rank, "all-linear", lora_alpha=alpha, lora_dropout=0.0)
    return fine_tune(model, f"r={rank}, alpha={alpha:g}, lr={lr:g}", lr=lr)


def train_with(**changes: float) -> Runs:
    """LoRA on the small model's new task, as reported but for what is named: rank (alpha stays twice it), alpha, lr."""
    for name in changes:
        choose(name, _REPORTED, tr(ko="설정", en="setting"))
    if "rank" in changes:
        changes = {"alpha": 2 * changes["rank"], **changes}
    return Runs([_with_lora(**{**_REPORTED, **changes})])


def _judge_learning(changes: dict[str, float]) -> str:
    changes = filled(changes)
    if len(changes) != 1:
        return tr(ko=f"하나만 바꾼다. 지금은 {len(changes)}개다.", en=f"Change one thing, not {len(changes)}.")
    (run,) = train_with(**changes)
    found = tr(ko=f"{run.name}: {COUNT}개 중 {run.learned}개.", en=f"{run.name}: {run.learned} of {COUNT}.")
    if run.learned < ENOUGH:
        missing = ENOUGH - run.learned
        return found + tr(ko=f" {ENOUGH}개까지 {missing}개가 모자란다.", en=f" {missing} short of {ENOUGH}.")
    return right(found)


_EIGHT_BILLION = {
    "model_id": "Llama-3.1-8B", "batch_size": 4, "sequence_length": 512, "optimizer": "adamw_fused",
}  # fmt: skip
_VARIED = ("peft", "precision", "gradient_checkpointing", "lora_rank", "optimizer")


def memory_with(**changes: Any) -> MemoryReport:
    """QLoRA on an A100-80GB as reported, without autocast and checkpointing, but for what is named."""
    for name in changes:
        choose(name, _VARIED, tr(ko="설정", en="setting"))
    return predict_memory(Setting(**{**_EIGHT_BILLION, "peft": "qlora", **changes}), gpu="A100-80GB")


def _judge_more_than_lora(changes: dict[str, Any]) -> str:
    changes = filled(changes)
    if len(changes) != 1 or "peft" in changes:
        return tr(ko="QLoRA인 채로 설정 하나만 바꾼다.", en="Keep QLoRA and change one setting.")
    lora, found = memory_with(peft="lora").needed_bytes, memory_with(**changes).needed_bytes
    sizes = f"QLoRA {human_bytes(found)}, LoRA {human_bytes(lora)}."
    if changes.get("gradient_checkpointing"):
        return sizes + tr(
            ko=" 줄었지만 늘어난 것을 버리고 다시 계산했을 뿐이다. 재계산 없이 늘어난 원인을 없애 본다.",
            en=" Less, but what had grown was thrown away and computed again. Remove its cause, without recomputation.",
        )
    if found >= lora:
        return sizes + tr(
            ko=f" 아직 {human_bytes(found - lora)}가 더 많다.", en=f" {human_bytes(found - lora)} too many still."
        )
    return right(sizes)


CASES = {
    "8-A": lambda: Case(
        "8-A",
        _judge_learning,
        lambda: [
            tr(
                ko="용량이 모자라서인가, 덜 움직여서인가? rank를 네 배로 키운 것과 학습률을 키운 것을 비교한다.",
                en="Too little room, or too little motion? Compare four times the rank with a higher rate.",
            ),
            tr(
                ko="학습률은 몇 배씩 바꾸어 본다. 두세 배로는 넓은 범위를 훑지 못한다.",
                en="Change the rate by large factors: twice or three times covers little ground.",
            ),
        ],
        'wider = case("8-A").run(rank=64)\nfaster = case("8-A").run(lr=0.01)\nchanges = {"lr": 0.01}',
        experiment=train_with,
        thread="baichuan-inc/Baichuan2 #211",
    ),
    "8-B": lambda: Case(
        "8-B",
        _judge_more_than_lora,
        lambda: [
            tr(
                ko="LoRA와 QLoRA의 at_peak을 종류별로 나란히 놓는다. 줄어든 것과 늘어난 것은 무엇인가?",
                en="Put at_peak of LoRA and QLoRA side by side: what shrank, and what grew?",
            ),
            tr(
                ko="순전파 상태가 두 배 가까이 되었다. 값의 개수가 늘었는가, 값 하나의 바이트가 늘었는가?",
                en="The activations nearly doubled. More values, or more bytes a value?",
            ),
        ],
        'lora = case("8-B").run(peft="lora")\n'
        'mixed = case("8-B").run(precision="autocast_bf16")\n'
        'changes = {"precision": "autocast_bf16"}',
        experiment=memory_with,
        thread="bitsandbytes-foundation/bitsandbytes #1569, meta-pytorch/torchtune #2255",
    ),
}


EXERCISES = {
    "8-1": lambda: Exercise(
        "8-1",
        _judge_count,
        lambda: [
            tr(
                ko="모양이 (out, in)인 층에서 A는 r × in, B는 out × r이다.",
                en="For a layer (out, in), A is r × in and B is out × r.",
            ),
            tr(ko="층마다 r × (out + in)을 더한다.", en="Add r × (out + in) over the layers."),
        ],
        "def lora_parameters(shapes, r):\n    return sum(r * (out + into) for out, into in shapes)",
    ),
    "8-2": lambda: Exercise(
        "8-2",
        _judge_merge,
        lambda: [
            tr(
                ko="xWᵀ + s·xAᵀBᵀ = x(W + s·BA)ᵀ이다. 모양을 맞추어 본다.",
                en="xWᵀ + s·xAᵀBᵀ = x(W + s·BA)ᵀ: check the shapes.",
            ),
            tr(
                ko="s는 alpha를 r로 나눈 값이다. r은 A의 행 수다.", en="s is alpha over r, and r is A's number of rows."
            ),
        ],
        "def merged_weight(W, A, B, alpha):\n    return W + B @ A * (alpha / A.shape[0])",
    ),
    "8-3": lambda: Exercise(
        "8-3",
        _judge_budget,
        lambda: [
            tr(
                ko="80억 파라미터는 16비트로 16 GB다. 가중치부터 줄여야 한다.",
                en="8 billion parameters are 16 GB in 16 bits: begin with the weights.",
            ),
            tr(
                ko="그래도 넘치면 남은 것은 순전파 상태다. 학습하는 파라미터의 수는 rank와 대상 층이 정한다.",
                en="What is left then are activations. Rank and target layers set the number of trainable parameters.",
            ),
        ],
        'changes = {"peft": "qlora", "gradient_checkpointing": True, "lora_targets": "all-linear"}',
    ),
}
