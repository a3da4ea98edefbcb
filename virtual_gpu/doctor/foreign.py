"""Messages that are not PyTorch's list of a card's memory, a few that only look like one: recognised and named."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..language import tr

# Of what a message speaks: the card, without numbers; a library's own call on it; the machine's memory; an inference
# engine's share of the card, or the cache in it; another framework; something that only looks like it; or gradients in
# a type that the scaler of fp16 refuses.
CARD, LIBRARY, HOST, OTHER, ELSE = "no_numbers", "library_call", "host_memory", "other_framework", "not_memory"
SHARE, CACHE = "engine_share", "engine_cache"
FP16, BF16 = "fp16_gradients", "bf16_gradients"


@dataclass(frozen=True)
class Foreign:
    """A message by its kind and its maker; `sure` as in a finding; `line`: where it stands."""

    kind: str
    name: str
    sure: str
    line: str


# kind, name, how sure, pattern; what stands first is the more telling
_KNOWN = [
    # vllm/v1/worker/utils.py and v1/core/kv_cache_utils.py, 0.8 to 0.33; csrc/cumem_allocator.cpp: an engine that wakes
    (CACHE, "vLLM", "certain",
     r"To serve at least one request with the model|No available memory for the cache blocks"
     r"|larger than the maximum number of tokens that can be stored in KV cache"),
    (SHARE, "vLLM", "certain",
     r"less than desired GPU memory utilization|out of memory at .{0,200}cumem_allocator\.cpp"),
    (OTHER, "MPS", "certain", r"MPS backend out of memory"),
    (OTHER, "JAX/XLA", "certain",
     r"(?:Xla|Jax)RuntimeError: RESOURCE_EXHAUSTED|RESOURCE_EXHAUSTED: Out of memory while trying"
     r"|RESOURCE_EXHAUSTED: .{0,200}XLA"),
    (OTHER, "TensorFlow", "certain",
     r"OOM when allocating tensor|ResourceExhaustedError|BFCAllocator.{0,40}ran out of memory"
     r"|GPU_\d{1,3}_bfc"),
    (OTHER, "CuPy", "certain", r"cupy.{0,60}OutOfMemoryError"),
    (OTHER, "llama.cpp", "certain",
     r"ggml.{0,80}(?:out of memory|failed to allocate)|cudaMalloc failed: out of memory"),
    (OTHER, "ROCm", "likely", r"hipErrorOutOfMemory|HIP error: out of memory"),
    (HOST, "DefaultCPUAllocator", "certain", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
    (HOST, "NumPy", "certain", r"Unable to allocate .{1,40} for an array with shape"),
    (HOST, "the kernel's OOM killer", "certain", r"Out of memory: Killed process|oom-kill|oom_reaper|OOMKilled"),
    (HOST, "the notebook's host", "certain",
     r"tried to allocate more memory than is available|crashed after using all available RAM"),
    (HOST, "shared memory (/dev/shm)", "certain",
     r"insufficient shared memory|unable to (?:mmap|open shared memory object)"),
    (ELSE, "Triton", "certain", r"out of resource: shared memory"),
    # torch/amp/grad_scaler.py, not its line `raise ValueError("…`; aten/src/ATen/native/cuda/AmpKernels.cu
    (FP16, "GradScaler", "certain", r"(?<!\(\")Attempting to unscale FP16 gradients"),
    (BF16, "GradScaler", "certain", r"_check_and_unscale_cuda. not implemented for .BFloat16"),
    (LIBRARY, "cuBLAS", "likely", r"CUBLAS_STATUS_ALLOC_FAILED"),
    (LIBRARY, "cuDNN", "likely", r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (LIBRARY, "NCCL", "likely", r"Cuda failure (?:2 )?'out of memory'|ncclUnhandledCudaError.{0,300}out of memory"),
    (LIBRARY, "cuSOLVER", "likely", r"CUSOLVER_STATUS_ALLOC_FAILED"),
    (CARD, "CUDA", "certain",
     r"CUDA error: out of memory|cuda runtime error \(2\)|cudaErrorMemoryAllocation"
     r"|CUDA_ERROR_OUT_OF_MEMORY"),
    (CARD, "CUDA", "certain",
     r"(?:CUDA|HIP|XPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
     r"|Allocation on device"),
    (LIBRARY, "cuBLAS", "possible", r"CUBLAS_STATUS_NOT_INITIALIZED"),
    (LIBRARY, "cuDNN", "possible", r"CUDNN_STATUS_NOT_INITIALIZED"),
    (HOST, "signal 9", "likely",
     r"exitcode: -9|SIGKILL|[Ss]ignal 9\b|exit code:? 137|returned -9"
     r"|^\s{0,8}(?:\[\d\]\+?\s{1,8})?Killed\b"),
    (HOST, "Python", "likely", r"^\s{0,8}MemoryError\b"),
]  # fmt: skip
_PATTERNS = [(kind, name, sure, re.compile(pattern)) for kind, name, sure, pattern in _KNOWN]
_LONGEST = 4000  # characters of a line that are looked at


def foreign(lines: tuple[str, ...]) -> Foreign | None:
    """The most telling message of the kinds above in these lines."""
    best: tuple[int, Foreign] | None = None
    for line in filter(None, lines):
        shown = line[:_LONGEST]
        for rank, (kind, name, sure, pattern) in enumerate(_PATTERNS[: best[0] if best else None]):
            if pattern.search(shown):
                best = rank, Foreign(kind, name, sure, shown.strip()[:300])
                break
    return best[1] if best else None


def says(found: Foreign) -> str:
    """What such a message is, in a sentence."""
    return {
        CARD: tr(
            ko="GPU 메모리가 부족하다는 오류지만 숫자가 없다. 무엇이 얼마나 차지했는지는 여기에서 알 수 없다.",
            en="The card's memory ran out, and this message has no numbers: what held how much cannot be read off it.",
        ),
        LIBRARY: tr(
            ko=f"{found.name} 쪽에서 잡으려던 메모리를 얻지 못했다. 이름은 다르지만 GPU 메모리 부족인 일이 많다.",
            en=f"{found.name} did not get memory that it asks the driver for: often a full card by another name.",
        ),
        HOST: tr(
            ko=f"GPU가 아니라 이 컴퓨터의 RAM(또는 /dev/shm)이 부족하다({found.name}). GPU 설정을 바꿔도 낫지 않는다.",
            en=f"It is the machine's RAM (or /dev/shm) that ran out, not the card's ({found.name}): settings that save "
            "GPU memory do not help.",
        ),
        SHARE: tr(
            ko=f"{found.name} 엔진이 카드에서 제 몫(gpu_memory_utilization × 카드 전체)을 얻지 못했다. 학습이나 다른 "
            "프로세스가 먼저 차지하고 있다.",
            en=f"The engine of {found.name} did not get its share (gpu_memory_utilization of all of the card): "
            "training or another process holds too much of it.",
        ),
        CACHE: tr(
            ko=f"{found.name} 엔진의 몫에 가중치를 올리고 나니, 가장 긴 글(max_model_len) 하나의 KV 캐시도 들어가지 "
            "않는다.",
            en=f"In the share of {found.name}'s engine the weights leave no room for the KV cache of one text of the "
            "longest length (max_model_len).",
        ),
        OTHER: tr(
            ko=f"{found.name}의 메시지다. 이 도구는 PyTorch의 CUDA 메시지만 읽으므로 여기까지만 말한다.",
            en=f"This is a message of {found.name}. Only PyTorch's messages of CUDA are taken apart here.",
        ),
        ELSE: tr(
            ko="커널 하나가 쓰는 칩 안의 공유 메모리가 모자란 것이고, GPU 메모리 부족이 아니다.",
            en="A kernel asked for more of the chip's shared memory than a block can have: no lack of GPU memory.",
        ),
        FP16: tr(
            ko="fp16 혼합 정밀도(fp16=True, GradScaler)를 켰는데 학습하는 가중치도 fp16이다. 그레이디언트의 형식은 그 "
            "가중치의 것이다. transformers 5는 dtype을 적지 않으면 체크포인트 파일의 형식으로 올린다.",
            en="fp16 mixed precision (fp16=True, GradScaler) is on, and the weights that are trained are fp16 too, so "
            "their gradients are. Without a dtype, transformers 5 loads weights in the checkpoint's type.",
        ),
        BF16: tr(
            ko="fp16 혼합 정밀도(fp16=True, GradScaler)를 켰는데 학습하는 파라미터가 bf16이다. TRL은 양자화한 모델의 "
            "어댑터를 bf16으로 바꾼다.",
            en="fp16 mixed precision (fp16=True, GradScaler) is on, and parameters that are trained are bf16. TRL "
            "makes the adapters of a quantized model so.",
        ),
    }[found.kind]


def rank(found: Foreign) -> int:
    """How telling a message is: the most is 0."""
    return next(at for at, known in enumerate(_KNOWN) if known[:3] == (found.kind, found.name, found.sure))
