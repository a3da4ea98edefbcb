"""What the libraries of products take: cuBLAS's workspace by stream, handle, thread and CUBLAS_WORKSPACE_CONFIG."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F

from .side import counters, error_of, keep_trace, say


def workspaces() -> None:
    """After each first call: what is allocated, beside the tensors that the program holds."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)
    size = 1024
    x = {d: torch.zeros(size, size, device="cuda", dtype=getattr(torch, d)) for d in ("float32", "float16", "bfloat16")}
    bias = {d: torch.zeros(size, device="cuda", dtype=getattr(torch, d)) for d in x}
    w = torch.zeros(size, size, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()

    def stage(name: str, call: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        error = None
        try:
            out = call()
            del out
            torch.cuda.synchronize()
        except Exception as found:
            error = error_of(found)["text"][:500]
        say(name, kept=torch.cuda.memory_allocated() - base, error=error, **counters())

    stage("nothing", lambda: None)
    for d in x:
        stage(f"mm {d}", lambda d=d: x[d] @ x[d])
    for d in x:
        stage(f"addmm {d}", lambda d=d: torch.addmm(bias[d], x[d], x[d]))
        stage(f"linear {d}", lambda d=d: F.linear(x[d], x[d], bias[d]))
        stage(f"linear+gelu {d}", lambda d=d: torch._addmm_activation(bias[d], x[d], x[d], use_gelu=True))
        stage(f"bmm {d}", lambda d=d: torch.bmm(x[d].view(4, 256, 1024), x[d].view(4, 1024, 256)))
        stage(f"mv {d}", lambda d=d: x[d] @ bias[d])
        stage(f"dot {d}", lambda d=d: torch.dot(bias[d], bias[d]))
    stage("expanded operand", lambda: x["float32"] @ bias["float32"].view(-1, 1).expand(size, 64))
    stage(
        "scaled mm fp8",
        lambda: torch._scaled_mm(
            x["float16"].to(torch.float8_e4m3fn),
            x["float16"].to(torch.float8_e4m3fn).t(),
            scale_a=torch.ones((), device="cuda"),
            scale_b=torch.ones((), device="cuda"),
            out_dtype=torch.bfloat16,
        ),
    )
    stage("int8 mm", lambda: torch._int_mm(x["float16"].to(torch.int8), x["float16"].to(torch.int8)))
    stage(
        "grouped mm",
        lambda: torch._grouped_mm(
            x["bfloat16"],
            x["bfloat16"].view(4, 256, 1024).repeat(1, 4, 1),
            offs=torch.tensor([256, 512, 768, 1024], dtype=torch.int32, device="cuda"),
        ),
    )
    stage("backward (autograd's thread)", lambda: F.linear(x["float32"], w).sum().backward())
    side = [torch.cuda.Stream() for _ in range(3)]
    for number, stream in enumerate(side):

        def there(stream: Any = stream) -> None:
            with torch.cuda.stream(stream):
                x["float32"] @ x["float32"]

        stage(f"mm on stream {number + 1}", there)

    def threaded() -> None:
        one = threading.Thread(target=lambda: x["float32"] @ x["float32"])
        one.start()
        one.join()

    stage("mm in another thread", threaded)
    stage("mm in a third thread", threaded)
    stage("cleared", lambda: torch._C._cuda_clearCublasWorkspaces())
    stage("mm again", lambda: x["float32"] @ x["float32"])
    stage("linalg.inv", lambda: torch.linalg.inv(torch.eye(64, device="cuda")))
    stage("cholesky", lambda: torch.linalg.cholesky(torch.eye(64, device="cuda")))
    stage("svd", lambda: torch.linalg.svd(torch.eye(64, device="cuda")))
    stage("qr", lambda: torch.linalg.qr(torch.eye(64, device="cuda")))
    stage("tf32", lambda: (torch.set_float32_matmul_precision("high"), x["float32"] @ x["float32"]))
    say("trace", trace=keep_trace("workspaces"))


def first(which: str) -> None:
    """One first product alone in its process."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=10_000)
    x = torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16)
    {"mm": lambda: x @ x, "linear": lambda: F.linear(x, x, x[0]), "bmm": lambda: torch.bmm(x[None], x[None])}[which]()
    torch.cuda.synchronize()
    say(which, **counters(), trace=keep_trace(which))
