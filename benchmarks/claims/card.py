"""The card itself: its memory, what the context and each library take of it, and what one process can have."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .side import counters, error_of, free_bytes, say

MIB = 2**20


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Memory2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu", ctypes.c_uint), ("compute", ctypes.c_uint),
    ]  # fmt: skip


class Nvml:
    """What nvidia-smi shows, of the first card; where the library is not there, nothing."""

    def __init__(self) -> None:
        try:
            self.lib = ctypes.CDLL("libnvidia-ml.so.1")
            self.lib.nvmlInit_v2()
            self.card = ctypes.c_void_p()
            self.lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.card))
        except OSError:
            self.lib = None

    def read(self) -> dict[str, Any]:
        if self.lib is None:
            return {}
        found: dict[str, Any] = {}
        one, two = _Memory(), _Memory2()
        two.version = ctypes.sizeof(_Memory2) | (2 << 24)
        if self.lib.nvmlDeviceGetMemoryInfo(self.card, ctypes.byref(one)) == 0:
            found["v1"] = {name: getattr(one, name) for name, _ in _Memory._fields_}
        if self.lib.nvmlDeviceGetMemoryInfo_v2(self.card, ctypes.byref(two)) == 0:
            found["v2"] = {name: getattr(two, name) for name, _ in _Memory2._fields_[1:]}
        count = ctypes.c_uint(32)
        processes = (_Process * 32)()
        if self.lib.nvmlDeviceGetComputeRunningProcesses_v3(self.card, ctypes.byref(count), processes) == 0:
            found["processes"] = [[processes[i].pid, processes[i].used] for i in range(count.value)]
        return found


def facts() -> None:
    """Names, versions, properties."""
    properties = torch.cuda.get_device_properties(0)
    names = [name for name in dir(properties) if not name.startswith("_")]
    found = {name: str(getattr(properties, name)) for name in names}
    said: dict[str, Any] = {"properties": found, "mem_get_info": free_bytes(), "torch": torch.__version__}
    said |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "pid": os.getpid()}
    for name, call in {
        "nccl": lambda: torch.cuda.nccl.version(), "capability": lambda: torch.cuda.get_device_capability(),
        "architectures": torch.cuda.get_arch_list, "runtime": lambda: torch._C._cuda_getCompiledVersion(),
        "driver": lambda: torch._C._cuda_getDriverVersion(),
        "preferred_blas": lambda: str(torch.backends.cuda.preferred_blas_library()),
        "sdp": lambda: {kind: bool(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")())
                        for kind in ("flash", "mem_efficient", "math", "cudnn")},
    }.items():  # fmt: skip
        try:
            said[name] = call()
        except Exception as error:
            said[name] = repr(error)
    say("facts", **said)
    for command in (["nvidia-smi"], ["nvidia-smi", "-q", "-d", "MEMORY,COMPUTE,ECC,CLOCK,POWER"], ["gcc", "--version"]):
        try:
            shown = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError) as error:
            shown = repr(error)
        say(" ".join(command), shown=shown[:6000])


def context() -> None:
    """What is gone of the card after each first use, beside what PyTorch reserved."""
    nvml = Nvml()
    last = 0

    def stage(name: str, call: Any = None) -> None:
        nonlocal last
        found: dict[str, Any] = {}
        started = time.perf_counter()
        try:
            if call is not None:
                call()
                torch.cuda.synchronize()
        except Exception as error:
            found["error"] = error_of(error)["text"][:600]
        found["seconds"] = round(time.perf_counter() - started, 3)
        if torch.cuda.is_initialized():
            free, total = free_bytes()
            outside = total - free - torch.cuda.memory_reserved()
            found |= {"free": free, "total": total, "outside": outside, "grown": outside - last} | counters()
            last = outside
        say(name, nvml=nvml.read(), **found)

    stage("imported")
    stage("init", lambda: (torch.cuda.init(), torch.cuda.current_stream().synchronize()))
    held: list[Any] = []
    stage("empty 4 bytes", lambda: held.append(torch.empty(1, device="cuda")))
    stage("fill (first kernel)", lambda: held[0].fill_(1.0))
    x = {d: None for d in ("float32", "float16", "bfloat16")}
    stage("randn", lambda: x.update({d: torch.randn(256, 256, device="cuda").to(getattr(torch, d)) for d in x}))
    stage("mm float32", lambda: x["float32"] @ x["float32"])
    stage("mm float16", lambda: x["float16"] @ x["float16"])
    stage("mm bfloat16", lambda: x["bfloat16"] @ x["bfloat16"])
    bias = torch.zeros(256)
    stage("linear with bias (cuBLASLt)", lambda: F.linear(x["float32"], x["float32"], bias.cuda()))
    stage("linear with bias, bf16", lambda: F.linear(x["bfloat16"], x["bfloat16"], bias.cuda().bfloat16()))
    stage("bmm", lambda: torch.bmm(x["float16"].view(4, 64, 256), x["float16"].view(4, 256, 64)))
    heads = torch.randn(1, 4, 128, 64)
    for name, backend in (("flash", "FLASH_ATTENTION"), ("efficient", "EFFICIENT_ATTENTION"),
                          ("cudnn", "CUDNN_ATTENTION"), ("math", "MATH")):  # fmt: skip

        def attend(backend: str = backend) -> None:
            q = heads.cuda().bfloat16().requires_grad_()
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
                F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

        stage(f"sdpa {name}", attend)
    stage("conv (cuDNN)", lambda: F.conv2d(torch.randn(1, 8, 32, 32).cuda(), torch.randn(8, 8, 3, 3).cuda()))
    stage("softmax, layer_norm, gelu", lambda: F.gelu(F.layer_norm(x["float32"].softmax(-1), (256,))))
    stage(
        "embedding backward, sort",
        lambda: (
            F.embedding(torch.zeros(4096, dtype=torch.int64, device="cuda"), x["float32"].detach().requires_grad_())
            .sum()
            .backward()
        ),
    )
    stage(
        "topk, sort, multinomial",
        lambda: (x["float32"].topk(5), x["float32"].sort(), x["float32"].softmax(-1).multinomial(1)),
    )

    def adam(**how: Any) -> None:
        p = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
        p.grad = torch.ones_like(p)
        torch.optim.AdamW([p], **how).step()

    stage("AdamW foreach", lambda: adam(foreach=True))
    stage("AdamW fused", lambda: adam(fused=True))
    stage("svd (cuSOLVER)", lambda: torch.linalg.svd(x["float32"]))
    stage("fft (cuFFT)", lambda: torch.fft.rfft(x["float32"]))
    stage("sparse (cuSPARSE)", lambda: x["float32"].to_sparse() @ x["float32"])

    def eight_bit() -> None:
        import bitsandbytes

        p = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
        p.grad = torch.ones_like(p)
        bitsandbytes.optim.AdamW8bit([p]).step()
        bitsandbytes.functional.quantize_4bit(x["bfloat16"])

    stage("bitsandbytes", eight_bit)

    def liger() -> None:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        logits = torch.randn(64, 1000, device="cuda", requires_grad=True)
        LigerCrossEntropyFunction.apply(logits, torch.zeros(64, dtype=torch.int64, device="cuda"), None)

    stage("triton (liger cross entropy)", liger)
    stage("pinned 1 MiB", lambda: held.append(torch.empty(MIB, dtype=torch.uint8).pin_memory()))
    stage("pinned 1 GiB", lambda: held.append(torch.empty(1024 * MIB, dtype=torch.uint8).pin_memory()))
    stage("a second stream, mm", lambda: _on_another(x["float32"]))
    stage("profiler", _profiled)
    stage("nccl, one rank", _nccl)
    stage("nccl, reduce scatter and gather", _collectives)


def _on_another(x: torch.Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        x @ x


def _profiled() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.ones(1000, device="cuda").sum()
        torch.cuda.synchronize()


def _group() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        dist.init_process_group("nccl", init_method=store.as_uri(), rank=0, world_size=1)


def _nccl() -> None:
    import torch.distributed as dist

    _group()
    dist.all_reduce(torch.ones(1000, device="cuda"))


def _collectives() -> None:
    import torch.distributed as dist

    _group()
    x, y = torch.ones(2**20, device="cuda"), torch.ones(2**20, device="cuda")
    dist.all_gather_into_tensor(x, y)
    dist.reduce_scatter_tensor(x, y)
    dist.broadcast(x, 0)


def library(which: str) -> None:
    """One first use alone, in a fresh process."""
    nvml = Nvml()
    torch.cuda.init()
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    free, total = free_bytes()
    start = total - free - torch.cuda.memory_reserved()
    x = torch.empty(256, 256, device="cuda")
    half = torch.empty(256, 256, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        if which == "fill":
            x.fill_(1)
        elif which == "mm32":
            x @ x
        elif which == "mm16":
            half @ half
        elif which == "lt16":
            F.linear(half, half, half[0])
        elif which == "conv":
            F.conv2d(x.view(1, 1, 256, 256), x.view(-1)[:9].view(1, 1, 3, 3))
        elif which == "flash":
            q = half.view(1, 4, 256, 64)
            F.scaled_dot_product_attention(q, q, q)
        elif which == "nccl":
            _nccl()
        elif which == "svd":
            torch.linalg.svd(torch.eye(64).cuda())

    error = None
    try:
        run()
        torch.cuda.synchronize()
    except Exception as found:
        error = error_of(found)
    free, total = free_bytes()
    outside = total - free - torch.cuda.memory_reserved()
    say(which, at_start=start, outside=outside, grown=outside - start, error=error, nvml=nvml.read(), **counters())


def most() -> None:
    """The largest one allocation, then the most in pieces, until the driver has no more; what is left then."""
    free, total = free_bytes()
    torch.empty(1, device="cuda")
    say("fresh", free=free, total=total, after_first=free_bytes())
    low, high = 1, free // (2 * MIB) + 2  # of 2 MiB: `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            x = torch.empty(middle * 2 * MIB, dtype=torch.uint8, device="cuda")
            del x
            low = middle
        except torch.OutOfMemoryError:
            high = middle
        torch.cuda.empty_cache()
    say("largest single", bytes=low * 2 * MIB, **counters())
    held = [torch.empty(low * 2 * MIB, dtype=torch.uint8, device="cuda")]
    error = None
    say("held", free=free_bytes(), **counters())
    count = 0
    try:
        while count < 20_000:
            held.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
            count += 1
    except torch.OutOfMemoryError as found:
        error = str(found)
    say("in pieces", pieces=count, free=free_bytes(), error=error, **counters())
    held.clear()
    torch.cuda.empty_cache()
    pieces: list[Any] = []
    try:
        while len(pieces) < 3000:
            pieces.append(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as found:
        error = str(found)
    say("in 32 MiB", pieces=len(pieces), free=free_bytes(), error=error, **counters())
    # what is there to have for kernels and handles that were not loaded yet
    told = {}
    for name, call in {"mm": lambda: pieces[0].view(torch.float32)[:65536].view(256, 256) @
                       pieces[0].view(torch.float32)[:65536].view(256, 256),
                       "conv": lambda: F.conv2d(pieces[0].view(torch.float32)[:65536].view(1, 1, 256, 256),
                                                pieces[0].view(torch.float32)[:9].view(1, 1, 3, 3)),
                       "svd": lambda: torch.linalg.svd(pieces[0].view(torch.float32)[:4096].view(64, 64)),
                       "nccl": _nccl}.items():  # fmt: skip
        try:
            call()
            torch.cuda.synchronize()
            told[name] = "ran"
        except Exception as found:
            told[name] = error_of(found)
    say("full card", told=told, free=free_bytes())
