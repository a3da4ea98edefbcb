"""Out-of-memory errors on purpose: their exact texts, beside the counters at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from .side import ON_CARD, counters, error_of, free_bytes, say, segments, settle

GIB, MIB = 2**30, 2**20


def gigabytes(count: float, **where: Any) -> torch.Tensor:
    return torch.empty(int(count * GIB), dtype=torch.uint8, device="cuda", **where)


def dies(name: str, program: Callable[[], Any], **more: Any) -> None:
    """Run it; the row has the error, what was counted when it was caught, and what the driver had."""
    settle()
    torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"error": None, **more}
    try:
        program()
        torch.cuda.synchronize()
    except Exception as error:
        row["error"] = error_of(error)
        row["at_death"] = counters() | {"free": free_bytes()}
        found = torch.cuda.memory_stats()
        row["stats"] = {key: value for key, value in found.items() if ".all." in key or "." not in key}
        error.__traceback__ = None
    say(name, after=counters(), **row)
    settle()


def plain() -> None:
    """One process, by several settings of the allocator (by environment)."""
    room = free_bytes()[0] / GIB
    dies("first request too large", lambda: gigabytes(100))
    held: list[Any] = []

    def filled() -> None:
        while True:
            held.append(gigabytes(5))

    dies("five by five", filled)
    held.clear()

    def fragmented() -> None:
        while free_bytes()[0] > 3 * GIB:  # every second of two pieces of a segment goes
            first, second = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda"), None
            del first
            held.append(torch.empty(300 * MIB, dtype=torch.uint8, device="cuda"))
            second = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
            del second
            held.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))
        say("segments before", segments=len(segments()), **counters())
        gigabytes(4)

    dies("fragmented", fragmented)
    held.clear()

    def odd() -> None:
        held.append(gigabytes(room - 2))
        held.append(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))
        torch.empty(int(2.345 * GIB) + 12345, dtype=torch.uint8, device="cuda")

    dies("an odd size", odd)
    held.clear()

    def small() -> None:
        held.append(gigabytes(int(room)))
        while True:
            held.append(torch.empty(700 * 1024, dtype=torch.uint8, device="cuda"))

    dies("small pieces", small)
    held.clear()
    torch.cuda.set_per_process_memory_fraction(0.25)
    dies("a quarter of the card", filled, fraction=0.25)
    held.clear()
    dies("a quarter, first too large", lambda: gigabytes(30), fraction=0.25)
    torch.cuda.set_per_process_memory_fraction(1.0)


def model() -> None:
    """Chapter 10's loop at a batch that no card has room for; the message has frames of a real program."""
    from transformers import AutoModelForCausalLM

    from .side import path_of

    def train(batch: int, length: int = 1024) -> None:
        net = AutoModelForCausalLM.from_pretrained(path_of("openai-community/gpt2")).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for _ in range(2):
            tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
            net(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    for batch in (48, 64, 72, 96):
        dies(f"gpt2, batch {batch}", lambda batch=batch: train(batch), batch=batch)


def another() -> None:
    """Another process holds 20 GiB meanwhile."""
    code = (
        "import torch,time\nx=torch.empty(20*2**30,dtype=torch.uint8,device='cuda')\n"
        "print('held',flush=True)\ntime.sleep(60)"
    )
    if not ON_CARD:
        say("no other process on a virtual card")
        return
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    say("other process", pid=child.pid, own=os.getpid(), free=free_bytes())
    held: list[Any] = []

    def filled() -> None:
        while True:
            held.append(gigabytes(5))

    dies("beside another process", filled)
    held.clear()
    dies("first request, beside another", lambda: gigabytes(70))
    child.terminate()
    child.wait(20)
    time.sleep(0.5)
    say("other gone", free=free_bytes())


def graphs() -> None:
    """Memory in private pools is named in the message."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    x = torch.zeros(256 * MIB, device="cuda")
    with torch.cuda.graph(graph, pool=pool):
        y = x * 2
    say("captured", **counters(), segments=segments())
    dies("with a graph's pool", lambda: gigabytes(90))
    del graph, y


def libraries() -> None:
    """What other libraries say when nothing is left: cuBLAS, cuDNN, cuSOLVER, NCCL, pinned memory, a handle."""
    from .card import _nccl

    torch.cuda.init()
    held: list[Any] = []

    def fill() -> None:
        for size in (1024, 256, 64, 20, 2):
            try:
                while True:
                    held.append(torch.empty(size * MIB - (MIB if size == 2 else 0), dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass

    x = torch.zeros(256, 256, device="cuda")
    half = torch.zeros(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    fill()
    say("full", free=free_bytes(), **counters())

    def raw(name: str, program: Callable[[], Any]) -> None:
        found = None
        try:
            program()
            torch.cuda.synchronize()
        except Exception as error:
            found = error_of(error)
        say(name, error=found, free=free_bytes(), **counters())

    raw("mm", lambda: x @ x)
    raw("linear", lambda: torch.nn.functional.linear(x, x, x[0]))
    raw("conv", lambda: torch.nn.functional.conv2d(x.view(1, 1, 256, 256), x[0, :9].view(1, 1, 3, 3)))
    raw("sdpa", lambda: torch.nn.functional.scaled_dot_product_attention(half, half, half))
    raw("sum", lambda: x.sum())
    raw("sort", lambda: x.sort())
    raw("fft", lambda: torch.fft.rfft(x))
    raw("svd", lambda: torch.linalg.svd(x))
    raw("inverse", lambda: torch.linalg.inv(x))
    raw("randn", lambda: torch.randn(10, device="cuda"))
    raw("cudaMalloc", _malloc)
    raw("pinned, too large", lambda: torch.empty(2**41, dtype=torch.uint8, pin_memory=True))
    raw("managed", _managed)
    raw("graph", _graph)
    raw("nccl", _nccl)
    held.clear()


def _graph() -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(10, device="cuda")
    with torch.cuda.graph(graph):
        x + 1


def _malloc() -> None:
    if ON_CARD:
        import ctypes

        pointer = ctypes.c_void_p()
        library = ctypes.CDLL("libcudart.so.13")
        code = library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2**34))
        library.cudaGetLastError()
        raise RuntimeError(f"cudaMalloc returned {code}")


def _managed() -> None:
    import bitsandbytes.functional as B

    page = B.get_paged(1024, 1024, dtype=torch.float32)
    B.fill(page, 0)
