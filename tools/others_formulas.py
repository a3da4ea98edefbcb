"""Public formulas for training memory, for tools/others.py: what each asks of a training step, and what it answers.

Each is written anew from what its source computes, with that source's defaults, and answers None for a run that it is
not made for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

from accelerate.commands.estimate import estimate_training_usage

from virtual_gpu.units import MiB


@dataclass(frozen=True)
class Run:
    """A training step that was measured, in what formulas ask for.

    method: "full", "lora" or "qlora" (other_adapter: an adapter of another kind); bits: of the weights in memory;
    mixed: whether autocast computes in 16 bits; billions: the size in the model's name, parameters: counted; inner,
    gated: width of the MLP, and whether a third matrix gates it; scores: whether attention is known to keep its matrix
    of scores; segment: layers of a checkpointed segment, 0 without. Zeros where the row does not say. measured: bytes;
    ours: how far the virtual GPU is off, of a range from its nearest end, as in docs/errors.md.
    """

    name: str
    source: str
    method: str
    bits: int
    mixed: bool
    measured: int
    ours: float
    billions: float = 0.0
    parameters: int = 0
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    words: int = 0
    batch: int = 1
    length: int = 0
    adam: bool = True
    inner: int = 0
    gated: bool = False
    scores: bool = False
    segment: int = 0
    other_adapter: bool = False
    others: tuple[tuple[str, int], ...] = ()


def accelerate(run: Run) -> int | None:
    """`accelerate estimate-memory`, its own function: of the fp32 bytes, four times for Adam, batch 1."""
    if run.method != "full" or not run.parameters or not run.adam:
        return None
    kind = "float32" if run.bits == 32 and not run.mixed else "bfloat16"
    return max(estimate_training_usage(4 * run.parameters, kind).values())


def eleuther(run: Run) -> int | None:
    """EleutherAI/cookbook, calc/calc_transformer_mem.py (069ae2e, Apache-2.0), defaults, one GPU."""
    if run.method != "full" or run.bits != 32 or not run.layers or not run.adam:
        return None
    s, h, layers = run.length, run.hidden, run.layers
    parameters = 2 * run.words * h + h * s + 8 * h * layers + 2 * h + 4 * layers * h * h + 2 * layers * h * 4 * h
    weights = 2 if run.mixed else 4
    attention = 0 if run.segment else (2 * 2 + 1) * run.heads * s / h
    activations = s * run.batch * h * layers * (16 * 2 + 2 + attention)
    return int(parameters * (weights + 4 + 12) + activations)


def deepspeed(run: Run) -> int | None:
    """deepspeed 0.19.8, estimate_zero2_model_states_mem_needs (Apache-2.0): states only, one GPU, no offload."""
    return 2 * run.parameters + 18 * run.parameters if run.method == "full" and run.parameters and run.adam else None


def llama_factory(run: Run) -> int | None:
    """The table "Hardware Requirement" of LLaMA-Factory's README: GB by the billions in the model's name.

    Its first row is mixed precision; for training in fp32 alone it has none.
    """
    if not run.billions or not run.adam or (run.bits == 32 and not run.mixed):
        return None
    full = {32: 18.0, 16: 8.0}
    times = full[run.bits] if run.method == "full" else 2.0 if run.method == "lora" else 0.5
    return int(times * run.billions * 1e9)


def sixteen_bytes(run: Run) -> int | None:
    """The rule "16 bytes a parameter" (ZeRO, arXiv 1910.02054, section 3.1: mixed precision with Adam), states only."""
    return 16 * run.parameters if run.method == "full" and run.parameters and run.adam else None


def gpu_poor(run: Run) -> int | None:
    """RahulSChand/gpu_poor, src/App.js (ad2fc0e, no licence: its arithmetic in words of our own), less its 650 MiB.

    Those stand for the CUDA context, which no row it answers for has in it. All is in 16 bits, LoRA has rank 8 on four
    matrices, and the quantization is QLoRA's. Of the calculator's choices int8 and 4 bits without QLoRA are left out.
    """
    if run.bits != 16 or run.other_adapter or not (run.inner and run.length):
        return None
    h, length, layers = run.hidden, run.length, run.layers
    in_16_bits = 2 * (2 * run.words * h + layers * (4 * h * h + 3 * h * run.inner))
    states = 3 if run.adam else 1  # the gradient, and Adam's two
    if run.method == "full":
        weights, trained = in_16_bits, states * in_16_bits
    elif run.method == "lora":
        weights, trained = in_16_bits, states * layers * 4 * (2 * 8 * h) * 2
    else:
        weights = in_16_bits * (1 / 4 - 1 / 64 + 0.06)
        unpacked = 0.75 * layers * (15 * h + 6 * run.inner) * 50 * sqrt(max(length / 50, 1))
        trained = states * layers * 8 * h * 2 + unpacked * run.batch
    kept = run.batch * layers * length * (32 * h + 12 * run.inner + 8) + gpu_poor_scores(run)
    return ceil((weights + trained + kept * (0.15 if run.segment else 1)) / MiB) * MiB


def gpu_poor_scores(run: Run) -> int:
    """Of gpu_poor's answer the attention's scores: kept twice in 16 bits and once in 32."""
    return (2 + 4 + 2) * run.batch * run.layers * run.heads * run.length**2


def llm_analysis(run: Run) -> int | None:
    """cli99/llm-analysis, LLMAnalysis.training (d841e40, Apache-2.0), estimated_peak_memory_per_gpu, defaults, one GPU.

    Adam with a copy of the weights in fp32, tied embeddings. Recomputation keeps the input of every layer. The original
    stops where weights have 32 bits or FLOPs are not those of a plain MLP of 4h: checks of its time, not of its memory.
    """
    if run.method != "full" or run.bits != 32 or run.segment > 1 or not run.inner or not run.adam:
        return None
    h, tokens, width = run.hidden, run.batch * run.length, 2 if run.mixed else 4
    stream = tokens * h  # numbers in one hidden state
    layer = 4 * h * h + (3 if run.gated else 2) * h * run.inner + 2 * h
    parameters = run.layers * layer + run.words * h + h
    kept = width * stream
    if not run.segment:
        attention = 2 * run.heads * tokens * run.length if run.scores else 2 * stream + 4 * run.heads * tokens
        kept = width * (6 * stream + attention + 2 * tokens * run.inner) + stream + 2 * 4 * stream
    logits = width * run.words * tokens
    activations = run.layers * kept + width * stream + logits + 4 * stream
    grads, prefetched = 4 * parameters, 2 * width * layer
    return (width + 12) * parameters + max(activations, grads) + max(prefetched, logits)


FORMULAS: dict[str, tuple[Callable[[Run], int | None], str, str]] = {
    "accelerate estimate-memory": (
        accelerate,
        "배치 1에서 Adam으로 학습할 때의 상태. 순전파 상태는 세지 않는다",
        "[accelerate](https://github.com/huggingface/accelerate) 1.15, `estimate_training_usage`를 그대로 부른다",
    ),
    "EleutherAI calc_transformer_mem": (
        eleuther,
        "Megatron-DeepSpeed로 학습하는 GPT의 상태와 순전파 상태",
        "[EleutherAI/cookbook](https://github.com/EleutherAI/cookbook/blob/main/calc/calc_transformer_mem.py) 069ae2e",
    ),
    "llm-analysis": (
        llm_analysis,
        "혼합 정밀도에서 Adam으로 학습할 때의 상태에, 순전파 상태와 그레이디언트 가운데 큰 쪽, 미리 모아 두는 "
        "층과 로짓 가운데 큰 쪽을 더한 하한. 임베딩과 출력층은 가중치를 함께 쓰는 것으로 센다",
        "[cli99/llm-analysis](https://github.com/cli99/llm-analysis/blob/"
        "d841e40aec8c84b9e76ba9cfbce67418adb172bd/llm_analysis/analysis.py) d841e40(Apache-2.0), `training`의 식",
    ),
    "gpu_poor": (
        gpu_poor,
        "16비트로 하는 전체 미세 조정, LoRA, QLoRA의 최대 메모리. LoRA의 rank는 묻지 않고 8로 센다",
        "[RahulSChand/gpu_poor](https://github.com/RahulSChand/gpu_poor/blob/"
        "ad2fc0ef0e6ceeb7684363504eecc3342a5e7dc4/src/App.js) ad2fc0e(라이선스 없음. 식만 새로 썼다)",
    ),
    "DeepSpeed estimate_zero2": (
        deepspeed,
        "ZeRO-2 혼합 정밀도의 상태만(GPU 하나, 오프로드 없음)",
        "[DeepSpeed](https://github.com/deepspeedai/DeepSpeed) 0.19.8, `estimate_zero2_model_states_mem_needs`의 식",
    ),
    "LLaMA-Factory의 표": (
        llama_factory,
        "방법과 모델 이름의 크기에서 어림한 값. 길이와 배치를 묻지 않는다",
        "[LLaMA-Factory README](https://github.com/hiyouga/LLaMA-Factory#hardware-requirement)의 18x, 8x, 2x, x/2",
    ),
    "16바이트 규칙": (
        sixteen_bytes,
        "혼합 정밀도와 Adam의 상태만",
        "[ZeRO](https://arxiv.org/abs/1910.02054) 3.1절",
    ),
}
