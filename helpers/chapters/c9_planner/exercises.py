"""Chapter 9: the planner."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from virtual_gpu.cards import CATALOG, card
from virtual_gpu.errors import WrongValue
from virtual_gpu.language import tr
from virtual_gpu.plan import Plan, Recipe, anything_that_fits, cheapest, plan_training
from virtual_gpu.plan.measure import measure
from virtual_gpu.plan.request import make_request
from virtual_gpu.units import boolean, choose, human_bytes, positive_int

from ...self_check import Case, Exercise, filled, right
from . import program

_METHODS = ("full", "lora", "qlora")
MICRO_BATCHES = (1, 2, 4, 8, 16)


def _judge_largest(function: Callable[[float, float, float], int]) -> str:
    numbers = random.Random(8)
    # The chapter's own first, then one with room for nothing, one that just fits, and what chance gives.
    tried = [(5.01, 5.86, 14.25), (5.01, 5.86, 4.0), (10, 12, 16), (10, 12, 100)]
    for _ in range(20):
        one, more = numbers.randrange(4, 40), numbers.randrange(1, 9)
        tried.append((one, one + more, one + numbers.randrange(-4, 18 * more)))
    for one, two, limit in tried:
        expected = max((n for n in MICRO_BATCHES if one + (n - 1) * (two - one) <= limit), default=0)
        answer = filled(function(one, two, limit))
        if isinstance(answer, bool) or answer not in (0, *MICRO_BATCHES):
            return tr(
                ko=f"one={one}, two={two}, limit={limit}: {answer!r}이 나왔다. 0이나 {MICRO_BATCHES} 가운데 하나다.",
                en=f"one={one}, two={two}, limit={limit}: got {answer!r}, which is neither 0 nor of {MICRO_BATCHES}.",
            )
        if answer != expected:
            return tr(
                ko=f"one={one}, two={two}, limit={limit}: {expected}인데 {answer}가 나왔다.",
                en=f"one={one}, two={two}, limit={limit}: {expected}, not {answer}.",
            )
    return right()


def _with_margin(plan: Plan) -> str:
    """What is to be said of a plan that fits, where it would not with the chapter's margin."""
    if plan.needed_bytes * (1 + program.SPARE) <= plan.request.limit_bytes:
        return ""
    more = f"{program.SPARE:.0%}"
    return tr(ko=f" 여유 {more}를 두면 넘친다(9.9절).", en=f" With a margin of {more} it does not fit (9.9).")


TARGET = {"model": "meta-llama/Llama-3.1-8B", "length": 1024, "batch": 8}


def _judge_gpu(answer: Any) -> str:
    gpu = card(filled(answer)).name
    request = {**TARGET, "methods": ("lora",)}
    plan = cheapest(make_request(gpu=gpu, **request))
    found = f"{gpu}: {human_bytes(plan.needed_bytes)} / {human_bytes(plan.request.limit_bytes)}."
    if not plan.fits:
        return tr(ko=f"{found} 넘친다.", en=f"{found} Too much.")
    # A few MiB less do not make a smaller card.
    most = 0.98 * card(gpu).capacity_bytes
    smaller = [spec for spec in CATALOG.values() if spec.capacity_bytes < most and spec.platform == "cuda"]
    for spec in sorted(smaller, key=lambda s: s.capacity_bytes):
        if anything_that_fits(make_request(gpu=spec.name, **request)):
            return tr(ko=f"{found} 들어가지만 더 작은 GPU가 있다.", en=f"{found} It fits; so does a smaller GPU.")
    return right(found + _with_margin(plan))


NEED = {"model": "Qwen/Qwen3-14B", "gpu": "T4", "length": 16384, "batch": 8}


def _judge_change(changes: Any) -> str:
    changes = filled(changes)
    if not isinstance(changes, dict):
        return tr(ko=f"사전(dict)이 아니라 {changes!r}이 나왔다.", en=f"Got {changes!r}, not a dict.")
    for name in changes:
        choose(name, ("methods", "length", "batch", "optimizer", "lora_rank"), tr(ko="설정", en="setting"))
    request = {**NEED, "methods": ("full",), **changes}
    if request["length"] < 512 or request["batch"] < 8:
        return tr(
            ko="길이는 512 이상, 배치는 8 이상이어야 한다.", en="The length is at least 512, the batch at least 8."
        )
    plans = plan_training(**request)
    if not plans.best:
        return plans.verdict
    said = f"{plans.best!r}"
    longer = request["length"] + 64
    if anything_that_fits(make_request(**{**request, "length": longer})):
        said += tr(
            ko=f" (길이를 덜 줄여도 된다. {longer}도 들어간다.)",
            en=f" (The length need not be cut so far: {longer} fits too.)",
        )
    return right(said + _with_margin(plans.best))


def _llama_7b(vocab_size: int = 32000) -> Any:
    """The shape of LLaMA-7B (Touvron and others, 2023); Code Llama has 16 tokens more."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=11008,
        vocab_size=vocab_size,
    )


SAMPLES, CARDS = 128, (2, 4, 8)  # Alpaca's batch; how many of his eight cards the reporter of case 9-A may use


def _alpaca(gpus: int = 4, stage: int = 3, micro_batch: int = 4, checkpointing: bool = False) -> Plan:
    """All of LLaMA-7B in mixed precision with AdamW on RTX 3090s; what is not said is as in Alpaca's command."""
    for name, value, choices in (("gpus", gpus, CARDS), ("stage", stage, (2, 3))):
        if positive_int(value, name) not in choices:
            raise WrongValue(
                tr(ko=f"{name}={value}: 쓸 수 있는 값은 {choices}다", en=f"{name}={value}: one of {choices}")
            )
    together = gpus * positive_int(micro_batch, "micro_batch")
    if SAMPLES % together:
        raise WrongValue(
            tr(
                ko=f"micro_batch={micro_batch}: {SAMPLES}샘플을 {gpus} × {micro_batch}개씩으로 나눌 수 없다",
                en=f"micro_batch={micro_batch}: {SAMPLES} samples are no multiple of {gpus} × {micro_batch}",
            )
        )
    recipe = Recipe("full", "mixed_bf16", "adamw_fused", stage, boolean(checkpointing, "checkpointing"))
    asked = {"length": 512, "batch": SAMPLES, "methods": ("full",), "precision": recipe.precision}
    return measure(make_request(_llama_7b(), "RTX 3090", gpus, **asked), recipe, micro_batch, SAMPLES // together)


def _judge_alpaca(settings: Any) -> str:
    settings = filled(settings)
    for name in settings:
        choose(name, ("gpus", "stage", "micro_batch", "checkpointing"), tr(ko="설정", en="setting"))
    plan = _alpaca(**settings)
    found = f"{human_bytes(plan.needed_bytes)} / {human_bytes(plan.request.limit_bytes)}"
    if not plan.fits:
        return tr(ko=f"{found}. 넘친다.", en=f"{found}: too much.")
    if plan.extra_flops:
        more = f"+{plan.extra_flops / (plan.flops - plan.extra_flops):.0%}"
        return tr(ko=f"{found}. 들어가지만 추가 연산이 {more}다.", en=f"{found}: it fits, but computes more ({more}).")
    if _alpaca(plan.request.gpus, 3, 2 * plan.micro_batch).fits:
        return tr(
            ko=f"{found}. 들어가지만 누적이 더 적은 설정이 있다.",
            en=f"{found}: it fits, and so do fewer micro-batches.",
        )
    found = tr(ko=f"{found}, 누적 {plan.accumulation}번.", en=f"{found}, {plan.accumulation} micro-batches.")
    return right(found + _with_margin(plan))


GRAPH_BYTES, NEAR = 16e9, 0.02  # what the graph of case 9-B says of LoRA, and how near a setting has to come


def _code_llama(method: str = "lora", checkpointing: bool = False, targets: str = "attention", rank: int = 8) -> Plan:
    """Code Llama 7B with one sample of 2,048 tokens, on a card where everything has room."""
    method = choose(method, _METHODS, tr(ko="방법", en="method"))
    request = make_request(
        _llama_7b(32016), "B200", length=2048, batch=1, methods=(method,), lora_rank=rank, lora_targets=targets
    )
    recipe = Recipe(method, "mixed_bf16", "adamw_fused", checkpointing=boolean(checkpointing, "checkpointing"))
    return measure(request, recipe, 1, 1)


def _judge_graph(settings: Any) -> str:
    settings = filled(settings)
    for name in settings:
        choose(name, ("method", "checkpointing", "targets", "rank"), tr(ko="설정", en="setting"))
    if settings.get("method", "lora") != "lora":
        return tr(ko="그래프는 LoRA다. 다른 것을 바꾼다.", en="The graph is of LoRA: change something else.")
    plan = _code_llama(**settings)
    off = plan.needed_bytes / GRAPH_BYTES - 1
    found = f"{plan.needed_bytes / 1e9:.1f} GB"
    if abs(off) > NEAR:
        return tr(ko=f"{found}. 그래프의 16 GB와 {off:+.1%} 다르다.", en=f"{found}: {off:+.1%} from the graph's 16 GB.")
    return right(
        tr(
            ko=f"{found}, 그래프와 {off:+.1%}. 다른 설정도 같은 수가 될 수 있다. 숫자만으로는 설정을 알 수 없다.",
            en=f"{found}, {off:+.1%} from the graph. Other settings may come as near: a number alone tells no setting.",
        )
    )


CASES = {
    "9-A": lambda: Case(
        "9-A",
        _judge_alpaca,
        lambda: [
            tr(
                ko="--nproc_per_node는 GPU를 몇 장 쓰라는 말인가? 112 GB를 그 수로 나누면 24 GB보다 작은가?",
                en="How many cards does --nproc_per_node use? Is 112 GB, divided by them, less than 24 GB?",
            ),
            tr(
                ko="나눈 상태가 남긴 자리가 순전파 상태의 몫이다. 마이크로 배치를 두 배씩 키워 본다.",
                en="The room that the divided states leave is the activations': double the micro-batch while it fits.",
            ),
        ],
        'case("9-A").run(gpus=8, micro_batch=4)\ncase("9-A").run(gpus=8, micro_batch=2)\n'
        'settings = {"gpus": 8, "stage": 3, "micro_batch": 2}',
        experiment=_alpaca,
        thread="tatsu-lab/stanford_alpaca #73, #241, #56",
    ),
    "9-B": lambda: Case(
        "9-B",
        _judge_graph,
        lambda: [
            tr(
                ko="LoRA의 막대에서 가중치 말고 가장 큰 것은 무엇인가?",
                en="What is largest in LoRA's bar beside the weights?",
            ),
            tr(
                ko="그것을 버리고 다시 계산하면? 그래도 모자라는 몇 %는 어댑터의 크기다: 붙이는 층 × rank.",
                en="And if it is computed again? The few % that are missing then are adapters: layers × rank.",
            ),
        ],
        'case("9-B").run(checkpointing=True)\ncase("9-B").run(checkpointing=True, targets="all-linear", rank=16)\n'
        'settings = {"checkpointing": True, "targets": "all-linear", "rank": 16}',
        experiment=_code_llama,
        thread="RahulSChand/gpu_poor #1",
    ),
}

EXERCISES = {
    "9-1": lambda: Exercise(
        "9-1",
        _judge_largest,
        lambda: [
            tr(ko="샘플 하나가 더하는 것은 two - one이다.", en="Each sample adds two - one."),
            tr(
                ko="n개면 one + (n - 1) × (two - one)이다. 들어가는 n 가운데 가장 큰 것이 답이다.",
                en="n of them need one + (n - 1) × (two - one); the largest n that fits is the answer.",
            ),
        ],
        "def largest(one, two, limit):\n"
        "    fit = [n for n in (1, 2, 4, 8, 16) if one + (n - 1) * (two - one) <= limit]\n"
        "    return max(fit, default=0)",
    ),
    "9-2": lambda: Exercise(
        "9-2",
        _judge_change,
        lambda: [
            tr(
                ko="plan_training(...).changes가 하나만 바꾼다면 무엇이 되는지 알려 준다.",
                en="plan_training(...).changes says which single change makes room.",
            ),
            tr(ko="148억 파라미터를 T4에 두려면 4비트여야 한다.", en="14.8 billion parameters on a T4: in 4 bits."),
        ],
        'changes = {"methods": ("qlora",), "length": 12032}',
    ),
    "9-3": lambda: Exercise(
        "9-3",
        program.judge,
        lambda: [
            tr(
                ko="at_peak에서 가장 큰 셋이 무엇인지, 길이를 줄이면 그 셋이 줄어드는지 본다.",
                en="Which three are largest in at_peak, and would a shorter length make them smaller?",
            ),
            tr(
                ko="옵티마이저 상태는 아직 다 만들어지지 않았다. AdamW의 상태는 fp32 파라미터의 두 배다.",
                en="The optimizer's states are not all there yet: AdamW's are twice the parameters in fp32.",
            ),
        ],
        'answer = {"row": 1, "change": {"lora": True}}',
    ),
    "9-4": lambda: Exercise(
        "9-4",
        _judge_gpu,
        lambda: [
            tr(
                ko="80억 파라미터의 16비트 가중치는 16 GB다. LoRA는 이것을 줄이지 않는다.",
                en="8 billion parameters in 16 bits are 16 GB, and LoRA keeps them all.",
            ),
            tr(
                ko='plan_training(..., methods=("lora",))를 GPU의 이름을 바꾸어 가며 실행한다.',
                en='Run plan_training(..., methods=("lora",)) with other names of GPUs.',
            ),
        ],
        'gpu = "L4"',
    ),
}
